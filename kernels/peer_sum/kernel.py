"""The Triton kernel of a sum over ranks with residual addition and RMSNorm: one program per row.

Program i of a rank talks to the programs i of the other ranks only, through its row of their boxes.
R rows, D width, N ranks."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.rms_norm.kernel import norm_row

STOP_POLLS = tl.constexpr(4096)
STOPPED = tl.constexpr(1 << 20)


@triton.jit
def peer_sum_rms_norm_kernel(
    x_RD,
    residual_RD,
    weight_D,
    normed_RD,
    turns,
    box_0,
    box_1,
    box_2,
    box_3,
    box_4,
    box_5,
    box_6,
    box_7,
    stop,
    stride_x,
    stride_residual,
    stride_normed,
    D,
    eps,
    num_slots,
    stride_slot,
    counters,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TWO_ROUNDS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """normed = rms_norm(sum of x over ranks + residual) * weight; that sum replaces the residual.

    Boxes and `stop`, the word that ends all waiting, are addresses. A box has rows by turn (0 or 1), source
    and slot, and at byte `counters` the number of rows that have arrived, by turn and slot."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    boxes = (box_0, box_1, box_2, box_3, box_4, box_5, box_6, box_7)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK_D)
    m_column = column < D
    weight = tl.load(weight_D + column, mask=m_column, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turns + row)
    x = tl.load(x_RD + row.to(tl.int64) * stride_x + column, mask=m_column, other=0.0)
    p_residual = residual_RD + row.to(tl.int64) * stride_residual + column
    residual = tl.load(p_residual, mask=m_column, other=0.0)
    slot = turn * num_slots + row
    # Of the row from this rank in a box, and from all in the own one.
    here = (turn * SIZE + RANK).to(tl.int64) * num_slots + row
    own = _rows(boxes[RANK], (turn * SIZE).to(tl.int64) * num_slots + row, stride_slot, x.dtype) + column
    next_source = tl.cast(num_slots, tl.int64) * stride_slot
    p_own_counter = _counter(boxes[RANK], counters, slot)
    if TWO_ROUNDS:
        owner = row % SIZE
        if owner == RANK:
            _await(p_own_counter, SIZE - 1, stop)
            x = _sum(x, own, next_source, m_column, RANK, SIZE)
            _give_all(x, boxes, here, stride_slot, column, m_column, RANK, SIZE)
            _count_all(boxes, counters, slot, RANK, SIZE, BLOCK_N)
        else:
            _give(x, boxes, owner, here, stride_slot, column, m_column, counters, slot, SIZE)
            _await(p_own_counter, 1, stop)
            x = _take(own + owner * next_source, m_column)
    else:
        _give_all(x, boxes, here, stride_slot, column, m_column, RANK, SIZE)
        _count_all(boxes, counters, slot, RANK, SIZE, BLOCK_N)
        _await(p_own_counter, SIZE - 1, stop)
        x = _sum(x, own, next_source, m_column, RANK, SIZE)
    tl.store(turns + row, 1 - turn)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(p_residual, x, mask=m_column)
    p_normed = normed_RD + row.to(tl.int64) * stride_normed + column
    tl.store(p_normed, norm_row(x, weight, D, eps), mask=m_column)


@triton.jit
def _rows(box, index, stride_slot, dtype: tl.constexpr):
    """The row `index` of a box. Rows begin at multiples of 16 bytes."""
    return tl.multiple_of(box.to(tl.pointer_type(dtype)) + index * stride_slot, 16)


@triton.jit
def _counter(box, counters, slot):
    return (box + counters).to(tl.pointer_type(tl.int32)) + slot


@triton.jit
def _take(p_row, m_column):
    """A row of the own box, which others have written: .cg reads past the L1 cache."""
    return tl.load(p_row, mask=m_column, other=0.0, cache_modifier=".cg")


@triton.jit
def _give(x, boxes, owner, here, stride_slot, column, m_column, counters, slot, SIZE: tl.constexpr):
    """Write the row to one rank, and tell it."""
    box = boxes[0]
    for rank in tl.static_range(1, SIZE):
        box = tl.where(owner == rank, boxes[rank], box)
    tl.store(_rows(box, here, stride_slot, x.dtype) + column, x, mask=m_column)
    tl.debug_barrier()
    tl.atomic_add(_counter(box, counters, slot), 1, sem="release", scope="sys")


@triton.jit
def _give_all(x, boxes, here, stride_slot, column, m_column, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Write the row to all other ranks, each of which starts with another one."""
    for step in tl.static_range(1, SIZE):
        tl.store(_rows(boxes[(RANK + step) % SIZE], here, stride_slot, x.dtype) + column, x, mask=m_column)


@triton.jit
def _count_all(boxes, counters, slot, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tell all other ranks, at once, that this rank's row has arrived."""
    rank = tl.arange(0, BLOCK_N)
    box = tl.zeros_like(rank).to(tl.int64)
    for each in tl.static_range(SIZE):
        box = tl.where(rank == each, boxes[each], box)
    tl.debug_barrier()
    m_rank = (rank < SIZE) & (rank != RANK)
    tl.atomic_add(_counter(box, counters, slot), 1, mask=m_rank, sem="release", scope="sys")


@triton.jit
def _sum(x, own, next_source, m_column, RANK: tl.constexpr, SIZE: tl.constexpr):
    """The sum of the own row and of those that have arrived, in fp32 and in the order of ranks; rounded."""
    total = tl.zeros_like(x).to(tl.float32)
    for source in tl.static_range(SIZE):
        part = x
        if source != RANK:
            part = _take(own + source * next_source, m_column)
        total += part.to(tl.float32)
    return total.to(x.dtype)


@triton.jit
def _await(p_counter, count, stop):
    """Wait until `count` rows have arrived, and set their number to zero; or until waiting is ended.

    Only what atomics return decides, because all threads of a program get the same from them."""
    arrived = tl.atomic_cas(p_counter, count, 0, sem="acquire", scope="sys")
    polls = 0
    while (arrived != count) & (arrived < STOPPED):
        polls += 1
        if polls % STOP_POLLS == 0:
            is_stopped = tl.load(stop.to(tl.pointer_type(tl.int32)), volatile=True)
            tl.atomic_add(p_counter, is_stopped * STOPPED, sem="relaxed", scope="sys")
        arrived = tl.atomic_cas(p_counter, count, 0, sem="acquire", scope="sys")
