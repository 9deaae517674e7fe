"""A small kernel of the decode benchmark: the trace's verdict over the real one.

Shapes: Z lanes, B sequences, J drafts, S tests of the trace."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from idlm.kernels.sampling import LayoutTables, Verdict


@triton.jit
def overwrite_kernel(
    p_accepted,
    p_tests,
    p_lanes,
    p_first,
    p_active,
    p_drafts,
    p_layout,
    p_num_drafts,
    p_draft_rows,
    p_next_layouts,
    p_verdict,
    p_tokens,
    p_rows,
    num_accepted,
    num_sequences,
    num_masks,
    MASKS: tl.constexpr,
):
    i_sequence = tl.program_id(0).to(tl.int64)
    if tl.load(p_active + i_sequence).to(tl.int32) != 0:
        lane = tl.load(p_lanes + i_sequence).to(tl.int64)
        first = tl.load(p_first + i_sequence).to(tl.int64)
        layout = tl.load(p_layout + lane).to(tl.int64)
        num_drafts = tl.load(p_num_drafts + layout).to(tl.int64)
        index = tl.load(p_tests + lane)
        # Of drafts that `tree` drew from a rejected pass the trace has none: all are rejected.
        other = layout % (2 * num_masks + 1) > num_masks
        traced = tl.where(other, 0, tl.load(p_accepted + index % num_accepted))
        tl.store(p_tests + lane, index + (num_drafts > 0).to(tl.int64))
        accepted = tl.minimum(traced, num_drafts)
        rejected = (accepted < num_drafts).to(tl.int64)
        p_out = p_verdict + i_sequence
        case = layout * (num_masks + 1) + accepted
        tl.store(p_out, accepted)
        tl.store(p_out + num_sequences, accepted + rejected)
        tl.store(p_out + num_sequences * 2, accepted + 1)
        tl.store(p_out + num_sequences * 3, first + accepted)
        tl.store(p_out + num_sequences * 4, rejected)
        tl.store(p_out + num_sequences * 5, tl.load(p_next_layouts + case))
        o_mask = tl.arange(0, MASKS)
        m_mask = o_mask < num_masks
        b_next = tl.load(p_draft_rows + case * num_masks + o_mask, mask=m_mask, other=-1)
        b_row = tl.where(b_next >= 0, first + b_next, -1)
        tl.store(p_rows + i_sequence * num_masks + o_mask, b_row, mask=m_mask)
        b_id = tl.load(p_drafts + lane * num_masks + o_mask, mask=m_mask & (o_mask < accepted), other=0)
        tl.store(p_tokens + i_sequence * (num_masks + 1) + o_mask, b_id, mask=m_mask)


def overwrite(
    trace: tuple[Tensor, Tensor],
    verdict: Verdict,
    tables: LayoutTables,
    columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """`trace`: accepted_S, num_tests_Z; `columns`: lanes_B, first_rows_B, active_B, drafts_ZJ,
    layout_Z."""
    num_sequences, num_masks = len(columns[0]), columns[3].shape[1]
    overwrite_kernel[(num_sequences,)](
        *trace,
        *columns,
        tables.num_drafts_Y,
        tables.draft_rows_YAJ,
        tables.next_layouts_YA,
        verdict.values_FB,
        verdict.token_ids_BA,
        verdict.draft_rows_BJ,
        len(trace[0]),
        num_sequences,
        num_masks,
        MASKS=triton.next_power_of_2(max(1, num_masks)),
        num_warps=1,
    )
