"""The ops in plain torch: what a CPU runs. Static shapes; nothing waits for the device.

B sequences, R rows, I rows that are left, W positions of a block, X wanted rows, H rows of the head."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.row_compaction.types import Compacted, Drop, PackedRows, RetainedWanted, RowCapacity


def compact_rows(
    rows: PackedRows,
    drop: Drop,
    *,
    num_left: int,
    num_origins: int,
    limit: RowCapacity | None,
    drops_stored: bool,
) -> Compacted:
    """See `op.compact_rows`."""
    num_rows, device = len(rows.slots_R), rows.slots_R.device
    numbers_R = torch.arange(num_rows, device=device)
    is_row_R = numbers_R < rows.cu_rows_B1[-1]
    is_block_R = by_row(torch.ones_like(drop.rows_BW, dtype=torch.bool), drop.rows_BW, num_rows, other=False)
    is_open_R = is_block_R & ~drop.needs_all_B[rows.sequence_R]
    limits_R = rows.limits_R
    if drop.limits_R is not None:
        limits_R = torch.where(is_open_R, torch.minimum(drop.limits_R, limits_R), limits_R)
    keep_R, waits_B = (drop.keep_R | ~is_open_R) & is_row_R, drop.waits_B
    if drops_stored:
        first_B = rows.cu_rows_B1[1:] - (drop.rows_BW >= 0).sum(dim=1) - drop.rows_BW.shape[1]
        keep_R &= drop.keep_R | is_block_R | (numbers_R < first_B[rows.sequence_R])
    demand_B = torch.zeros_like(rows.cu_rows_B1[1:]).scatter_add_(0, rows.sequence_R, keep_R.long())
    if limit is not None:
        keep_R, waits_B = _within_capacity(rows, drop, limit, keep_R, is_block_R, demand_B)
    numbers_I = flagged(keep_R, num_left)
    is_row_I = numbers_I < num_rows
    numbers_I = torch.where(is_row_I, numbers_I, 0)
    sequence_I = rows.sequence_R[numbers_I]
    counts_B = torch.zeros_like(drop.rows_BW[:, 0]).scatter_add_(0, sequence_I, is_row_I.long())
    new_R = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=device)
    target_I = torch.where(is_row_I, numbers_I, num_rows)
    new_R.scatter_(0, target_I, torch.arange(num_left, device=device))
    # Positions without a row read one more row, which no row is.
    new_R[-1:] = -1
    return Compacted(
        rows=PackedRows(
            cu_rows_B1=torch.nn.functional.pad(counts_B.cumsum(0), (1, 0)),
            sequence_R=sequence_I,
            token_ids_R=rows.token_ids_R[numbers_I],
            positions_R=rows.positions_R[numbers_I],
            slots_R=rows.slots_R[numbers_I],
            limits_R=limits_R[numbers_I],
            branch_starts_R=rows.branch_starts_R[numbers_I],
            mapping_R=torch.where(is_row_I, rows.mapping_R[numbers_I], -1),
            origin_R=torch.where(is_row_I, rows.origin_R[numbers_I], num_origins),
            is_mask_R=None if rows.is_mask_R is None else rows.is_mask_R[numbers_I] & is_row_I,
        ),
        numbers_I=numbers_I,
        rows_BW=new_R[torch.where(drop.rows_BW >= 0, drop.rows_BW, num_rows)],
        waits_B=waits_B,
        demand_B=demand_B,
    )


def _within_capacity(
    rows: PackedRows, drop: Drop, limit: RowCapacity, keep_R: Tensor, is_block_R: Tensor, demand_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The retained rows, of sequences that wait the scheduled ones alone; and which sequences wait."""
    is_scheduled_R = ~is_block_R & keep_R
    if drop.scheduled_B is not None:
        counts_R1 = torch.nn.functional.pad(keep_R.cumsum(0), (1, 0))
        number_R = counts_R1[:-1] - counts_R1[rows.cu_rows_B1[rows.sequence_R]]
        is_scheduled_R &= number_R < drop.scheduled_B[rows.sequence_R]
    scheduled_B = torch.zeros_like(demand_B).scatter_add_(0, rows.sequence_R, is_scheduled_R.long())
    needs_B = demand_B - scheduled_B
    priority_B = limit.num_waits_B * (len(keep_R) + 1) - needs_B
    waits_B = drop.waits_B | allot(needs_B, priority_B, limit.capacity - scheduled_B.sum())[1]
    return keep_R & (is_scheduled_R | ~waits_B[rows.sequence_R]), waits_B


