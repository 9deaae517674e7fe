"""Rows that remain, packed again in two launches, and what is aligned with them gathered in one. Nothing
waits for the device. Contract in README.md.

B sequences, R rows, I rows that are left, W positions of a block, X wanted rows, H rows of the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from idlm.kernels.backend import runs_kernels
from idlm.kernels.row_compaction import plain
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
        sizes = {"num_left": num_left, "num_origins": num_origins}
        return plain.compact_rows(rows, drop, **sizes, limit=limit, drops_stored=drops_stored)
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
        given = rows_X, first_B, num_B, waits_B, origin_R
        return plain.retain_wanted(*given, num_head=num_head, packs=packs)
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


def find_index(
    cu_rows_B1: Tensor, slots_R: Tensor, is_mask_R: Tensor | None, starts_B: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """The row at each position of the blocks of `size` positions that begin at slots `starts_B`, int64 [B,
    W], -1: none; and which of these are masks, bool [B, W] (None: there are no masks). The rows of a sequence
    have ascending slots without a gap."""
    if not runs_kernels(slots_R):
        return plain.find_index(cu_rows_B1, slots_R, is_mask_R, starts_B, size)
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
        return plain.spread_index(flags_BW, ends_B, starts_B, rows_BW, num_rows)
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
