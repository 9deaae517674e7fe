"""The Triton kernel of a sum over ranks with residual addition and RMSNorm: one program per row.

Program i of a rank talks to the programs i of the other ranks only, through its row of their boxes.
R rows, D width, N ranks."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.rms_norm.kernel import norm_row

STOP_POLLS = tl.constexpr(1024)


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
    EMPTY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TWO_ROUNDS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """normed = rms_norm(sum of x over ranks + residual) * weight; that sum replaces the residual.

    Boxes and `stop`, the word that ends all waiting, are addresses. A box has rows by turn (0 or 1), source
    and slot; an element that has not arrived is `EMPTY`, the bits of minus zero."""
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
    # Of the row from this rank in a box, and from all in the own one.
    here = (turn * SIZE + RANK).to(tl.int64) * num_slots + row
    own = _rows(boxes[RANK], (turn * SIZE).to(tl.int64) * num_slots + row, stride_slot, x.dtype) + column
    next_source = tl.cast(num_slots, tl.int64) * stride_slot
    if TWO_ROUNDS:
        owner = row % SIZE
        if owner == RANK:
            x = _sum(x, own, next_source, m_column, stop, EMPTY, RANK, SIZE)
            _give_all(x, boxes, here, stride_slot, column, m_column, EMPTY, RANK, SIZE)
        else:
            _give(x, boxes, owner, here, stride_slot, column, m_column, EMPTY, SIZE)
            p_sum = own + owner * next_source
            _await(p_sum, next_source, m_column, stop, EMPTY, -1, 1)
            x = _take(p_sum, m_column, x.dtype)
            _make_empty(p_sum, next_source, m_column, EMPTY, -1, 1)
    else:
        _give_all(x, boxes, here, stride_slot, column, m_column, EMPTY, RANK, SIZE)
        x = _sum(x, own, next_source, m_column, stop, EMPTY, RANK, SIZE)
    tl.store(turns + row, 1 - turn)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(p_residual, x, mask=m_column)
    p_normed = normed_RD + row.to(tl.int64) * stride_normed + column
    tl.store(p_normed, norm_row(x, weight, D, eps), mask=m_column)


@triton.jit
def _rows(box, index, stride_slot, dtype: tl.constexpr):
    """The row `index` of a box, as integers of the size of `dtype`. Rows begin at multiples of 16 bytes."""
    bits: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    return tl.multiple_of(box.to(tl.pointer_type(bits)) + index * stride_slot, 16)


@triton.jit
def _bits(x, EMPTY: tl.constexpr):
    """The bits of `x`, in which minus zero is zero."""
    bits = x.to(tl.int32 if x.dtype.primitive_bitwidth == 32 else tl.int16, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits)


@triton.jit
def _take(p_row, m_column, dtype: tl.constexpr):
    """A row of the own box, which others have written: .cg reads past the L1 cache."""
    return tl.load(p_row, mask=m_column, other=0, cache_modifier=".cg").to(dtype, bitcast=True)


@triton.jit
def _give(x, boxes, owner, here, stride_slot, column, m_column, EMPTY: tl.constexpr, SIZE: tl.constexpr):
    """Write the row to one rank."""
    box = boxes[0]
    for rank in tl.static_range(1, SIZE):
        box = tl.where(owner == rank, boxes[rank], box)
    tl.store(
        _rows(box, here, stride_slot, x.dtype) + column, _bits(x, EMPTY), mask=m_column, cache_modifier=".wt"
    )


@triton.jit
def _give_all(
    x,
    boxes,
    here,
    stride_slot,
    column,
    m_column,
    EMPTY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write the row to all other ranks, each of which starts with another one."""
    bits = _bits(x, EMPTY)
    for step in tl.static_range(1, SIZE):
        p_row = _rows(boxes[(RANK + step) % SIZE], here, stride_slot, x.dtype) + column
        tl.store(p_row, bits, mask=m_column, cache_modifier=".wt")


@triton.jit
def _sum(x, own, next_source, m_column, stop, EMPTY: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """The sum of the own row and of those of all others once they have arrived, in fp32 and in the order of
    ranks; rounded. Empties their slots."""
    _await(own, next_source, m_column, stop, EMPTY, RANK, SIZE)
    total = tl.zeros_like(x).to(tl.float32)
    for source in tl.static_range(SIZE):
        part = x
        if source != RANK:
            part = _take(own + source * next_source, m_column, x.dtype)
        total += part.to(tl.float32)
    _make_empty(own, next_source, m_column, EMPTY, RANK, SIZE)
    return _bits(total.to(x.dtype), EMPTY).to(x.dtype, bitcast=True)


@triton.jit
def _num_missing(p_row, next_source, m_column, EMPTY: tl.constexpr, SKIP: tl.constexpr, SIZE: tl.constexpr):
    """How many elements are empty in one column or another, of the rows of `SIZE` sources but `SKIP`."""
    num = tl.zeros(m_column.shape, tl.int32)
    for source in tl.static_range(SIZE):
        if source != SKIP:
            bits = tl.load(p_row + source * next_source, mask=m_column, other=0, volatile=True)
            num += (bits == EMPTY).to(tl.int32)
    # All threads of a program get the same, because each has columns of its own.
    return tl.max(num, axis=0)


@triton.jit
def _await(p_row, next_source, m_column, stop, EMPTY: tl.constexpr, SKIP: tl.constexpr, SIZE: tl.constexpr):
    """Wait until these rows have arrived, or until waiting is ended."""
    num_missing = _num_missing(p_row, next_source, m_column, EMPTY, SKIP, SIZE)
    polls = 0
    while num_missing > 0:
        num_missing = _num_missing(p_row, next_source, m_column, EMPTY, SKIP, SIZE)
        polls += 1
        if polls % STOP_POLLS == 0:
            p_stop = stop.to(tl.pointer_type(tl.int32)) + tl.zeros(m_column.shape, tl.int32)
            num_missing *= 1 - tl.max(tl.load(p_stop, volatile=True), axis=0)


@triton.jit
def _make_empty(p_row, next_source, m_column, EMPTY: tl.constexpr, SKIP: tl.constexpr, SIZE: tl.constexpr):
    """Empty these rows, which all threads have read."""
    tl.debug_barrier()
    for source in tl.static_range(SIZE):
        if source != SKIP:
            p_source = p_row + source * next_source
            tl.store(p_source, tl.full(m_column.shape, EMPTY, p_row.dtype.element_ty), mask=m_column)