def retain_wanted(
    rows_X: Tensor,
    first_B: Tensor,
    num_B: Tensor,
    waits_B: Tensor,
    origin_R: Tensor,
    *,
    num_head: int,
    packs: bool,
) -> RetainedWanted:
    """See `op.retain_wanted`."""
    num_wanted, device = len(rows_X), rows_X.device
    index_X = torch.searchsorted(origin_R, rows_X).clamp(max=len(origin_R) - 1)
    is_left_X = origin_R[index_X] == rows_X
    numbers = torch.arange(num_wanted, device=device)
    # No wanted row is of two sequences; those after the last, and of sequences that wait, are of none.
    end_B = torch.where(waits_B, first_B, first_B + num_B)
    is_mine_BX = (numbers >= first_B[:, None]) & (numbers < end_B[:, None])
    is_left_X &= is_mine_BX.any(dim=0)
    demand_B = (is_mine_BX & is_left_X).sum(dim=1)
    counts_X1 = torch.nn.functional.pad(is_left_X.cumsum(0), (1, 0))
    taken_B = counts_X1[first_B.clamp(max=num_wanted)] + demand_B
    waits_B = waits_B | ((demand_B > 0) & (taken_B > num_head))
    index_H, origin_H = torch.where(is_left_X, index_X, 0), None
    if packs:
        origin_H = flagged(is_left_X, num_head)
        is_row_H = origin_H < num_wanted
        origin_H = torch.where(is_row_H, origin_H, 0)
        numbers, index_H = counts_X1[:-1], torch.where(is_row_H, index_X[origin_H], 0)
        is_left_X = is_left_X & (numbers < num_head)
    return RetainedWanted(
        index_H=index_H,
        origin_H=origin_H,
        numbers_X=torch.where(is_left_X, numbers, -1),
        waits_B=waits_B,
        demand_B=demand_B,
    )


def find_index(
    cu_rows_B1: Tensor, slots_R: Tensor, is_mask_R: Tensor | None, starts_B: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """See `op.find_index`."""
    first_B1, last_B1 = cu_rows_B1[:-1, None], cu_rows_B1[1:, None]
    first_slot_B1 = slots_R[first_B1.clamp(max=len(slots_R) - 1)]
    rows_BW = first_B1 + starts_B[:, None] - first_slot_B1 + torch.arange(size, device=slots_R.device)
    has_row_BW = (rows_BW >= first_B1) & (rows_BW < last_B1)
    rows_BW = torch.where(has_row_BW, rows_BW, -1)
    if is_mask_R is None:
        return rows_BW, torch.zeros_like(has_row_BW)
    return rows_BW, has_row_BW & is_mask_R[rows_BW.clamp(min=0)]


def spread_index(
    flags_BW: Tensor, ends_B: Tensor, starts_B: Tensor, rows_BW: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """See `op.spread_index`."""
    limits_BW = (starts_B + ends_B)[:, None].expand_as(rows_BW)
    keep_R = by_row(flags_BW, rows_BW, num_rows, other=True)
    return keep_R, by_row(limits_BW, rows_BW, num_rows, other=torch.iinfo(torch.int64).max)


def by_row(of_positions_BW: Tensor, rows_BW: Tensor, num_rows: int, *, other: int) -> Tensor:
    """For each row the value [R] of its position; `other` for rows of no position."""
    target_X = torch.where(rows_BW >= 0, rows_BW, num_rows).flatten()
    values_R = torch.full((num_rows + 1,), other, dtype=of_positions_BW.dtype, device=rows_BW.device)
    return values_R.scatter(0, target_X, of_positions_BW.flatten())[:-1]


def allot(needs_B: Tensor, priority_B: Tensor, capacity: int | Tensor) -> tuple[Tensor, Tensor]:
    """Where the rows of each sequence end if sequences take `needs_B` rows each, those of the
    highest priority first, then in order; and which do not fit (bool): one that does not and all after it."""
    order_B = priority_B.argsort(descending=True, stable=True)
    ends_B = torch.empty_like(needs_B).scatter_(0, order_B, needs_B[order_B].cumsum(0))
    return ends_B, (needs_B > 0) & (ends_B > capacity)


def flagged(is_flagged_R: Tensor, num_left: int) -> Tensor:
    """Numbers [num_left] of the flagged rows in order, R after the last; those beyond `num_left` are left
    out."""
    num_rows, device = len(is_flagged_R), is_flagged_R.device
    # Rows that are left out go to one more position, which is cut off.
    index_R = torch.where(is_flagged_R, is_flagged_R.cumsum(0) - 1, num_left).clamp(max=num_left)
    numbers = torch.full((num_left + 1,), num_rows, dtype=torch.int64, device=device)
    return numbers.scatter_(0, index_R, torch.arange(num_rows, device=device))[:-1]
