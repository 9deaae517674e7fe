"""Triton functions: the threshold of top-k or top-p in a whole row, by passes with eight pivots.

They serve rows whose candidates do not fit the list of kernel_probs.py. A sample of the row gives the first
pivots, so that in 16 bits one pass usually suffices for the threshold. Logits are ordered by integer keys."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.sampling.kernel import weight

PIECE: tl.constexpr = tl.constexpr(16)


@triton.jit
def key_of(b_logits, KEY_SHIFT: tl.constexpr):
    """int64 that orders as the logit does (-0 is 0); the dtype leaves KEY_SHIFT mantissa bits zero."""
    b_bits = tl.where(b_logits == 0, 0.0, b_logits).to(tl.int32, bitcast=True)
    return ((b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)) >> KEY_SHIFT).to(tl.int64)


@triton.jit
def logit_of(key, KEY_SHIFT: tl.constexpr):
    """The fp32 logit of a key."""
    bits = (key << KEY_SHIFT).to(tl.int32)
    bits = tl.where(key < 0, bits | ((1 << KEY_SHIFT) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def highest_reaching(b_logits, b_share, target, low, high, KEY_SHIFT: tl.constexpr):
    """(largest key in [low, high) at or above which the shares reach `target`, the share above that key).

    Eight pivots at once: one step takes little longer than one sum. The answer is `low` if no key does."""
    o_pivot = tl.arange(0, 8).to(tl.int64)
    above = tl.zeros((), tl.float32)
    while high - low > 1:
        b_key = tl.maximum(high - (high - low + 8) // 9 * (o_pivot + 1), low + 1)
        b_is_above = b_logits[None, :] >= logit_of(b_key, KEY_SHIFT)[:, None]
        b_reached = tl.sum(tl.where(b_is_above, b_share[None, :], 0.0), 1)
        b_is_reached = b_reached >= target
        low = tl.maximum(low, tl.max(tl.where(b_is_reached, b_key, low), 0))
        high = tl.minimum(high, tl.min(tl.where(b_is_reached, high, b_key), 0))
        above = tl.maximum(above, tl.max(tl.where(b_is_reached, 0.0, b_reached), 0))
    return low, above.to(tl.float64)


@triton.jit
def share_of(b_values, largest, scale, by_count):
    return tl.where(by_count, 1.0, weight(b_values, largest, scale))


@triton.jit
def reached_in_row(p_row, num_tokens, largest, scale, by_count, pivots, STEP: tl.constexpr):
    """Count or weight of a row at or above each of eight pivots, fp64.

    Every position of a step has its own sum: errors of fp32 average out, and the loop has no dependency."""
    o_step = tl.arange(0, STEP)
    b_next = tl.load(p_row + o_step, mask=o_step < num_tokens, other=float("-inf"))
    b_sums = [tl.zeros([STEP], tl.float32) for _ in pivots]
    for start in range(0, num_tokens, STEP):
        b_values = b_next
        o_next = start + STEP + o_step
        b_next = tl.load(p_row + o_next, mask=o_next < num_tokens, other=float("-inf"))
        b_share = share_of(b_values, largest, scale, by_count)
        b_logits = b_values.to(tl.float32)
        b_sums = [
            tl.fma((b_logits >= pivots[i]).to(tl.float32), b_share, b_sums[i])
            for i in (0, 1, 2, 3, 4, 5, 6, 7)
        ]
    return [tl.sum(b_sum.to(tl.float64), 0) for b_sum in b_sums]


@triton.jit
def weight_in_row(p_row, num_tokens, largest, scale, pivot, STEP: tl.constexpr):
    """Weight of a row at or above a pivot, fp64."""
    o_step = tl.arange(0, STEP)
    b_sum = tl.zeros([STEP], tl.float32)
    for start in range(0, num_tokens, STEP):
        o_token = start + o_step
        b_values = tl.load(p_row + o_token, mask=o_token < num_tokens, other=float("-inf"))
        b_sum += tl.where(b_values.to(tl.float32) >= pivot, weight(b_values, largest, scale), 0.0)
    return tl.sum(b_sum.to(tl.float64), 0)


@triton.jit
def pivot_of(number, low, high, top, bottom, by_key, KEY_SHIFT: tl.constexpr):
    """Pivot `number` of 0 to 7 as a key inside (low, high): even in keys, or in logits from top to bottom."""
    even_in_keys = high - (high - low + 8) // 9 * (number + 1)
    even_in_logits = key_of(top - (top - bottom) * (number / 7), KEY_SHIFT)
    key = tl.where(by_key, even_in_keys, even_in_logits)
    return tl.minimum(tl.maximum(key, low + 1), high - 1)


@triton.jit
def narrowed_bracket(low, high, above, pivot, reached, target):
    """The bracket after one pivot; pivots come in falling order."""
    is_reached = reached >= target
    is_new_low = is_reached & (pivot > low)
    is_new_high = (reached < target) & (pivot < high)
    low = tl.where(is_new_low, pivot, low)
    above = tl.where(is_new_high, reached, above)
    return low, tl.where(is_new_high, pivot, high), above


@triton.jit
def search_row(
    p_row, num_tokens, largest, scale, by_count, target, low, high, top, bottom,
    KEY_SHIFT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`highest_reaching` over the row. `top`, `bottom`: logits between which the first pivots lie."""
    above = tl.zeros((), tl.float64)
    i_round = 0
    while high - low > 1:
        # Keys crowd around 0 and logits do not, but only a search over keys is certain to end.
        by_key = (i_round % 2 == 1) | ((top - bottom < 1e30) == 0)
        keys = [
            pivot_of(number, low, high, top, bottom, by_key, KEY_SHIFT) for number in (0, 1, 2, 3, 4, 5, 6, 7)
        ]
        pivots = [logit_of(key, KEY_SHIFT) for key in keys]
        reached = reached_in_row(p_row, num_tokens, largest, scale, by_count, pivots, STEP)
        for i in tl.static_range(8):
            low, high, above = narrowed_bracket(low, high, above, keys[i], reached[i], target)
        ninth = (logit_of(high, KEY_SHIFT) - logit_of(low, KEY_SHIFT)) / 9
        top = logit_of(high, KEY_SHIFT) - ninth
        bottom = logit_of(low, KEY_SHIFT) + ninth
        i_round += 1
    return low, above


