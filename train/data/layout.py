"""From a tokenised sample to the rows of one packed training row `[noisy rows of all docs | clean rows of all
docs]`.

Noisy (x_t) rows exist only where they carry a loss: a clean copy inside x_t is seen by nobody and trains
nothing, so leaving it out changes no logit and no loss (tests/unit/data/test_layout.py proves it against the full
2L layout). Knows nothing about objectives, models or files. Paper arXiv 2604.11035, section 3.1.

Shape letters: L tokens of one sample, T rows of one packed training row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from idlm.masks import PADDING_DOC

IGNORE_LABEL = -100
ROW_FIELDS = (
    "input_ids",
    "labels",
    "position_ids",
    "doc_ids",
    "block_starts",
    "reach",
    "mask_rates",
    "is_noisy",
)
CERTAIN = 1 << 20
"""A mask rate of 1. Rates are integers, which no trainer casts to 16 bits on their way to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`token_ids` int64 [L]; `supervised` bool [L], true where the token itself is a target; `origin` for
    messages.
    """

    token_ids: np.ndarray
    supervised: np.ndarray
    origin: str = ""

    def __post_init__(self) -> None:
        assert self.token_ids.shape == self.supervised.shape, (
            f"{self.token_ids.shape=} {self.supervised.shape=}"
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def from_pair(prompt_ids: Sequence[int], response_ids: Sequence[int], *, origin: str = "") -> Sample:
        """Prompt tokens are context, response tokens (the final eos among them) are targets."""
        token_ids = np.asarray([*prompt_ids, *response_ids], dtype=np.int64)
        return Sample(
            token_ids=token_ids, supervised=np.arange(len(token_ids)) >= len(prompt_ids), origin=origin
        )

    def piece(self, start: int, stop: int) -> Sample:
        """Tokens `start` to `stop`, without `stop`."""
        span = slice(start, stop)
        return Sample(token_ids=self.token_ids[span], supervised=self.supervised[span], origin=self.origin)

    def truncated(self, limit: int) -> Sample:
        """The first `limit` tokens."""
        return self.piece(0, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one document, all arrays of one length; `labels` is -100 where there is no target.

    `reach`: the last position that a row sees of its own half; None: its own. `mask_rates`: the chance, in
    parts of `CERTAIN`, at which a noisy row was masked, 0 where it was left open; None: all were masked.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    block_starts: np.ndarray
    labels: np.ndarray
    reach: np.ndarray | None = None
    mask_rates: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """The two halves of one document."""

    noisy: Rows
    clean: Rows

    def __len__(self) -> int:
        return len(self.noisy) + len(self.clean)


def target_flags(sample: Sample, mask_region: str) -> np.ndarray:
    """Bool [L]: whether position i has a supervised label, the token i+1; the last position never has one."""
    flags = np.zeros(len(sample), dtype=bool)
    flags[:-1] = True if mask_region == "all" else sample.supervised[1:]
    return flags


def clean_rows(sample: Sample, mask_region: str) -> Rows:
    """All L tokens in place; labels are shifted by one."""
    flags = target_flags(sample, mask_region)
    labels = np.full(len(sample), IGNORE_LABEL, dtype=np.int64)
    labels[:-1] = np.where(flags[:-1], sample.token_ids[1:], IGNORE_LABEL)
    positions = np.arange(len(sample), dtype=np.int64)
    return Rows(
        input_ids=sample.token_ids, positions=positions, block_starts=np.zeros_like(positions), labels=labels
    )


def noisy_rows(sample: Sample, *, mask_region: str, stride: int, mask_token_id: int) -> Rows:
    """One mask per supervised position; every maximal run of them is cut into blocks of `stride - 1` from its
    start.

    The first response token is therefore predicted on the masked path too: its mask sits on the last prompt
    position.
    """
    assert stride >= 2, f"{stride=}"
    flags = target_flags(sample, mask_region)
    positions = np.flatnonzero(flags).astype(np.int64)
    opens_run = np.ones(len(positions), dtype=bool)
    opens_run[1:] = np.diff(positions) != 1
    run_starts = positions[opens_run][np.cumsum(opens_run) - 1] if len(positions) else positions
    block_starts = positions - (positions - run_starts) % (stride - 1)
    return Rows(
        input_ids=np.full(len(positions), mask_token_id, dtype=np.int64),
        positions=positions,
        block_starts=block_starts,
        labels=sample.token_ids[positions + 1],
    )


def no_rows() -> Rows:
    """The noisy half of an objective that has none."""
    empty = np.zeros(0, dtype=np.int64)
    return Rows(input_ids=empty, positions=empty, block_starts=empty, labels=empty)


def pack_rows(documents: Sequence[SampleRows], num_rows: int, *, pad_token_id: int) -> dict[str, np.ndarray]:
    """One packed training row: arrays [T] named as in ROW_FIELDS, padded at the end, noisy halves first."""
    used = sum(len(document) for document in documents)
    assert used <= num_rows, f"{used=} {num_rows=}"
    packed = {name: np.zeros(num_rows, dtype=np.int64) for name in ROW_FIELDS}
    packed["input_ids"][:] = pad_token_id
    packed["labels"][:] = IGNORE_LABEL
    packed["doc_ids"][:] = PADDING_DOC
    packed["is_noisy"] = np.zeros(num_rows, dtype=bool)
    end = 0
    for noisy in (True, False):
        for doc_id, document in enumerate(documents):
            rows = document.noisy if noisy else document.clean
            span = slice(end, end + len(rows))
            packed["input_ids"][span] = rows.input_ids
            packed["labels"][span] = rows.labels
            packed["position_ids"][span] = rows.positions
            packed["doc_ids"][span] = doc_id
            packed["block_starts"][span] = rows.block_starts
            packed["reach"][span] = rows.positions if rows.reach is None else rows.reach
            packed["mask_rates"][span] = CERTAIN if rows.mask_rates is None else rows.mask_rates
            packed["is_noisy"][span] = noisy
            end = span.stop
    return packed
