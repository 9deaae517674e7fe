"""From tokenised samples to one packed training row `[noisy rows of all documents | clean rows of all
documents]`.

Noisy rows (x_t) exist only where they carry a loss: an unmasked token in x_t is seen by no row and has no
loss, so leaving it out changes neither logits nor loss (tests/unit/data/test_layout.py compares with the full
2L layout). Independent of objectives, models and files. Paper arXiv 2604.11035, section 3.1.

Shape letters: L tokens of one sample, T rows of one packed training row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
"""A mask rate of 1.

Rates are integers, because trainers cast floats to 16 bits on their way to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Tokens int64 [L] and flags bool [L], true where a token is a target; `origin` is for messages, `notes`
    name what of its record is not in it."""

    token_ids: np.ndarray
    supervised: np.ndarray
    origin: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.token_ids.shape == self.supervised.shape, (
            f"{self.token_ids.shape=} {self.supervised.shape=}"
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        """Supervised tokens after the first token, which nothing predicts."""
        return int(self.supervised[1:].sum())

    @staticmethod
    def from_pair(prompt_ids: Sequence[int], response_ids: Sequence[int], *, origin: str = "") -> Sample:
        """Prompt tokens are context, response tokens (with the final eos) are targets."""
        token_ids = np.asarray([*prompt_ids, *response_ids], dtype=np.int64)
        return Sample(
            token_ids=token_ids, supervised=np.arange(len(token_ids)) >= len(prompt_ids), origin=origin
        )

    def piece(self, start: int, stop: int) -> Sample:
        span = slice(start, stop)
        return replace(self, token_ids=self.token_ids[span], supervised=self.supervised[span])


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One half of a document, int64 arrays [rows]; `labels` is -100 where there is no target.

    `reach`: the last position of its own half that a row sees; None: its own position. `mask_rates`:
    probability, in parts of `CERTAIN`, with which a noisy row was masked, 0 where it shows its token; None:
    all are masks."""

    input_ids: np.ndarray
    positions: np.ndarray
    block_starts: np.ndarray
    labels: np.ndarray
    reach: np.ndarray | None = None
    mask_rates: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


_EMPTY = np.zeros(0, dtype=np.int64)
NO_ROWS = Half(input_ids=_EMPTY, positions=_EMPTY, block_starts=_EMPTY, labels=_EMPTY)
"""The noisy half of objectives without masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    noisy: Half
    clean: Half

    def __len__(self) -> int:
        return len(self.noisy) + len(self.clean)


def target_flags(sample: Sample, mask_region: str) -> np.ndarray:
    """Return bool [L], true where the next token is supervised; the last position has no next token."""
    flags = np.zeros(len(sample), dtype=bool)
    flags[:-1] = True if mask_region == "all" else sample.supervised[1:]
    return flags


def clean_rows(sample: Sample, mask_region: str) -> Half:
    """Return all L tokens in place; the label of row i is token i+1."""
    flags = target_flags(sample, mask_region)
    labels = np.full(len(sample), IGNORE_LABEL, dtype=np.int64)
    labels[:-1] = np.where(flags[:-1], sample.token_ids[1:], IGNORE_LABEL)
    positions = np.arange(len(sample), dtype=np.int64)
    return Half(
        input_ids=sample.token_ids, positions=positions, block_starts=np.zeros_like(positions), labels=labels
    )


def noisy_rows(sample: Sample, *, mask_region: str, stride: int, mask_token_id: int, phase: int = 0) -> Half:
    """Return one mask per supervised position; each run of positions is cut into blocks of `stride - 1`
    masks, the first of which lacks its last `phase` masks.

    A mask at position i predicts token i+1, so the first response token has its mask at the last prompt
    position."""
    assert stride >= 2, f"{stride=}"
    flags = target_flags(sample, mask_region)
    positions = np.flatnonzero(flags).astype(np.int64)
    opens_run = np.ones(len(positions), dtype=bool)
    opens_run[1:] = np.diff(positions) != 1
    run_starts = positions[opens_run][np.cumsum(opens_run) - 1] if len(positions) else positions
    first_starts = positions - (positions - run_starts + phase) % (stride - 1)
    block_starts = np.maximum(first_starts, run_starts)
    return Half(
        input_ids=np.full(len(positions), mask_token_id, dtype=np.int64),
        positions=positions,
        block_starts=block_starts,
        labels=sample.token_ids[positions + 1],
    )


def pack_rows(documents: Sequence[SampleRows], num_rows: int, *, pad_token_id: int) -> dict[str, np.ndarray]:
    """Return one packed training row: ROW_FIELDS as arrays [num_rows], noisy halves first, padding last."""
    used = sum(len(document) for document in documents)
    assert used <= num_rows, f"{used=} {num_rows=}"
    padding = {"input_ids": pad_token_id, "labels": IGNORE_LABEL, "doc_ids": PADDING_DOC}
    packed = {name: np.full(num_rows, padding.get(name, 0), dtype=np.int64) for name in ROW_FIELDS}
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
