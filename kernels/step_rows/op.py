"""Rows of a pass from tables, their physical slots, and the commit: plain torch, or one kernel each on a GPU.

Sixty tiny torch ops would take 3 % of a step of an 8B model. Contract in README.md. Z lanes, L columns of the
token table, B sequences, R rows, X wanted rows, Y draft buffers, W rows of the widest layout, J drafts, A
tokens that a pass can emit, P pages of the longest sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.backend import runs_kernels
from idlm.kernels.sampling import random_words
from idlm.kernels.step_rows.types import GROUP_DRAWS, MASK, NOISE_DRAWS, Lanes, Noise, RowTable, StepRows

FEW_SEQUENCES, FEW_BLOCK = 16, 32
"""Up to so many sequences one warp packs so many rows."""
MANY_SEQUENCES, MANY_BLOCK = 256, 8
"""Else four warps pack so many: 32 rows for each of 256 sequences take several times as long to compile."""
ALIGNED_ROWS = 2
"""Columns of int64 that make every row of a matrix begin at 16 bytes, whatever the number of rows of a pass:
Triton compiles kernels anew for pointers that do not."""
COLUMNS = ("sequence_R", "token_ids_R", "positions_R", "slots_R", "limits_R", "branch_starts_R")
"""Integers of a row in the order in which the kernel stores them."""
MAX_COMMITTED = 256
"""Tokens that the one warp of a commit writes at a time; a canvas commits thousands."""


def pack_rows(
    lanes: Lanes,
    table: RowTable,
    *,
    lanes_B: Tensor,
    num_feed_B: Tensor,
    wants_B: Tensor,
    num_rows: int | None,
    mask_token_id: int | Noise,
) -> StepRows:
    """Known tokens of every sequence from its first that is not computed, then the rows of its layout.

    `mask_token_id`: of all MASK rows, or the `Noise` that gives each an id of its own. `num_rows` None:
    exactly these rows, whose number the host waits for; else that many rows, the last of them padding with
    arbitrary numbers inside the tables."""
    if num_rows is None:
        num_rows = int(_cu_rows(lanes, table, lanes_B, num_feed_B, wants_B)[0][-1])
    run = _launched if runs_kernels(lanes_B) else _plain
    return run(lanes, table, (lanes_B, num_feed_B, wants_B), num_rows, mask_token_id)


def _cu_rows(
    lanes: Lanes, table: RowTable, lanes_B: Tensor, num_feed_B: Tensor, wants_B: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """cu_rows_B1, width_B, draft_buffer_B, samples_B, advances_B."""
    advances_B = lanes.num_known_Z[lanes_B] < lanes.ends_Z[lanes_B]
    samples_B = wants_B & advances_B
    draft_buffer_B = (
        torch.zeros_like(lanes_B) if lanes.draft_buffer_Z is None else lanes.draft_buffer_Z[lanes_B]
    )
    width_B = torch.where(samples_B, table.width_Y[draft_buffer_B], 1)
    cu_rows_B1 = torch.nn.functional.pad((num_feed_B - 1 + width_B).cumsum(0), (1, 0))
    return cu_rows_B1, width_B, draft_buffer_B, samples_B, advances_B


def _plain(
    lanes: Lanes,
    table: RowTable,
    columns_B: tuple[Tensor, Tensor, Tensor],
    num_rows: int,
    mask_token_id: int | Noise,
) -> StepRows:
    lanes_B, feed_B, _ = columns_B
    cu_rows_B1, width_B, draft_buffer_B, samples_B, advances_B = _cu_rows(lanes, table, *columns_B)
    width, computed_B = table.source_YW.shape[1], lanes.num_computed_Z[lanes_B]
    rows_R = torch.arange(num_rows, device=lanes_B.device)
    sequence_R = torch.searchsorted(cu_rows_B1[1:], rows_R, right=True).clamp(max=len(lanes_B) - 1)
    offset_R = rows_R - cu_rows_B1[sequence_R]
    row_R = offset_R - (feed_B - 1)[sequence_R]
    base_R = (computed_B + feed_B - 1)[sequence_R]
    index = (draft_buffer_B[sequence_R], row_R.clamp(min=0, max=width - 1))
    source_R, position_R = table.source_YW[index], table.position_YW[index]
    is_known_R = row_R <= 0
    # Padding gets ids of text: the mask id may be outside the embedding.
    is_mask_R = (row_R > 0) & (source_R == MASK) & (rows_R < cu_rows_B1[-1])
    slots_R = computed_B[sequence_R] + offset_R
    lane_R = lanes_B[sequence_R]
    token_R = lanes.tokens_ZL[lane_R, slots_R.clamp(max=lanes.tokens_ZL.shape[1] - 1)]
    if lanes.drafts_ZJ is not None and lanes.drafts_ZJ.shape[1]:
        draft_R = lanes.drafts_ZJ[lane_R, (source_R - 1).clamp(min=0)]
        token_R = torch.where(is_known_R, token_R, draft_R)
    mask_R: Tensor | int
    if isinstance(mask_token_id, Noise):
        mask_R = _noise(mask_token_id, table, lane_R, index)
    else:
        mask_R = mask_token_id
    # Known tokens are causal: they see what is before them and themselves, and have no branch.
    limits_R, branch_starts_R = (
        torch.where(is_known_R, slots_R + 1, base_R + column_YW[index])
        for column_YW in (table.limit_YW, table.branch_YW)
    )
    offsets_W = torch.arange(width, device=lanes_B.device)
    wanted_BW = (cu_rows_B1[1:] - width_B)[:, None] + offsets_W
    return StepRows(
        cu_rows_B1=cu_rows_B1,
        sequence_R=sequence_R,
        token_ids_R=torch.where(is_mask_R, mask_R, token_R),
        positions_R=torch.where(is_known_R, slots_R, base_R + position_R),
        slots_R=slots_R,
        limits_R=limits_R,
        branch_starts_R=branch_starts_R,
        is_mask_R=is_mask_R,
        logit_rows_X=torch.minimum(wanted_BW, cu_rows_B1[1:, None] - 1).clamp(min=0).flatten(),
        samples_B=samples_B,
        advances_B=advances_B,
    )


def _noise(noise: Noise, table: RowTable, lane_R: Tensor, index: tuple[Tensor, Tensor]) -> Tensor:
    """Ids [R] of rows that are in a group of MASKs; `index`: of the rows in the table."""
    depth_R = index[1] - table.branch_YW[index]
    draws_R = NOISE_DRAWS + table.limit_YW[index] * GROUP_DRAWS + depth_R
    words_R = random_words(noise.seeds_Z[lane_R], noise.samples_Z[lane_R], noise.steps_Z[lane_R], draws_R)
    return noise.low + (words_R * (noise.high - noise.low) >> 32)


def _launched(
    lanes: Lanes,
    table: RowTable,
    columns_B: tuple[Tensor, Tensor, Tensor],
    num_rows: int,
    mask_token_id: int | Noise,
) -> StepRows:
    """One launch; `columns_B`: lanes_B, num_feed_B, wants_B."""
    import triton

    from idlm.kernels.step_rows.kernel import pack_rows_kernel

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
    is_noise = isinstance(mask_token_id, Noise)
    programs = triton.cdiv(num_rows, block) + triton.cdiv(num_sequences * width, block)
    pack_rows_kernel[(programs,)](
        *(lanes if has_drafts else lanes._replace(drafts_ZJ=None), table),
        *(*columns_B, samples_B, advances_B, (cu_rows_B1, logit_rows_X, rows_IR, is_mask_R)),
        *(num_sequences, num_rows, width, aligned_rows),
        0 if drafts_ZJ is None else drafts_ZJ.shape[1],
        *(lanes.tokens_ZL.shape[1], 0 if is_noise else mask_token_id, mask_token_id if is_noise else None),
        BLOCK_B=FEW_SEQUENCES if is_few else max(MANY_SEQUENCES, triton.next_power_of_2(num_sequences)),
        BLOCK=block,
        num_warps=1 if is_few else 4,
    )
    return StepRows(
        cu_rows_B1=cu_rows_B1,
        **dict(zip(COLUMNS, rows_IR, strict=True)),
        is_mask_R=is_mask_R,
        logit_rows_X=logit_rows_X,
        samples_B=samples_B,
        advances_B=advances_B,
    )


def map_slots(
    block_table_BP: Tensor, sequence_R: Tensor, slots_R: Tensor, cu_rows_B1: Tensor, *, page_size: int
) -> Tensor:
    """Physical slot of each row, [R]; -1 for padding rows."""
    if not runs_kernels(slots_R):
        page_R = (slots_R // page_size).clamp(max=block_table_BP.shape[1] - 1)
        physical_R = block_table_BP[sequence_R, page_R] * page_size + slots_R % page_size
        rows_R = torch.arange(len(slots_R), device=slots_R.device)
        return torch.where(rows_R < cu_rows_B1[-1], physical_R, -1)
    import triton

    from idlm.kernels.step_rows.kernel import map_slots_kernel

    out_R = torch.empty_like(slots_R)
    if len(out_R):
        map_slots_kernel[(triton.cdiv(len(out_R), 128),)](
            *((sequence_R, slots_R), cu_rows_B1, block_table_BP, out_R),
            *(block_table_BP.stride(0), len(cu_rows_B1) - 1, len(out_R), block_table_BP.shape[1]),
            SIZE=page_size,
            BLOCK=128,
        )
    return out_R


def commit(
    lanes: Lanes,
    steps_Z: Tensor,
    *,
    lanes_B: Tensor,
    token_ids_BA: Tensor,
    num_emitted_B: Tensor,
    num_computed_B: Tensor,
) -> None:
    """Append the emitted tokens, advance the KV pointer by `num_computed_B`, and count a sampling step.

    Tokens after the last column but one are dropped. A lane that occurs twice must have nothing to commit."""
    if not runs_kernels(lanes_B):
        last = lanes.tokens_ZL.shape[1] - 1
        offsets_A = torch.arange(token_ids_BA.shape[1], device=lanes_B.device)
        known_B = lanes.num_known_Z[lanes_B]
        columns_BA = known_B[:, None] + offsets_A
        keep_BA = (offsets_A < num_emitted_B[:, None]) & (columns_BA < last)
        # Dropped tokens go to the last column, so that shapes do not depend on counts.
        lanes.tokens_ZL[lanes_B[:, None], torch.where(keep_BA, columns_BA, last)] = token_ids_BA
        lanes.num_known_Z[lanes_B] = known_B + num_emitted_B
        lanes.num_computed_Z[lanes_B] += num_computed_B
        steps_Z[lanes_B] += (num_emitted_B > 0).long()
        return
    import triton

    from idlm.kernels.step_rows.kernel import commit_kernel

    assert token_ids_BA.stride(1) == num_emitted_B.stride(0) == num_computed_B.stride(0) == 1
    if len(lanes_B):
        commit_kernel[(len(lanes_B),)](
            *(lanes, steps_Z, lanes_B, token_ids_BA, num_emitted_B, num_computed_B),
            *(token_ids_BA.stride(0), token_ids_BA.shape[1], lanes.tokens_ZL.shape[1]),
            BLOCK_A=min(MAX_COMMITTED, triton.next_power_of_2(token_ids_BA.shape[1])),
            num_warps=1,
        )
