"""What the files of a base hold: its weights (headers, one row of a matrix, two equal tensors), and
its generation config.

transformers loads any `generation_config.json` and warns, but refuses to save values that do not
fit together once one of them has changed: a run would train up to its first checkpoint and lose it there."""

from __future__ import annotations

import copy
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open

from idlm.checkpoint import check_file
from idlm.errors import UserError
from idlm.files.tensors import Stored, stored_tensors

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from idlm.train.config.schema import TrainConfig

log = logging.getLogger(__name__)
GENERATION_CONFIG = "generation_config.json"
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of dtypes in safetensors headers, and torch's names."""
QUANTISED_KEYS = ("quantization_config", "compression_config", "quantization")
"""Of config.json; the last is that of MLX."""
QUANTISED_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that AutoGPTQ, AWQ and ModelOpt write next to config.json."""
CODES = ("weight", "qweight", "weight_packed", "_blocks")
"""Endings of names whose values are codes where they are integers."""


def base_tensors(directory: Path) -> dict[str, Stored]:
    """All tensors of a base by name. UserError as in `stored_tensors`, which refuses copies, because
    transformers takes the last one whichever the index names; IDLM-0544: they are quantised."""
    found = stored_tensors(directory, refuse_copies=True)
    if codes := [name for name, one in found.items() if _is_code(name, one.dtype)]:
        raise _quantised(directory, f"{codes[0]} holds {found[codes[0]].dtype}")
    return found


def refuse_quantised(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError IDLM-0544 where config.json, or a file next to it, describes quantised weights."""
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    given = [section[key] for section in sections for key in QUANTISED_KEYS if section.get(key) is not None]
    if given:
        values = given[0] if isinstance(given[0], dict) else {}
        method = values.get("quant_method") or values.get("quant_algo")
        if method is None and any(key.endswith(("load_in_4bit", "load_in_8bit")) for key in values):
            method = "bitsandbytes"
        raise _quantised(directory, f"config.json has {method or given[0]}")
    if found := next((name for name in QUANTISED_FILES if (directory / name).is_file()), None):
        raise _quantised(directory, f"it has a {found}")


def _quantised(directory: Path, how: str) -> UserError:
    return UserError(
        "IDLM-0544",
        f"the weights of model.path={directory} are quantised ({how}), and rounded weights cannot be trained",
        fix="use the checkpoint that it was made from, in bfloat16 or float32",
    )


def _is_code(name: str, dtype: str) -> bool:
    if dtype.startswith(("F8", "F6", "F4")):
        return True
    return dtype.startswith(("I", "U")) and name.endswith(CODES)


def readable_tensors(directory: Path) -> dict[str, Stored]:
    """All tensors; {} where `base_tensors` refuses them, which raises when the base is loaded."""
    try:
        return base_tensors(directory)
    except UserError:
        return {}


def stored_dtype(directory: Path) -> str | None:
    """The dtype of most elements in the weight files; None where there is none, or a file cannot be read."""
    counts: Counter[str] = Counter()
    for one in readable_tensors(directory).values():
        counts[one.dtype] += math.prod(one.shape)
    return STORED_DTYPES.get(counts.most_common(1)[0][0]) if counts else None


def without_equal_copies(stored: dict[str, Stored], tied: Mapping[str, str]) -> dict[str, Stored]:
    """`stored` without tensors of `tied` (name to the name that it is tied to) that equal their other one:
    where both are there, transformers ties them if they are equal. Reads those tensors."""
    copies = {
        name
        for name, other in tied.items()
        if name in stored and other in stored and _are_equal(stored[name], stored[other])
    }
    return {name: one for name, one in stored.items() if name not in copies}


def _are_equal(one: Stored, other: Stored, size: int = 1 << 24) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    a, b = (np.memmap(each.path, mode="r", offset=each.start, shape=each.size) for each in (one, other))
    return all(np.array_equal(a[i : i + size], b[i : i + size]) for i in range(0, one.size, size))


def embedding_norm(directory: Path, name: str, row: int) -> float | None:
    """The norm of one row of a stored matrix; None where it cannot be read. Reads that row only."""
    stored = readable_tensors(directory).get(name)
    if stored is None:
        return None
    with safe_open(str(stored.path), framework="pt") as file:
        return float(file.get_slice(name)[row : row + 1].float().norm())


def export_dtype(config: TrainConfig) -> str:
    """The dtype of published weights: `export.dtype`, else that of the base, else that of training. A gated
    adapter has no base weights: it keeps the dtype of training, float32."""
    if config.export.dtype is not None:
        return config.export.dtype
    if config.is_gated:
        return "float32"
    stored = None if config.model.path is None else stored_dtype(Path(config.model.path))
    return stored or config.model.dtype


def read_generation_config(directory: Path) -> GenerationConfig | None:
    """The generation config of a checkpoint directory, as `savable` returns it; None without a file."""
    from transformers import GenerationConfig

    if not (directory / GENERATION_CONFIG).exists():
        return None
    try:
        check_file(directory / GENERATION_CONFIG)
        config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(directory, str(error)) from error
    return savable(config, directory)


def savable(config: GenerationConfig, directory: Path) -> GenerationConfig:
    """`config` where transformers can save it. Else a copy with do_sample=true, if that was left open and is
    all that is missing (Llama-2-chat), or one without the values that are ignored. UserError IDLM-0541 where
    neither helps."""
    problem = _problem(config)
    if problem is None:
        return config
    fixed = copy.deepcopy(config)
    if config.do_sample is None:
        fixed.do_sample = True
        if _problem(fixed) is None:
            log.warning(
                "%s has sampling settings without do_sample: the export has do_sample=true", GENERATION_CONFIG
            )
            return fixed
        fixed.do_sample = None
    names = re.findall(r"^- `(\w+)`:", problem, flags=re.MULTILINE)
    for name in names:
        setattr(fixed, name, None)
    left = _problem(fixed)
    if left is not None or not names:
        raise _unreadable(directory, left or problem)
    log.warning("%s: transformers will not save these values: %s", GENERATION_CONFIG, ", ".join(names))
    return fixed


def _problem(config: GenerationConfig) -> str | None:
    try:
        config.validate(strict=True)
    except ValueError as error:
        return str(error)
    return None


def _unreadable(directory: Path, why: str) -> UserError:
    return UserError(
        "IDLM-0541",
        f"{directory / GENERATION_CONFIG} cannot be used: {why.splitlines()[0] if why else 'it is damaged'}",
        fix="correct the file, or remove it: the tokenizer's stop token is then used",
    )
