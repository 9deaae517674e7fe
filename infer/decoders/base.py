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
from idlm.infer.decoders.layout import MASK, LayoutTable
from idlm.infer.table import SequenceTable
from idlm.registry import Registry
from idlm.semantics import Semantics


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Which sequences run in this pass and how much of each; host data, made by the scheduler.

    Sequence b sits on `lanes[b]` and stores the next `num_feed[b]` known tokens behind its `num_computed[b]`
    computed ones. `samples[b]`: that reaches the pending token, so the pass also decodes for it.
    """

    lanes: list[int]
    num_computed: list[int]
    num_feed: list[int]
    samples: list[bool]


class Decoder(Protocol):
    """One decoding algorithm. `Config` is a frozen dataclass of its options, filled from `decoder.*`."""

    name: ClassVar[str]
    Config: ClassVar[type]
    max_width: int
    exactness: str

    def __init__(self, config: Any, semantics: Semantics) -> None: ...

    def allocate(self, num_lanes: int, vocab_size: int, device: torch.device) -> None:
        """Make the decoder's own per-lane state."""
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
    layouts: LayoutTable,
    layout_B: Tensor,
    drafts_BJ: Tensor,
    mask_token_id: int,
) -> StepPlan:
    """Lay the batch's rows out: known tokens up to the pending one, then the layout's drafts and masks.

    There is no prefill branch: a prompt is a sequence with many known tokens that are not computed yet,
    and whether its masks ride along depends only on `samples`, never on a row count.
    """
    device = table.device
    lanes_B = torch.tensor(batch.lanes, dtype=torch.int64, device=device)
    feed_B = torch.tensor(batch.num_feed, dtype=torch.int64, device=device)
    samples_B = torch.tensor(batch.samples, dtype=torch.bool, device=device)
    computed_B = table.num_computed_Z[lanes_B]
    width_B = torch.where(samples_B, layouts.width_Y[layout_B], 1)
    cu_rows_B1 = torch.nn.functional.pad((feed_B - 1 + width_B).cumsum(0), (1, 0))
    sequence_R = torch.repeat_interleave(torch.arange(len(lanes_B), device=device), cu_rows_B1.diff())
    offset_R = torch.arange(len(sequence_R), device=device) - cu_rows_B1[sequence_R]

    row_R = offset_R - (feed_B - 1)[sequence_R]
    base_R = (computed_B + feed_B - 1)[sequence_R]
    layout_row_R = row_R.clamp(min=0)
    source_R, position_R, limit_R, branch_R = (
        column_YW[layout_B[sequence_R], layout_row_R]
        for column_YW in (layouts.source_YW, layouts.position_YW, layouts.limit_YW, layouts.branch_YW)
    )
    is_known_R, is_mask_R = row_R <= 0, (row_R > 0) & (source_R == MASK)
    slots_R = computed_B[sequence_R] + offset_R
    known_R = table.tokens_ZL[lanes_B[sequence_R], slots_R.clamp(max=table.tokens_ZL.shape[1] - 1)]
    draft_R = drafts_BJ[sequence_R, (source_R - 1).clamp(min=0)] if drafts_BJ.shape[1] else known_R
    causal_R = slots_R + 1
    token_ids_R = torch.where(is_known_R, known_R, torch.where(is_mask_R, mask_token_id, draft_R))
    logit_rows_X = ((row_R >= 0) & samples_B[sequence_R]).nonzero()[:, 0]
    num_logits_B = torch.where(samples_B, width_B, 0)
    return StepPlan(
        lanes_B=lanes_B,
        cu_rows_B1=cu_rows_B1,
        token_ids_R=token_ids_R,
        positions_R=torch.where(is_known_R, slots_R, base_R + position_R),
        slots_R=slots_R,
        limits_R=torch.where(is_known_R, causal_R, base_R + limit_R),
        branch_starts_R=torch.where(is_known_R, causal_R, base_R + branch_R),
        is_mask_R=is_mask_R,
        logit_rows_X=logit_rows_X,
        first_logit_B=torch.where(samples_B, num_logits_B.cumsum(0) - num_logits_B, -1),
        num_feed_B=feed_B,
        max_rows=max(
            n - 1 + (layouts.max_width if s else 1)
            for n, s in zip(batch.num_feed, batch.samples, strict=True)
        ),
        max_slots=max(c + n - 1 for c, n in zip(batch.num_computed, batch.num_feed, strict=True))
        + layouts.max_width,
    )
