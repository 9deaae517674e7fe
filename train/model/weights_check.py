"""Whether the weight files of a base are there and are those of its config, by their headers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idlm.checkpoint import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_NAMED = 4


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights, whether they exist or not; empty where nothing names any."""
    if (directory / INDEX).is_file():
        names = read_json(directory / INDEX).get("weight_map", {}).values()
        return [directory / name for name in sorted(set(names))]
    return [directory / SINGLE] if (directory / SINGLE).is_file() else []


def num_tensors(directory: Path) -> int | None:
    """Return how many tensors the weight files hold; None where there are none or one cannot be read."""
    try:
        return sum(len(_header(path)) for path in weight_files(directory)) or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_renamed(model: PreTrainedModel) -> bool:
    """Whether transformers stores the family's weights under other names (experts one by one)."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def weight_problems(
    directory: Path, expected: Mapping[str, tuple[int, ...]], *, is_renamed: bool = False
) -> list[str]:
    """What is wrong with the weights of `directory`, whose tensors should be `expected` (name to shape).

    Values are not read; of tensors that are tied only one has to be there. `is_renamed`: transformers stores
    the family under other names, so that a name may be missing.
    """
    files = weight_files(directory)
    if not files:
        return [f"model.path={directory} has no weights: neither {SINGLE} nor {INDEX}"]
    missing_files = [path.name for path in files if not path.is_file()]
    if missing_files:
        return [f"model.path={directory} lacks weight files that its index names: {_some(missing_files)}"]
    found: dict[str, tuple[int, ...]] = {}
    problems = []
    for path in files:
        try:
            found |= _header(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path} is damaged: {error}")
    if problems:
        return problems
    wrong = [name for name, shape in found.items() if name in expected and expected[name] != shape]
    if wrong:
        first = wrong[0]
        problems.append(
            f"{len(wrong)} tensors of {directory} are not of the shape that config.json says: {first} is "
            f"{list(found[first])}, not {list(expected[first])}"
        )
    missing = [name for name in expected if name not in found]
    # A checkpoint of the body alone names all of them otherwise.
    if missing and len(missing) < len(expected) and not is_renamed:
        problems.append(f"{len(missing)} tensors are in no file of {directory}: {_some(missing)}")
    return problems


def embedding_norm(directory: Path, name: str, row: int) -> float | None:
    """The norm of one row of a stored matrix; None where it cannot be read. Reads that row only."""
    from safetensors import SafetensorError, safe_open

    for path in weight_files(directory):
        try:
            with safe_open(str(path), framework="pt") as file:
                if name in file.keys():  # noqa: SIM118 - not a mapping
                    return float(file.get_slice(name)[row : row + 1].float().norm())
        except (OSError, SafetensorError):
            return None
    return None


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size:
            raise ValueError("its header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(length))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size != 8 + length + end:
        raise ValueError(f"it has {size} bytes, its header says {8 + length + end}")
    return {name: tuple(entry["shape"]) for name, entry in entries.items()}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
