"""Rows that remain, packed again in two launches, and what is aligned with them gathered in one; plain torch
on a CPU. Static shapes; nothing waits for the device. Contract in README.md.

B sequences, R rows, I rows that are left, W positions of a block, X wanted rows, H rows of the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from idlm.kernels.backend import runs_kernels
from idlm.kernels.row_compaction.types import Compacted, Drop, PackedRows, RetainedWanted, RowCapacity

MAX_GATHERED = 6
"""Tensors of one launch."""
GATHERED_BLOCK = 1024
PADDING_BLOCK = 128
ROW_COLUMNS = (
    "sequence_R",
    "token_ids_R",
    "positions_R",
    "slots_R",
    "limits_R",
    "branch_starts_R",
    "mapping_R",
    "origin_R",
)
"""The integers of a row in the order in which the kernel stores them."""


def compact_rows(
    rows: PackedRows,
    drop: Drop,
    *,
    num_left: int,
    num_origins: int,
    limit: RowCapacity | None = None,
    drops_stored: bool = False,
) -> Compacted:
    """Pack the rows that remain into `num_left` rows, in order; the others are padding, which is row 0 with
    mapping -1, origin `num_origins` and no mask.

    With `limit`, sequences that do not fit wait: of them only scheduled rows are left. `num_left` must hold
    all rows that are left; what does not fit is cut off. `drops_stored`: `drop.keep_R` is read at the last W
    rows before a block, too."""
    if not runs_kernels(rows.slots_R):
        return _plain_compacted(rows, drop, num_left, num_origins, limit, drops_stored=drops_stored)
    import triton

    from idlm.kernels.row_compaction.kernel import count_kernel, index_kernel

    (num_sequences, size), device = drop.rows_BW.shape, rows.slots_R.device
    sources = [getattr(rows, name) for name in ROW_COLUMNS]
    columns = (*sources, rows.cu_rows_B1, drop.rows_BW, drop.keep_R, drop.needs_all_B, drop.waits_B)
    assert all(column.is_contiguous() for column in columns), f"{[column.stride() for column in columns]=}"
    cu_rows_B1 = torch.empty_like(rows.cu_rows_B1)
    num_before_B, demand_B = torch.empty(2, num_sequences, dtype=torch.int64, device=device)
    waits_B, rows_BW = torch.empty_like(drop.waits_B), torch.empty_like(drop.rows_BW)
    ints_JI = torch.empty(len(ROW_COLUMNS) + 1, num_left, dtype=torch.int64, device=device)
    is_mask_I = torch.empty(num_left, dtype=torch.bool, device=device)
    options = {"SIZE": size, "BLOCK_W": triton.next_power_of_2(size), "DROPS_STORED": drops_stored}
    count_kernel[(1,)](
        *(rows, drop, None if limit is None else limit.num_waits_B),
        (cu_rows_B1, num_before_B, demand_B, waits_B),
        *(num_sequences, num_left, 0 if limit is None else limit.capacity),
        BLOCK_B=max(16, triton.next_power_of_2(num_sequences)),
        **options,
        num_warps=8,
    )
    index_kernel[(num_sequences + triton.cdiv(num_left, PADDING_BLOCK),)](
        *(rows, drop),
        (cu_rows_B1, num_before_B, None if limit is None else waits_B, rows_BW),
        *(ints_JI, is_mask_I, num_sequences, num_left, num_origins),
        BLOCK=PADDING_BLOCK,
        **options,
        num_warps=4,
    )
    packed = dict(zip(ROW_COLUMNS, ints_JI, strict=False))
    packed["is_mask_R"] = None if rows.is_mask_R is None else is_mask_I
    return Compacted(
        rows=PackedRows(cu_rows_B1=cu_rows_B1, **packed),
        numbers_I=ints_JI[-1],
        rows_BW=rows_BW,
        waits_B=waits_B,
        demand_B=demand_B,
    )


def _plain_compacted(
    rows: PackedRows,
    drop: Drop,
    num_left: int,
    num_origins: int,
    limit: RowCapacity | None,
    *,
    drops_stored: bool,
) -> Compacted:
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
    size: int,
    num_head: int | None = None,
) -> RetainedWanted:
    """The wanted rows that are left, in their order, as rows of the head. int64 but for `waits_B` (bool).

    Those of sequence b are `rows_X[first_B[b] : first_B[b] + num_B[b]]`, at most `size`; a sequence of
    `waits_B` has none. `origin_R` ascends: the number of each row that is left among the rows that wanted
    rows are of. With `num_head` the head has so many rows; None: all, where they were."""
    packs, num_head = num_head is not None, len(rows_X) if num_head is None else num_head
    if not runs_kernels(rows_X):
        return _plain_retained(rows_X, first_B, num_B, waits_B, origin_R, num_head, packs=packs)
    import triton

    from idlm.kernels.row_compaction.kernel import index_wanted_kernel, search_wanted_kernel

    (num_sequences, num_wanted), device = (len(first_B), len(rows_X)), rows_X.device
    block = triton.next_power_of_2(size)
    index_BW = torch.empty(num_sequences, block, dtype=torch.int32, device=device)
    demand_B, new_waits_B = torch.empty_like(num_B), torch.empty_like(waits_B)
    index_H, origin_H = torch.empty(2, num_head, dtype=torch.int64, device=device)
    numbers_X = torch.empty_like(rows_X)
    search_wanted_kernel[(num_sequences,)](
        *(rows_X, first_B, num_B, waits_B, origin_R, index_BW, demand_B),
        *(num_wanted, len(origin_R), len(origin_R).bit_length()),
        BLOCK_W=block,
        num_warps=1,
    )
    index_wanted_kernel[(num_sequences + triton.cdiv(max(num_wanted, num_head), PADDING_BLOCK),)](
        *((first_B, num_B, waits_B, index_BW, demand_B), (index_H, origin_H, numbers_X, new_waits_B)),
        *(num_sequences, num_wanted, num_head),
        PACKS=packs,
        BLOCK_B=max(16, triton.next_power_of_2(num_sequences)),
        BLOCK_W=block,
        BLOCK=PADDING_BLOCK,
        num_warps=1,
    )
    return RetainedWanted(
        index_H=index_H,
        origin_H=origin_H if packs else None,
        numbers_X=numbers_X,
        waits_B=new_waits_B,
        demand_B=demand_B,
    )


def _plain_retained(
    rows_X: Tensor,
    first_B: Tensor,
    num_B: Tensor,
    waits_B: Tensor,
    origin_R: Tensor,
    num_head: int,
    *,
    packs: bool,
) -> RetainedWanted:
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
    """The row at each position of the blocks of `size` positions that begin at slots `starts_B`, int64 [B,
    W], -1: none; and which of these are masks, bool [B, W] (None: there are no masks). The rows of a sequence
    have ascending slots without a gap."""
    if not runs_kernels(slots_R):
        first_B1, last_B1 = cu_rows_B1[:-1, None], cu_rows_B1[1:, None]
        first_slot_B1 = slots_R[first_B1.clamp(max=len(slots_R) - 1)]
        rows_BW = first_B1 + starts_B[:, None] - first_slot_B1 + torch.arange(size, device=slots_R.device)
        has_row_BW = (rows_BW >= first_B1) & (rows_BW < last_B1)
        rows_BW = torch.where(has_row_BW, rows_BW, -1)
        if is_mask_R is None:
            return rows_BW, torch.zeros_like(has_row_BW)
        return rows_BW, has_row_BW & is_mask_R[rows_BW.clamp(min=0)]
    import triton

    from idlm.kernels.row_compaction.kernel import find_kernel

    rows_BW = torch.empty(len(starts_B), size, dtype=torch.int64, device=slots_R.device)
    is_mask_BW = torch.empty(len(starts_B), size, dtype=torch.bool, device=slots_R.device)
    find_kernel[(len(starts_B),)](
        *(cu_rows_B1, slots_R, is_mask_R, starts_B, rows_BW, is_mask_BW),
        SIZE=size,
        BLOCK_W=triton.next_power_of_2(size),
        num_warps=1,
    )
    return rows_BW, is_mask_BW


def spread_index(
    flags_BW: Tensor, ends_B: Tensor, starts_B: Tensor, rows_BW: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """`Drop.keep_R` and `Drop.limits_R` [num_rows] of positions that remain (bool) and see the first `ends_B`
    positions of blocks that begin at slots `starts_B`. They are undefined at rows other than `rows_BW`."""
    if not runs_kernels(rows_BW):
        limits_BW = (starts_B + ends_B)[:, None].expand_as(rows_BW)
        keep_R = by_row(flags_BW, rows_BW, num_rows, other=True)
        return keep_R, by_row(limits_BW, rows_BW, num_rows, other=torch.iinfo(torch.int64).max)
    import triton

    from idlm.kernels.row_compaction.kernel import spread_kernel

    (num_sequences, size), device = rows_BW.shape, rows_BW.device
    assert flags_BW.is_contiguous() and rows_BW.is_contiguous(), f"{flags_BW.stride()=} {rows_BW.stride()=}"
    keep_R = torch.empty(num_rows, dtype=torch.bool, device=device)
    limits_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    spread_kernel[(num_sequences,)](
        *(flags_BW, ends_B, starts_B, rows_BW, keep_R, limits_R),
        SIZE=size,
        BLOCK_W=triton.next_power_of_2(size),
        num_warps=1,
    )
    return keep_R, limits_R


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


def ranks(keys_BW: Tensor, is_candidate_BW: Tensor) -> Tensor:
    """How many candidates come before each position: larger keys first, the left one of equal keys first.

    Compares all W * W pairs: a sort is not stable on every device, and W is small."""
    index_W = torch.arange(keys_BW.shape[1], device=keys_BW.device)
    mine_BW1, other_B1W = keys_BW[:, :, None], keys_BW[:, None, :]
    is_left_WW = index_W[None, :] < index_W[:, None]
    is_before_BWW = (other_B1W > mine_BW1) | ((other_B1W == mine_BW1) & is_left_WW)
    return (is_before_BWW & is_candidate_BW[:, None, :]).sum(-1)


def flagged(is_flagged_R: Tensor, num_left: int) -> Tensor:
    """Numbers [num_left] of the flagged rows in order, R after the last; those beyond `num_left` are left
    out."""
    num_rows, device = len(is_flagged_R), is_flagged_R.device
    # Rows that are left out go to one more position, which is cut off.
    index_R = torch.where(is_flagged_R, is_flagged_R.cumsum(0) - 1, num_left).clamp(max=num_left)
    numbers = torch.full((num_left + 1,), num_rows, dtype=torch.int64, device=device)
    return numbers.scatter_(0, index_R, torch.arange(num_rows, device=device))[:-1]


def gather_rows(
    numbers_I: Tensor, tensors: Sequence[Tensor], *, out: Sequence[Tensor] | None = None
) -> Sequence[Tensor]:
    """`[tensor[numbers_I] for tensor in tensors]`, contiguous, in one launch; up to `MAX_GATHERED` tensors.
    `out`: where they go.

    Each is [R, ...] of any dtype, its rows contiguous; they may have gaps between them."""
    assert len(tensors) <= MAX_GATHERED, f"{len(tensors)=}"
    if not runs_kernels(numbers_I):
        found = [tensor[numbers_I] for tensor in tensors]
        for target, rows in zip(out or (), found, strict=out is not None):
            target.copy_(rows)
        return found if out is None else out
    import triton

    from idlm.kernels.row_compaction.kernel import gather_kernel

    num_left = len(numbers_I)
    results = out or [
        torch.empty(num_left, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
        for tensor in tensors
    ]
    assert all(result.is_contiguous() for result in results), f"{[t.stride() for t in results]=}"
    if not tensors or not num_left:
        return results
    assert all(tensor[:1].is_contiguous() for tensor in tensors), f"{[t.stride() for t in tensors]=}"
    words = [_words(tensor) for tensor in tensors]
    words += [words[0]] * (MAX_GATHERED - len(words))
    targets = [_words(result) for result in results]
    targets += [targets[0]] * (MAX_GATHERED - len(targets))
    widths = [word.shape[1] for word in words]
    gather_kernel[(num_left, len(tensors), triton.cdiv(max(widths[: len(tensors)]), GATHERED_BLOCK))](
        *(numbers_I, tuple(words), tuple(targets), tuple(word.stride(0) for word in words), tuple(widths)),
        NUM=MAX_GATHERED,
        BLOCK=GATHERED_BLOCK,
        num_warps=4,
    )
    return results


def _words(x: Tensor) -> Tensor:
    """The same memory as rows [R, M] of the widest integers that divide a row."""
    flat = x.view(len(x), -1) if x.is_contiguous() else x.flatten(1)
    sizes = (flat.shape[1], flat.stride(0), flat.storage_offset())
    for dtype in (torch.int32, torch.int16):
        if all(size * x.element_size() % dtype.itemsize == 0 for size in sizes):
            return flat.view(dtype)
    return flat.view(torch.uint8)