@triton.jit
def sampled_bracket(
    p_row, num_tokens, largest, scale, tail, low, high, KEY_SHIFT: tl.constexpr, SAMPLE: tl.constexpr
):
    """Logits between which the key lies, probably, below which the tokens from `low` on weigh `tail`.

    The weight below a key is estimated from a sample of pieces of PIECE tokens, its error from the sample's
    variance, and what this means in logits from the weight near by. A bracket that misses costs a pass."""
    top = logit_of(high, KEY_SHIFT)
    bottom = logit_of(low, KEY_SHIFT)
    if num_tokens >= 2 * SAMPLE:
        o_sample = tl.arange(0, SAMPLE)
        stride = num_tokens // (SAMPLE // PIECE) // PIECE * PIECE
        b_values = tl.load(p_row + o_sample // PIECE * stride + o_sample % PIECE)
        b_logits = b_values.to(tl.float32)
        b_share = weight(b_values, largest, scale) * (num_tokens / SAMPLE)
        b_share = tl.where(b_logits >= bottom, b_share, 0.0)
        minimum = low
        maximum = high
        while maximum - minimum > 1:
            middle = minimum + (maximum - minimum) // 2
            is_over = tl.sum(tl.where(b_logits < logit_of(middle, KEY_SHIFT), b_share, 0.0), 0) > tail
            minimum = tl.where(is_over, minimum, middle)
            maximum = tl.where(is_over, middle, maximum)
        middle_logit = logit_of(minimum, KEY_SHIFT)
        b_below = tl.where(b_logits <= middle_logit, b_share, 0.0)
        below = tl.sum(b_below, 0)
        near = (0.5 / scale).to(tl.float32)
        is_near = (b_logits > middle_logit - near) & (b_logits < middle_logit + near)
        weight_near = tl.sum(tl.where(is_near, b_share, 0.0), 0)
        if (below > 0) & (weight_near > 0):
            deviation = tl.sqrt(tl.sum(b_below * b_below, 0)) / below * tail.to(tl.float32)
            reach = 2.5 * deviation * 2 * near / weight_near
            bottom = tl.maximum(tl.minimum(middle_logit - reach, logit_of(minimum - 1, KEY_SHIFT)), bottom)
            top = tl.minimum(tl.maximum(middle_logit + reach, logit_of(minimum + 2, KEY_SHIFT)), top)
    return top, bottom
