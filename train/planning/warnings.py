"""What a run may do and its user may not mean: said by the dry run and when a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from idlm.errors import UserError, some_of
from idlm.files.records import SUFFIXES, find_files
from idlm.train.config.data import DataConfig, held_out_config
from idlm.train.config.schema import TrainConfig
from idlm.train.model.checks import num_positions


def run_warnings(config: TrainConfig, model_config: Any, lengths: np.ndarray) -> list[str]:
    """Sentences about a run whose samples have `lengths` [samples] in tokens."""
    found = [_beyond_positions(config, model_config, lengths), _trained_and_held_out(config)]
    return [f"warning: {text}" for text in found if text]


def _beyond_positions(config: TrainConfig, model_config: Any, lengths: np.ndarray) -> str | None:
    """Samples that training feeds at positions for which the model was not made."""
    limit, max_length = num_positions(model_config), config.train.max_length
    if limit is None or max_length <= limit:
        return None
    fed = lengths[lengths <= max_length] if config.train.overlong == "drop" else lengths.clip(max=max_length)
    beyond = int((fed > limit).sum())
    samples = f"{beyond:,} of {len(lengths):,} samples are longer" if beyond else "no sample is longer now"
    cut = " train.overlong=truncate" if beyond and config.train.overlong not in ("truncate", "drop") else ""
    return (
        f"train.max_length={max_length} exceeds the {limit:,} positions that the model is made for: "
        f"{samples}; set train.max_length={limit}{cut}"
    )


def _trained_and_held_out(config: TrainConfig) -> str | None:
    """Files of `eval.path` that are trained on too."""
    if config.eval.path is None:
        return None
    held_out = held_out_config(config.data, config.eval.path, config.eval.split)
    trained = {file for part in config.data.parts() for file in _files(part)}
    both = sorted(str(file) for file in trained & _files(held_out))
    if not both:
        return None
    return (
        f"eval.path={config.eval.path} holds {len(both)} of the files that are trained on ({some_of(both)}): "
        "what is measured on them says nothing of other data; move them out of data.path, or leave eval.path "
        "out, so that eval.holdout holds out a share"
    )


def _files(data: DataConfig) -> set[Path]:
    """The files of one source; none where it is no source of files or has none."""
    if data.source not in SUFFIXES or not data.path:
        return set()
    try:
        return {file.resolve() for file in find_files(data.path, SUFFIXES[data.source])}
    except UserError:
        return set()
