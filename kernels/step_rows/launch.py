"""Launches of the kernels of this op. B sequences, R rows, W rows of the widest layout."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from idlm.kernels.step_rows.kernel import commit_kernel, map_slots_kernel, pack_rows_kernel
from idlm.kernels.step_rows.types import MASK, Lanes, PackedRows, RowTable

FEW_SEQUENCES, FEW_BLOCK = 16, 32
"""Up to so many sequences one warp packs so many rows."""
MANY_SEQUENCES, MANY_BLOCK = 256, 8
"""Else four warps pack so many: 32 rows for each of 256 sequences take several times as long to compile."""
ALIGNED_ROWS = 2
"""Columns of int64 that make every row of a matrix begin at 16 bytes, whatever the number of rows of a pass:
Triton compiles kernels anew for pointers that do not.
"""
MAX_COMMITTED = 256
"""Tokens that the one warp of a commit writes at a time; a canvas commits thousands."""


def run_pack_rows(
    lanes: Lanes,
    table: RowTable,
    columns_B: tuple[Tensor, Tensor, Tensor],
    num_rows: int,
    mask_token_id: int,
) -> PackedRows:
    """One launch; `columns_B`: lanes_B, num_feed_B, wants_B."""
    lanes_B = columns_B[0]
    num_sequences, width = len(lanes_B), table.source_YW.shape[1]
    device = lanes_B.device
    assert all(column_B.stride(0) == 1 for column_B in columns_B), f"{lanes_B.stride()=}"
    drafts_ZJ = lanes.drafts_ZJ
    has_drafts = drafts_ZJ is not None and drafts_ZJ.shape[1] > 0
    cu_rows_B1 = torch.empty(num_sequences + 1, dtype=torch.int64, device=device)
    logit_rows_X = torch.empty(num_sequences * width, dtype=torch.int64, device=device)
    aligned_rows = triton.cdiv(num_rows, ALIGNED_ROWS) * ALIGNED_ROWS
    rows_IR = torch.empty(6, aligned_rows, dtype=torch.int64, device=device)[:, :num_rows]
    samples_B, advances_B = torch.empty(2, num_sequences, dtype=torch.bool, device=device)
    is_mask_R = torch.empty(num_rows, dtype=torch.bool, device=device)
    is_few = num_sequences <= FEW_SEQUENCES
    block = FEW_BLOCK if is_few else MANY_BLOCK
    programs = triton.cdiv(num_rows, block) + triton.cdiv(num_sequences * width, block)
    pack_rows_kernel[(programs,)](
        *(lanes.num_known_Z, lanes.num_computed_Z, lanes.ends_Z, lanes.tokens_ZL),
        lanes_B if lanes.draft_buffer_Z is None else lanes.draft_buffer_Z,
        lanes_B if drafts_ZJ is None else drafts_ZJ,
        *(table.width_Y, table.source_YW, table.position_YW, table.limit_YW, table.branch_YW),
        *columns_B,
        *(cu_rows_B1, samples_B, advances_B, logit_rows_X, rows_IR, is_mask_R),
        *(num_sequences, num_rows, width, aligned_rows),
        0 if drafts_ZJ is None else drafts_ZJ.shape[1],
        lanes.tokens_ZL.shape[1],
        mask_token_id,
        HAS_DRAFT_BUFFER=lanes.draft_buffer_Z is not None,
        HAS_DRAFTS=has_drafts,
        MASK_SOURCE=MASK,
        BLOCK_B=FEW_SEQUENCES if is_few else max(MANY_SEQUENCES, triton.next_power_of_2(num_sequences)),
        BLOCK=block,
        num_warps=1 if is_few else 4,
    )
    return PackedRows(
        cu_rows_B1=cu_rows_B1,
        sequence_R=rows_IR[0],
        token_ids_R=rows_IR[1],
        positions_R=rows_IR[2],
        slots_R=rows_IR[3],
        limits_R=rows_IR[4],
        branch_starts_R=rows_IR[5],
        is_mask_R=is_mask_R,
        logit_rows_X=logit_rows_X,
        samples_B=samples_B,
        advances_B=advances_B,
    )


def run_map_slots(
    block_table_BP: Tensor, sequence_R: Tensor, slots_R: Tensor, cu_rows_B1: Tensor, page_size: int
) -> Tensor:
    """One launch; the arguments are those of the op."""
    out_R = torch.empty_like(slots_R)
    if len(out_R):
        map_slots_kernel[(triton.cdiv(len(out_R), 128),)](
            block_table_BP,
            sequence_R,
            slots_R,
            cu_rows_B1,
            out_R,
            block_table_BP.stride(0),
            len(cu_rows_B1) - 1,
            len(out_R),
            block_table_BP.shape[1],
            SIZE=page_size,
            BLOCK=128,
        )
    return out_R


def run_commit(
    lanes: Lanes,
    steps_Z: Tensor,
    lanes_B: Tensor,
    token_ids_BA: Tensor,
    num_emitted_B: Tensor,
    num_computed_B: Tensor,
) -> None:
    """One launch; the arguments are those of the op."""
    assert token_ids_BA.stride(1) == num_emitted_B.stride(0) == num_computed_B.stride(0) == 1
    if len(lanes_B):
        commit_kernel[(len(lanes_B),)](
            lanes.num_known_Z,
            lanes.num_computed_Z,
            lanes.tokens_ZL,
            steps_Z,
            lanes_B,
            token_ids_BA,
            num_emitted_B,
            num_computed_B,
            token_ids_BA.stride(0),
            token_ids_BA.shape[1],
            lanes.tokens_ZL.shape[1],
            BLOCK_A=min(MAX_COMMITTED, triton.next_power_of_2(token_ids_BA.shape[1])),
            num_warps=1,
        )
