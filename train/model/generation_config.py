"""The generation config of a base, made one that transformers saves.

transformers loads whatever `generation_config.json` says and warns, but refuses to save what does not fit
together once anything in it was changed: a run would train up to its first checkpoint and lose it there.
"""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from idlm.errors import UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig

log = logging.getLogger(__name__)
FILE = "generation_config.json"


def read_generation_config(directory: Path) -> GenerationConfig | None:
    """That of a checkpoint directory, settled; None where there is no file. UserError IDLM-0541."""
    from transformers import GenerationConfig

    if not (directory / FILE).is_file():
        return None
    try:
        config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(directory, str(error)) from error
    return settled(config, directory)


def settled(config: GenerationConfig, directory: Path) -> GenerationConfig:
    """The same where it can be saved. Else with sampling switched on, if that was left open and is all that
    its values lack (Llama-2-chat), or without the values that nothing reads. UserError IDLM-0541 where that
    does not help.
    """
    problem = _problem(config)
    if problem is None:
        return config
    if config.do_sample is None:
        sampled = copy.deepcopy(config)
        sampled.do_sample = True
        if _problem(sampled) is None:
            log.warning("%s says how to sample but not whether: the export says do_sample=true", FILE)
            return sampled
    mended = copy.deepcopy(config)
    names = re.findall(r"^- `(\w+)`:", problem, flags=re.MULTILINE)
    for name in names:
        setattr(mended, name, None)
    left = _problem(mended)
    if left is not None or not names:
        raise _unreadable(directory, left or problem)
    log.warning("%s: values that transformers will not save are left out: %s", FILE, ", ".join(names))
    return mended


def _problem(config: GenerationConfig) -> str | None:
    """Why transformers would not save it."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        return str(error)
    return None


def _unreadable(directory: Path, why: str) -> UserError:
    return UserError(
        "IDLM-0541",
        f"{directory / FILE} cannot be used: {why.splitlines()[0] if why else 'it is damaged'}",
        fix="correct the file, or remove it: the tokenizer's stop token is then used",
    )
