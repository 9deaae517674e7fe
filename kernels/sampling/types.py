"""Values that the sampling ops exchange: probabilities of rows and of drafts, and the verdict on drafts.

Probabilities of a row are its logits and eight numbers on a GPU, or an fp64 tensor on a CPU. Decoders treat
both as opaque. Contract in README.md.
Shapes: X rows, V vocabulary, C chunks, Z lanes, J drafts, B sequences, A = J + 1, Y layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

NUM_NUMBERS = 8
SMALLEST_CHUNK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the kernels divide a row, in powers of two. Another tuning may change the last bits of a row;
    another batch never does.

    `chunk` tokens have one stored mass. A program of the pass over all rows takes `tile` chunks with
    `num_warps` warps; a program of the thresholds takes a row with `row_warps`. Its list of candidates holds
    `capacity` tokens from at most `listed` chunks, which are read `group` at a time. Rows with more
    candidates are sampled (`sample` tokens) and read `step` tokens at a time."""

    chunk: int = 512
    tile: int = 16
    num_warps: int = 4
    row_warps: int = 8
    capacity: int = 512
    listed: int = 128
    group: int = 8
    sample: int = 8192
    step: int = 2048


TUNING = Tuning()


class ChunkShape:
    """Sizes of every launch over chunks; a chunk is a constant of the vocabulary."""

    def __init__(self, num_tokens: int, tuning: Tuning) -> None:
        self.chunk = min(tuning.chunk, max(SMALLEST_CHUNK, _power_of_two(num_tokens)))
        self.num_chunks = -(-num_tokens // self.chunk)
        self.chunks = _power_of_two(self.num_chunks)
        self.tile = min(tuning.tile, self.chunks)
        self.num_tiles = -(-self.num_chunks // self.tile)
        # For kernels that hold two rows at once.
        self.half_tile = max(1, self.tile // 2)
        self.num_half_tiles = -(-self.num_chunks // self.half_tile)


def _power_of_two(number: int) -> int:
    """The next one from `number` on."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProbs:
    """Probabilities as logits (not copied, so they must not change) and numbers.

    Token i passes the filters iff l_i > threshold or l_i = threshold and i <= tie_id; its probability is then
    2^((l_i - max) * scale) / mass. `numbers_XF` fp64: max, scale = log2(e) / temperature, threshold, tie_id,
    mass, id of the largest logit; with `own` also the model's own mass and entropy (nats).
    `masses_XC` fp32: kept mass of each chunk."""

    logits_XV: Tensor
    numbers_XF: Tensor
    masses_XC: Tensor
    tuning: Tuning

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """In the order in which the kernels take them."""
        return self.logits_XV, self.numbers_XF, self.masses_XC

    def __len__(self) -> int:
        return len(self.numbers_XF)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainProbs:
    """Probabilities in fp64. `is_nonfinite_X` (bool): rows whose logits have no distribution. `own_XV`: the
    model's own probabilities, `best_X`: its most likely token (both None unless requested)."""

    probs_XV: Tensor
    is_nonfinite_X: Tensor | None = None
    own_XV: Tensor | None = None
    best_X: Tensor | None = None

    def __len__(self) -> int:
        return len(self.probs_XV)


Probs = RowProbs | PlainProbs


class DraftProbs(NamedTuple):
    """Numbers, masses and a copy of the chunks with mass, per lane and draft position."""

    logits_ZJV: Tensor
    numbers_ZJF: Tensor
    masses_ZJC: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainDraftProbs:
    """Probabilities in fp64, per lane and draft position."""

    probs_ZJV: Tensor


Drafts = DraftProbs | PlainDraftProbs


class LayoutTables(NamedTuple):
    """Of each layout Y, int64: its number of drafts; and after A accepted drafts, the rows (relative to the
    sequence's first, or -1) that the next drafts J are drawn from, and the next layout."""

    num_drafts_Y: Tensor
    draft_rows_YAJ: Tensor
    next_layouts_YA: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a step, int64. For an inactive sequence everything is 0 and rows are -1.

    `token_ids_BA`: the accepted drafts, then the token drawn after them, then 0; `draft_rows_BJ`: rows that
    the next drafts are drawn from, or -1. The other fields are the rows of `values_FB`."""

    values_FB: Tensor
    token_ids_BA: Tensor
    draft_rows_BJ: Tensor
    accepted_B: Tensor
    """Length of the accepted prefix of the drafts."""
    tested_B: Tensor
    """Number of drafts tested, up to the first rejection."""
    num_emitted_B: Tensor
    """Number of tokens emitted: the accepted drafts and one more."""
    emit_rows_B: Tensor
    """Row whose distribution the last token follows, before the correction of a rejection."""
    rejected_B: Tensor
    """1 where a draft was rejected."""
    next_layout_B: Tensor
    """Layout of the next step."""
