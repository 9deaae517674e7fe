"""The generation config of a base, and the dtype of what is published.

transformers loads whatever `generation_config.json` says and warns, but refuses to save values that do not
fit together once one of them has changed: a run would train up to its first checkpoint and lose it there."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from idlm.errors import UserError
from idlm.files.paths import check_file
from idlm.train.model.stored import stored_dtype

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from idlm.train.config.schema import TrainConfig

log = logging.getLogger(__name__)
GENERATION_CONFIG = "generation_config.json"


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
    if config.do_sample is None:
        sampled = copy.deepcopy(config)
        sampled.do_sample = True
        if _problem(sampled) is None:
            log.warning(
                "%s says how to sample but not whether: the export says do_sample=true", GENERATION_CONFIG
            )
            return sampled
    mended = copy.deepcopy(config)
    names = re.findall(r"^- `(\w+)`:", problem, flags=re.MULTILINE)
    for name in names:
        setattr(mended, name, None)
    left = _problem(mended)
    if left is not None or not names:
        raise _unreadable(directory, left or problem)
    log.warning("%s: transformers will not save these values: %s", GENERATION_CONFIG, ", ".join(names))
    return mended


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
