"""The decoder contract: plan what one pass is fed, then advance by its logits. Plus the packing that all
decoders share.

Shapes: B sequences of this pass, R rows packed over sequences, X wanted rows, W rows of a layout, Z lanes,
J masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from idlm.contracts import StepOutcome, StepPlan
from idlm.infer.decoders.layout import MASK, Picture
from idlm.infer.table import SequenceTable
from idlm.registry import Registry
from idlm.semantics import Semantics


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Which sequences run in this pass and how much of each; made by the scheduler.

    Sequence b sits on `lanes_B[b]` and stores the next `num_feed_B[b]` known tokens behind its computed
    ones. `samples_B[b]`: that reaches the pending token, so the pass also decodes for it. The rest is what
    the host knows: upper bounds of `num_feed_B` and of the slots in use behind this pass's known tokens;
    which of the decoder's pictures is used; `num_rows`, the rows to lay out, padding included (None: just
    those that are fed, which the host then waits to read); whether anybody's law has tokens cut off; how
    many likeliest tokens are reported for every token, None for no logprobs.
    """

    lanes_B: Tensor
    num_feed_B: Tensor
    samples_B: Tensor
    max_feed: int
    max_known: int
    num_rows: int | None
    filters: bool
    picture: int = 0
    num_top: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureName:
    """What a pass tries for every sequence: so many tokens at most, and what happens after a rejection."""

    stride: int
    strategy: str


class Decoder(Protocol):
    """One decoding algorithm. `Config` is a frozen dataclass of its options, filled from `decoder.*`.

    A pass is laid out by one of its `pictures`, which feeds up to `widths[number]` rows per sequence beside
    prompts; who chooses may look at committed tokens and at times only (pace.py).
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    pictures: tuple[PictureName, ...]
    widths: tuple[int, ...]
    max_emitted: int
    exactness: str

    def __init__(self, config: Any, semantics: Semantics) -> None: ...

    def allocate(self, num_lanes: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Make the decoder's own per-lane state; `dtype` is that of the logits."""
        ...

    def seat(self, lanes: list[int]) -> None:
        """Reset the decoder's state of lanes on which new sequences sit down."""
        ...

    def plan(self, table: SequenceTable, batch: Batch) -> StepPlan:
        """Say what the pass is fed; changes nothing."""
        ...

    def advance(self, table: SequenceTable, batch: Batch, plan: StepPlan, logits_XV: Tensor) -> StepOutcome:
        """Commit tokens from the pass's logits into the table and the decoder's state."""
        ...


DECODERS: Registry[type[Decoder]] = Registry("decoder", "idlm.infer.decoders")


def pack_rows(
    table: SequenceTable,
    batch: Batch,
    *,
    picture: Picture,
    stock_B: Tensor,
    drafts_BJ: Tensor,
    mask_token_id: int,
) -> StepPlan:
    """Lay the batch's rows out: known tokens up to the pending one, then drafts and masks by the picture.

    There is no prefill branch: a prompt is a sequence with many known tokens that are not computed yet,
    and whether its masks ride along depends only on `samples_B`, never on a row count. A sequence that is
    as long as it may get feeds its pending token again and decodes nothing.
    """
    device, width = table.device, picture.max_width
    lanes_B, feed_B = batch.lanes_B, batch.num_feed_B
    is_open_B = table.is_open(lanes_B)
    samples_B = batch.samples_B & is_open_B
    computed_B = table.num_computed_Z[lanes_B]
    width_B = torch.where(samples_B, picture.width_Y[stock_B], 1)
    cu_rows_B1 = torch.nn.functional.pad((feed_B - 1 + width_B).cumsum(0), (1, 0))
    num_rows = int(cu_rows_B1[-1]) if batch.num_rows is None else batch.num_rows
    rows_R = torch.arange(num_rows, device=device)
    sequence_R = torch.searchsorted(cu_rows_B1[1:], rows_R, right=True).clamp(max=len(lanes_B) - 1)
    offset_R = rows_R - cu_rows_B1[sequence_R]

    row_R = offset_R - (feed_B - 1)[sequence_R]
    base_R = (computed_B + feed_B - 1)[sequence_R]
    place = (stock_B[sequence_R], row_R.clamp(min=0, max=width - 1))
    source_R, position_R = picture.source_YW[place], picture.position_YW[place]
    is_known_R, is_mask_R = row_R <= 0, (row_R > 0) & (source_R == MASK)
    slots_R = computed_B[sequence_R] + offset_R
    known_R = table.tokens_ZL[lanes_B[sequence_R], slots_R.clamp(max=table.tokens_ZL.shape[1] - 1)]
    draft_R = drafts_BJ[sequence_R, (source_R - 1).clamp(min=0)] if drafts_BJ.shape[1] else known_R
    # Known tokens are causal: they see what is before them and themselves, and have no branch.
    limits_R, branch_starts_R = (
        torch.where(is_known_R, slots_R + 1, base_R + column_YW[place])
        for column_YW in (picture.limit_YW, picture.branch_YW)
    )
    return StepPlan(
        lanes_B=lanes_B,
        cu_rows_B1=cu_rows_B1,
        sequence_R=sequence_R,
        token_ids_R=torch.where(is_known_R, known_R, torch.where(is_mask_R, mask_token_id, draft_R)),
        positions_R=torch.where(is_known_R, slots_R, base_R + position_R),
        slots_R=slots_R,
        limits_R=limits_R,
        branch_starts_R=branch_starts_R,
        is_mask_R=None if width == 1 else is_mask_R & (rows_R < cu_rows_B1[-1]),
        logit_rows_X=_wanted_rows(cu_rows_B1, width_B, width),
        first_logit_B=torch.arange(len(lanes_B), device=device) * width,
        num_feed_B=feed_B,
        samples_B=samples_B,
        advances_B=is_open_B,
        max_rows=batch.max_feed - 1 + width,
        max_slots=batch.max_known - 1 + width,
    )


def _wanted_rows(cu_rows_B1: Tensor, width_B: Tensor, width: int) -> Tensor:
    """Packed rows [B * width] of the pending token and what hangs on it; a short layout repeats its last."""
    offsets_W = torch.arange(width, device=width_B.device)
    rows_BW = (cu_rows_B1[1:] - width_B)[:, None] + offsets_W
    return torch.minimum(rows_BW, cu_rows_B1[1:, None] - 1).clamp(min=0).flatten()
