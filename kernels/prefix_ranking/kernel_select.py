"""The Triton kernel that lists the largest of many scores, in the order of their positions.

One program has the scores of one layer, sequence and KV head. It narrows an interval of keys (integers in
the order of the scores) by histograms of 256 bins until the C largest are known. Most positions are ruled out
before: the C-th largest maximum of a group of positions is a lower bound of the C-th largest score, so that
only groups whose maximum reaches it are looked at again. Counts are integers, so the order of sums is no
matter.

L layers, B sequences, K KV heads, S positions, C listed ones, Z lanes."""

from __future__ import annotations

import triton
import triton.language as tl

BINS: tl.constexpr = tl.constexpr(256)
BIN_BITS: tl.constexpr = tl.constexpr(8)
MANY_BITS: tl.constexpr = tl.constexpr(16)
LOW_BITS: tl.constexpr = tl.constexpr(0xFFFF)


@triton.jit
def _keys(b_score):
    """Unsigned integers in the order of the scores; -0 equals 0, and NaN is above +inf."""
    b_score = tl.where(b_score == 0.0, 0.0, b_score)
    b_bits = b_score.to(tl.int32, bitcast=True)
    b_bits = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)
    b_key = b_bits.to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(b_score != b_score, 0xFFFFFFFF, b_key).to(tl.uint32)


@triton.jit
def _width(span):
    """How many bits a bin is wide if BINS bins cover `span`."""
    o_bit = tl.arange(0, 32).to(tl.uint32)
    return tl.sum((((span >> o_bit) > 0) & (o_bit >= BIN_BITS)).to(tl.uint32), 0)


@triton.jit
def _narrow(b_histogram, need, low, high, bits):
    """The bin of the `need`-th largest key: its interval, how many of it are needed, how many it has."""
    o_bin = tl.arange(0, BINS)
    b_from = tl.cumsum(b_histogram, 0, reverse=True)
    bin = tl.sum((b_from >= need).to(tl.int32), 0) - 1
    num = tl.sum(tl.where(o_bin == bin, b_histogram, 0), 0)
    above = tl.sum(tl.where(o_bin == bin, b_from, 0), 0) - num
    new_low = low + (bin.to(tl.uint32) << bits)
    # Not low + width - 1 < high: the sum could exceed 32 bits.
    new_high = new_low + tl.minimum(high - new_low, (tl.full((), 1, tl.uint32) << bits) - 1)
    return new_low, new_high, need - above, num


@triton.jit
def _bins(b_key, m_valid, low, high, bits, b_histogram):
    """The histogram with the keys of one more tile that are in the interval."""
    m_in = m_valid & (b_key >= low) & (b_key <= high)
    b_bin = tl.where(m_in, (b_key - low) >> bits, 0).to(tl.int32)
    return b_histogram + tl.histogram(b_bin, BINS, mask=m_in)


@triton.jit
def _candidates(scores, ids, tile, num, group_bits, count, TILE: tl.constexpr):
    """Positions and keys of a tile of the candidates: 2 ** group_bits positions for each of the `num` ids."""
    o_number = tile * TILE + tl.arange(0, TILE)
    m_group = o_number < (num << group_bits)
    b_group = tl.load(ids + (o_number >> group_bits), mask=m_group, other=0)
    o_index = (b_group << group_bits) + (o_number & ((1 << group_bits) - 1))
    m_valid = m_group & (o_index < count)
    return o_index, _keys(tl.load(scores + o_index, mask=m_valid, other=0.0)), m_valid


@triton.jit
def _store_taken(target, maximum, o_value, b_key, m_valid, interval, need, counts):
    """Store the values whose keys are above the interval, and the first `need` of those in it, after those
    stored before; the first `maximum` of all. `counts`: how many of both there were before; returns them with
    those of this tile."""
    low, high = interval
    num_above, num_in = counts
    m_above = m_valid & (b_key > high)
    m_in = m_valid & (b_key >= low) & (b_key <= high)
    # Two counts in one sum.
    b_both = m_above.to(tl.int32) + (m_in.to(tl.int32) << MANY_BITS)
    b_sum = tl.cumsum(b_both, 0)
    b_before = b_sum - b_both
    b_above = num_above + (b_before & LOW_BITS)
    b_in = num_in + (b_before >> MANY_BITS)
    o_target = b_above + tl.minimum(b_in, need)
    m_taken = (m_above | (m_in & (b_in < need))) & (o_target < maximum)
    tl.store(target + o_target, o_value, mask=m_taken)
    total = tl.sum(b_both, 0)
    return num_above + (total & LOW_BITS), num_in + (total >> MANY_BITS)


