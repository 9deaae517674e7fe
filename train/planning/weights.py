"""What the dry run finds out about the weights of a base from their headers, and one row of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from idlm.checkpoint import INDEX_FILE, SINGLE_FILE, weight_files
from idlm.errors import some_of
from idlm.train.model.files import tensor_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_renamed(model: PreTrainedModel) -> bool:
    """Whether transformers stores the family's weights under other names (experts one by one)."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def weight_problems(
    directory: Path, expected: Mapping[str, tuple[int, ...]], *, is_renamed: bool = False
) -> list[str]:
    """Problems of the weights of `directory`, whose tensors should be `expected` (name to shape).

    Values are not read. Only one of several tied tensors has to be there. `is_renamed`: transformers stores
    the family under other names, so that a name may be missing.
    """
    files = weight_files(directory)
    if not files:
        return [f"model.path={directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}"]
    missing_files = [path.name for path in files if not path.is_file()]
    if missing_files:
        return [f"model.path={directory} lacks weight files that its index names: {some_of(missing_files)}"]
    found: dict[str, tuple[int, ...]] = {}
    problems = []
    for path in files:
        try:
            found |= tensor_shapes(path)
        except (OSError, SafetensorError) as error:
            problems.append(f"{path} is damaged: {error}")
    if problems:
        return problems
    wrong = [name for name, shape in found.items() if name in expected and expected[name] != shape]
    if wrong:
        problems.append(
            f"{len(wrong)} tensors of {directory} are not of the shape that config.json says: {wrong[0]} is "
            f"{list(found[wrong[0]])}, not {list(expected[wrong[0]])}"
        )
    missing = [name for name in expected if name not in found]
    # In a checkpoint of the body alone every name differs.
    if missing and len(missing) < len(expected) and not is_renamed:
        problems.append(f"{len(missing)} tensors are in no file of {directory}: {some_of(missing)}")
    return problems


def embedding_norm(directory: Path, name: str, row: int) -> float | None:
    """The norm of one row of a stored matrix; None where it cannot be read. Reads that row only."""
    for path in weight_files(directory):
        try:
            with safe_open(str(path), framework="pt") as file:
                if name in file.keys():  # noqa: SIM118 - not a mapping
                    return float(file.get_slice(name)[row : row + 1].float().norm())
        except (OSError, SafetensorError):
            return None
    return None
