"""Which samples of a file are held out of training, for evaluations and the report.

Samples are chosen by a hash of the prompt that their record opens with. So turns of one conversation,
several answers to one prompt and copies of a record stay on one side, and the choice depends on the content
alone: not on the order of records, and hardly on records that are added."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from idlm.train.data.base import Source
from idlm.train.data.cache import pack, prompt_key
from idlm.train.data.mixture import CountedSource

if TYPE_CHECKING:
    from idlm.train.config.schema import EvalConfig

WANTED, SHARE_OF_FEW, TOO_FEW = 16, 0.1, 8
"""Samples that are held out at least, as far as that share of a small file allows; of fewer than 8, one for
evaluations and none for the report alone."""


def held_out_flags(config: EvalConfig, source: Source, *, seed: int) -> np.ndarray | None:
    """Return which samples are held out, bool [num_samples]; None where none are: of an endless source,
    beside eval.path or eval.split, with eval.holdout=0, and of data that is too little, or has one prompt."""
    is_separate = config.path is not None or config.split is not None
    if is_separate or source.num_samples is None or not config.holdout:
        return None
    num = source.num_samples
    if num < TOO_FEW and config.every is None:
        return None
    keys, group_of, sizes = np.unique(_prompt_keys(source, num), return_inverse=True, return_counts=True)
    wanted = max(1, round(config.holdout * num), min(WANTED, int(SHARE_OF_FEW * num)))
    maximum = min(num - 1, max(wanted, num // 2))
    order = np.argsort(keys ^ np.random.default_rng(seed).integers(np.iinfo(np.int64).max))
    is_chosen, total = np.zeros(len(keys), dtype=bool), 0
    for group in order:
        if total >= wanted:
            break
        # A prompt that most of the data answers is not held out.
        if total + sizes[group] <= maximum:
            is_chosen[group] = True
            total += int(sizes[group])
    return is_chosen[group_of.reshape(-1)] if total else None


def _prompt_keys(source: Source, num_samples: int) -> np.ndarray:
    """Return int64 [num_samples], read where they are not cached."""
    if isinstance(source, CountedSource):
        return source.prompt_keys
    samples = (source.sample(index) for index in range(num_samples))
    return np.asarray([prompt_key(pack(sample)) for sample in samples], dtype=np.int64)
