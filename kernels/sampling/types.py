"""What the sampling ops pass around: laws of rows, laws that drafts were drawn from, the verdict on drafts.

A law is either the row of logits and eight numbers (on a GPU) or fp64 probabilities (on a CPU); which one is
the ops' business, so decoders treat both as opaque. Contract in README.md.
Shapes: X rows, V vocabulary, C chunks, Z lanes, J drafts, B sequences, A = J + 1, Y layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_NUMBERS = 8
NUM_VERDICT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the kernels divide a row. Another tuning may change a row's last bits, another batch never does.

    `chunk` tokens have a mass of their own. A program of the pass over all rows takes `tile` chunks by
    `num_warps` warps; one of the thresholds takes a row by `row_warps`. Its list of candidates holds
    `capacity` tokens, out of at most `listed` chunks, which are read `group` at a time; rows where they are
    more are sampled (`sample` tokens) and read by `step` tokens at a time. `pdl`: programmatic dependent
    launch.
    """

    chunk: int = 512
    tile: int = 16
    num_warps: int = 4
    row_warps: int = 8
    capacity: int = 512
    listed: int = 128
    group: int = 8
    sample: int = 8192
    step: int = 2048
    pdl: bool = False

    def __post_init__(self) -> None:
        sizes = (self.chunk, self.tile, self.capacity, self.group, self.sample, self.step)
        warps = (self.num_warps, self.row_warps)
        assert all(size & (size - 1) == 0 < size for size in (*sizes, *warps)), f"{self=}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProbs:
    """Laws as logits (not copied, so they must stay as they are) and numbers.

    Token i is kept iff l_i > threshold or l_i = threshold and i <= tie_id; its probability is then
    2^((l_i - max) * scale) / mass. `numbers_XF` fp64: max, scale = log2(e) / temperature, threshold, tie_id,
    mass, id of the largest logit; where laws know the model's own, its mass and entropy (nats).
    `masses_XC` fp32: kept mass of each chunk.
    """

    logits_XV: Tensor
    numbers_XF: Tensor
    masses_XC: Tensor
    tuning: Tuning

    @property
    def max_X(self) -> Tensor:
        """Largest logit."""
        return self.numbers_XF[:, 0]

    @property
    def threshold_X(self) -> Tensor:
        """Smallest logit that is kept; -inf without filters."""
        return self.numbers_XF[:, 2]

    @property
    def tie_id_X(self) -> Tensor:
        """Last id that is kept among tokens whose logit is the threshold."""
        return self.numbers_XF[:, 3]

    @property
    def mass_X(self) -> Tensor:
        """Sum of the kept weights exp((l - max) / temperature)."""
        return self.numbers_XF[:, 4]

    @property
    def entropy_X(self) -> Tensor:
        """Of the model's own law."""
        return self.numbers_XF[:, 7]

    def __len__(self) -> int:
        return len(self.numbers_XF)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainProbs:
    """Laws as probabilities, fp64. `is_nonfinite_X` (bool): rows whose logits are no law; `own_XV`: the model's
    own, `best_X`: its likeliest token (None: nobody asked).
    """

    probs_XV: Tensor
    is_nonfinite_X: Tensor | None = None
    own_XV: Tensor | None = None
    best_X: Tensor | None = None

    def __len__(self) -> int:
        return len(self.probs_XV)


Probs = RowProbs | PlainProbs


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftProbs:
    """Per lane and draft position: its law's numbers and masses, and a copy of the chunks that have mass."""

    logits_ZJV: Tensor
    numbers_ZJF: Tensor
    masses_ZJC: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainDraftProbs:
    """Per lane and draft position: probabilities, fp64."""

    probs_ZJV: Tensor


Drafts = DraftProbs | PlainDraftProbs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTables:
    """Number of drafts of each layout; after a accepted ones, the rows (counted from the sequence's first, or
    -1) that the next drafts come from, and the layout that comes next. int64.
    """

    num_drafts_Y: Tensor
    draft_rows_YAJ: Tensor
    next_layouts_YA: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a step. Of an inactive sequence everything is 0, and rows are -1. All int64.

    `values_FB` holds the fields below; `token_ids_BA`: the accepted drafts, then the token that `emit` draws,
    then 0; `draft_rows_BJ`: rows that the next drafts come from, or -1.
    """

    values_FB: Tensor
    token_ids_BA: Tensor
    draft_rows_BJ: Tensor

    @classmethod
    def empty(cls, num_sequences: int, num_masks: int, device: torch.device) -> Verdict:
        """Uninitialised."""
        return cls(
            values_FB=torch.empty(NUM_VERDICT, num_sequences, dtype=torch.int64, device=device),
            token_ids_BA=torch.empty(num_sequences, num_masks + 1, dtype=torch.int64, device=device),
            draft_rows_BJ=torch.empty(num_sequences, num_masks, dtype=torch.int64, device=device),
        )

    @property
    def accepted_B(self) -> Tensor:
        """Length of the accepted prefix of the drafts."""
        return self.values_FB[0]

    @property
    def tested_B(self) -> Tensor:
        """Drafts tested: up to the first rejection."""
        return self.values_FB[1]

    @property
    def num_emitted_B(self) -> Tensor:
        """Tokens emitted: the accepted ones and one more."""
        return self.values_FB[2]

    @property
    def emit_rows_B(self) -> Tensor:
        """Row whose law the last token obeys, before the correction of a rejection."""
        return self.values_FB[3]

    @property
    def rejected_B(self) -> Tensor:
        """1 where a draft was rejected."""
        return self.values_FB[4]

    @property
    def next_layout_B(self) -> Tensor:
        """Layout of the next step."""
        return self.values_FB[5]