@triton.jit
def _maxima(scores, maxima, count, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Store the largest key of each group of positions; returns the least and the largest of them."""
    b_low = tl.full([GROUPS], 0xFFFFFFFF, tl.uint32)
    b_high = tl.full([GROUPS], 0, tl.uint32)
    num_groups = tl.cdiv(count, GROUP)
    for tile in range(tl.cdiv(num_groups, GROUPS)):
        o_group = tile * GROUPS + tl.arange(0, GROUPS)
        o_index = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        m_valid = o_index < count
        b_key = _keys(tl.load(scores + o_index, mask=m_valid, other=0.0))
        b_largest = tl.max(tl.where(m_valid, b_key, 0), 1)
        m_group = o_group < num_groups
        tl.store(maxima + o_group, b_largest.to(tl.int32, bitcast=True), mask=m_group)
        b_low = tl.minimum(b_low, tl.where(m_group, b_largest, 0xFFFFFFFF))
        b_high = tl.maximum(b_high, tl.where(m_group, b_largest, 0))
    return tl.min(b_low, 0), tl.max(b_high, 0)


@triton.jit
def _largest_groups(maxima, ids, num_groups, maximum, low, high, TILE: tl.constexpr):
    """List the groups that may have one of the `maximum` largest scores, ascending; returns their number, and
    the least key that one of these scores can have."""
    interval_low, interval_high, need, num = low, high, maximum, num_groups
    # A lower bound is enough: it may be met by an eighth more groups than are needed.
    while (num - need > maximum // 8) & (interval_low < interval_high):
        bits = _width(interval_high - interval_low)
        b_histogram = tl.zeros([BINS], tl.int32)
        for tile in range(tl.cdiv(num_groups, TILE)):
            o_group = tile * TILE + tl.arange(0, TILE)
            m_group = o_group < num_groups
            b_key = tl.load(maxima + o_group, mask=m_group, other=0).to(tl.uint32, bitcast=True)
            b_histogram = _bins(b_key, m_group, interval_low, interval_high, bits, b_histogram)
        interval_low, interval_high, need, num = _narrow(b_histogram, need, interval_low, interval_high, bits)
    num_above, num_in = 0, 0
    for tile in range(tl.cdiv(num_groups, TILE)):
        o_group = tile * TILE + tl.arange(0, TILE)
        m_group = o_group < num_groups
        b_key = tl.load(maxima + o_group, mask=m_group, other=0).to(tl.uint32, bitcast=True)
        num_above, num_in = _store_taken(
            *(ids, num_groups, o_group, b_key, m_group),
            *((interval_low, interval_high), num_groups, (num_above, num_in)),
        )
    return num_above + num_in, interval_low


@triton.jit
def _interval(scores, ids, num, group_bits, count, maximum, low, high, TILE: tl.constexpr):
    """The interval of keys of which as many are listed as are needed, in place of all; and this number."""
    need, size = maximum, count
    while (size > need) & (low < high):
        bits = _width(high - low)
        b_histogram = tl.zeros([BINS], tl.int32)
        for tile in range(tl.cdiv(num << group_bits, TILE)):
            _, b_key, m_valid = _candidates(scores, ids, tile, num, group_bits, count, TILE)
            b_histogram = _bins(b_key, m_valid, low, high, bits, b_histogram)
        low, high, need, size = _narrow(b_histogram, need, low, high, bits)
    return low, high, need


@triton.jit
def _taken(target, num_free, scores, ids, num, group_bits, count, low, high, need, TILE: tl.constexpr):
    """Store the candidates above an interval and the first `need` of those in it; returns their number, which
    may be above the `num_free` that there is for them."""
    num_above, num_in = 0, 0
    for tile in range(tl.cdiv(num << group_bits, TILE)):
        o_index, b_key, m_valid = _candidates(scores, ids, tile, num, group_bits, count, TILE)
        num_above, num_in = _store_taken(
            target, num_free, o_index, b_key, m_valid, (low, high), need, (num_above, num_in)
        )
    return num_above + tl.minimum(num_in, need)


@triton.jit(do_not_specialize=["num_sequences", "num_scores", "max_groups", "num_listed", "stride_lane"])
def select_kernel(
    scores_LBKS, scratch, counts_B, is_selected_B, lanes_B, slots_LZKC,
    num_sequences, num_scores, max_groups, num_listed, stride_layer, stride_lane,
    K: tl.constexpr, GROUP_BITS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The list of one layer, sequence and KV head. A group has 2 ** GROUP_BITS positions; `scratch` has two
    numbers for each."""
    kv_head, sequence = tl.program_id(0) % K, tl.program_id(0) // K % num_sequences
    layer = (tl.program_id(0) // K // num_sequences).to(tl.int64)
    if tl.load(is_selected_B + sequence) == 0:
        return
    count = tl.load(counts_B + sequence).to(tl.int32)
    lane = tl.load(lanes_B + sequence).to(tl.int64)
    listed = slots_LZKC + layer * stride_layer + lane * stride_lane + kv_head * num_listed
    row = tl.program_id(0).to(tl.int64)
    scores, scratch = scores_LBKS + row * num_scores, scratch + row * 2 * max_groups

    maximum = tl.minimum(num_listed, count)
    for first in range(maximum // TILE * TILE, num_listed, TILE):
        o_empty = first + tl.arange(0, TILE)
        tl.store(listed + o_empty, -1, mask=(o_empty >= maximum) & (o_empty < num_listed))
    if maximum == 0:
        return
    num_groups = tl.cdiv(count, 1 << GROUP_BITS)
    low, high = _maxima(scores, scratch, count, 1 << GROUP_BITS, GROUPS)
    tl.debug_barrier()
    ids, group_bits = scratch + max_groups, tl.full((), GROUP_BITS, tl.int32)
    num, low = _largest_groups(scratch, ids, num_groups, tl.minimum(maximum, num_groups), low, high, TILE)
    # With no more groups than positions to list, positions below the least maximum count too.
    low = tl.where(num_groups <= maximum, 0, low).to(tl.uint32)
    tl.debug_barrier()
    # Positions of these groups that may be listed replace the maxima, if there are no more of them.
    num_positions = _taken(scratch, max_groups, scores, ids, num, group_bits, count, low, high, count, TILE)
    if num_positions <= max_groups:
        ids, num, group_bits = scratch, num_positions, 0
    tl.debug_barrier()
    low, high, need = _interval(scores, ids, num, group_bits, count, maximum, low, high, TILE)
    _taken(listed, maximum, scores, ids, num, group_bits, count, low, high, need, TILE)
