"""Triton kernels around the products: routing, the plan of tiles, the sum of a row's experts.

The order in which they add floats depends on the row alone. Contract in README.md.
R rows, X experts that rows choose from, E experts that are here, C chosen experts, P = R C pairs, T tiles, G
groups, D width, W rows of a block."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.experts.types import MIN_SUM

SMALLEST_SUM: tl.constexpr = tl.constexpr(MIN_SUM)
NEVER: tl.constexpr = tl.constexpr(-float("inf"))


@triton.jit
def _largest(quality, is_taken, number, MAX: tl.constexpr):
    """Number of the largest quality that is not taken; of equal ones the lowest number."""
    open_quality = tl.where(is_taken, NEVER, quality)
    best = tl.max(tl.max(open_quality, axis=1), axis=0)
    is_best = (open_quality == best) & (is_taken == 0)
    return tl.min(tl.min(tl.where(is_best, number, MAX), axis=1), axis=0)


@triton.jit
def _outside_best_groups(
    quality, group, m_x, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, PAD_G: tl.constexpr
):
    """[PAD_G, 1]: whether a group is not among those whose two best scores have the largest sums."""
    inside = tl.where(m_x, quality, NEVER)
    best, index = tl.max(inside, axis=1, return_indices=True)
    o_inside = tl.arange(0, quality.shape[1])[None, :]
    second = tl.max(tl.where(o_inside == index[:, None], NEVER, inside), axis=1)
    sums = (best + second)[:, None]
    is_taken = group >= GROUPS
    is_chosen = group < 0
    for _ in range(CHOSEN_GROUPS):
        is_new = group == _largest(sums, is_taken, group, PAD_G)
        is_taken = is_taken | is_new
        is_chosen = is_chosen | is_new
    return is_chosen == 0


@triton.jit(do_not_specialize=["R"])
def admit_kernel(
    given,
    admitted_RX,
    R,
    stride_logits,
    ROUTING: tl.constexpr,
    X: tl.constexpr,
    PAD_W: tl.constexpr,
    PAD_X: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block, by its first row, where the experts are marked that it admits. Other rows end at once."""
    logits_RX, bias_X, slots_R, positions_R = given
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions_R + row)
    if position % ROUTING.block_size != 0:
        return
    o_w, number = tl.arange(0, PAD_W), tl.arange(0, PAD_X)
    m_w = (o_w < ROUTING.block_size) & (row + o_w < R)
    # A block that ends early is followed by another block, or by padding.
    m_w = m_w & (tl.load(positions_R + row + o_w, mask=m_w, other=-1) == position + o_w)
    if slots_R is not None:
        m_w = m_w & (tl.load(slots_R + row + o_w, mask=m_w, other=-1) >= 0)
    m_x = number < X
    m_wx = m_w[:, None] & m_x[None, :]
    p_logits = logits_RX + (row + o_w)[:, None] * stride_logits + number[None, :]
    logits = tl.load(p_logits, mask=m_wx, other=NEVER).to(tl.float32)
    if ROUTING.score == "sigmoid":
        quality = 1.0 / (1.0 + tl.exp(-logits))
    else:
        raised = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        quality = raised / tl.sum(raised, axis=1)[:, None]
    quality = tl.where(quality == quality, quality, 0.0)
    if bias_X is not None:
        quality += tl.load(bias_X + number, mask=m_x, other=0.0).to(tl.float32)[None, :]
    best = tl.max(tl.where(m_wx, quality, NEVER), axis=0)
    is_same_before = (best[None, :] == best[:, None]) & (number[None, :] < number[:, None])
    is_before = (best[None, :] > best[:, None]) | is_same_before
    rank = tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(admitted_RX + row * X + number, (rank < ROUTING.capacity).to(tl.int8), mask=m_x)


@triton.jit
def route_kernel(
    given,
    admitted_RX,
    experts_RC,
    weights_RC,
    stride_logits,
    ROUTING: tl.constexpr,
    X: tl.constexpr,
    GROUPS: tl.constexpr,
    PAD_G: tl.constexpr,
    PAD_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: the chosen experts in rising order, and their weights. Experts lie as [group, position in it].

    `admitted_RX` (None: all): whether the first row of a block has admitted each of them."""
    logits_RX, bias_X, slots_R, positions_R = given
    row = tl.program_id(0).to(tl.int64)
    IN_GROUP: tl.constexpr = X // GROUPS
    group, index = tl.arange(0, PAD_G)[:, None], tl.arange(0, PAD_S)[None, :]
    m_x = (group < GROUPS) & (index < IN_GROUP)
    number = group * IN_GROUP + index
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    logits = tl.load(logits_RX + row * stride_logits + number, mask=m_x, other=NEVER).to(tl.float32)
    if ROUTING.score == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        raised = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = raised / tl.sum(tl.sum(raised, axis=1), axis=0)
    # A padding row may hold NaN, but must not be stored outside of the tables.
    scores = tl.where(m_x & (scores == scores), scores, 0.0)
    quality = scores
    if bias_X is not None:
        quality += tl.load(bias_X + number, mask=m_x, other=0.0).to(tl.float32)
    is_taken = m_x == 0
    if ROUTING.num_chosen_groups < GROUPS:
        is_taken = is_taken | _outside_best_groups(
            quality, group, m_x, GROUPS, ROUTING.num_chosen_groups, PAD_G
        )
    is_padding = False
    if slots_R is not None:
        is_padding = tl.load(slots_R + row) < 0
    if admitted_RX is not None:
        # Padding has no block; it chooses too, so that its whole row of the tables is written.
        first = tl.where(is_padding, row, row - tl.load(positions_R + row) % ROUTING.block_size)
        admitted = tl.load(admitted_RX + first * X + number, mask=m_x & (is_padding == 0), other=1)
        is_taken = is_taken | (admitted == 0)
    is_chosen = number < 0
    for _ in range(ROUTING.num_chosen):
        is_new = m_x & (number == _largest(quality, is_taken, number, PAD_G * PAD_S))
        is_taken = is_taken | is_new
        is_chosen = is_chosen | is_new
    weights = tl.where(is_chosen, scores, 0.0)
    if ROUTING.is_normalised:
        weights = weights / (tl.sum(tl.sum(weights, axis=1), axis=0) + SMALLEST_SUM)
    weights = (weights * ROUTING.scaling).to(logits_RX.dtype.element_ty).to(tl.float32)
    chosen = is_chosen.to(tl.int32)
    num_before = tl.sum(chosen, axis=1)
    num_before = tl.cumsum(num_before, axis=0) - num_before
    at = num_before[:, None] + tl.cumsum(chosen, axis=1) - chosen
    stated = tl.where(is_padding, -1, number)
    tl.store(experts_RC + row * ROUTING.num_chosen + at, stated, mask=is_chosen)
    tl.store(weights_RC + row * ROUTING.num_chosen + at, weights, mask=is_chosen)


@triton.jit(do_not_specialize=["P", "T", "first", "num_experts"])
def plan_kernel(
    experts_P,
    order_P,
    tiles_T4,
    P,
    T,
    first,
    num_experts,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAD_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One expert: the positions of its pairs in sorted order (stable), and its tiles.

    A tile is (expert, first pair, end, 0); the last expert marks unused tiles with expert -1. Every program
    counts the pairs of all experts, which is cheaper than another kernel."""
    mine = tl.program_id(0)
    o_pair, o_expert = tl.arange(0, BLOCK_P), tl.arange(0, PAD_E)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    counts = tl.zeros([PAD_E], dtype=tl.int32)
    for start in range(0, P, BLOCK_P):
        pair = start + o_pair
        expert = tl.load(experts_P + pair, mask=pair < P, other=-1).to(tl.int32) - first
        m_here = (expert >= 0) & (expert < num_experts) & (pair < P)
        counts += tl.histogram(tl.where(m_here, expert, 0), PAD_E, mask=m_here)
    tiles = tl.cdiv(counts, BLOCK_R)
    begin = tl.sum(tl.where(o_expert < mine, counts, 0))
    tile = tl.sum(tl.where(o_expert < mine, tiles, 0))
    num_pairs = tl.sum(tl.where(o_expert == mine, counts, 0))
    num_tiles = tl.cdiv(num_pairs, BLOCK_R)
    o_tile = tl.arange(0, 16)
    for start in range(0, num_tiles, 16):
        at = start + o_tile
        p_tile, m_tile = tiles_T4 + (tile + at) * 4, at < num_tiles
        tl.store(p_tile, mine + at * 0, mask=m_tile)
        tl.store(p_tile + 1, begin + at * BLOCK_R, mask=m_tile)
        tl.store(p_tile + 2, tl.minimum(begin + (at + 1) * BLOCK_R, begin + num_pairs), mask=m_tile)
    if mine == num_experts - 1:
        for start in range(tile + num_tiles, T, 16):
            at = start + o_tile
            tl.store(tiles_T4 + at * 4, at * 0 - 1, mask=at < T)
    if num_pairs > 0:
        for start in range(0, P, BLOCK_P):
            pair = start + o_pair
            expert = tl.load(experts_P + pair, mask=pair < P, other=-1).to(tl.int32) - first
            is_mine = ((expert == mine) & (pair < P)).to(tl.int32)
            at = begin + tl.cumsum(is_mine, axis=0) - is_mine
            tl.store(order_P + at, pair, mask=is_mine > 0)
            begin += tl.sum(is_mine)


@triton.jit(do_not_specialize=["first", "num_experts"])
def add_experts_kernel(
    y_PD,
    experts_RC,
    weights_RC,
    shared_RD,
    out_RD,
    first,
    num_experts,
    D,
    stride_shared,
    CHOSEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of one row: its experts' outputs times their weights, added in order in fp32, then the shared
    expert's."""
    blocks = tl.cdiv(D, BLOCK_D)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    o_column = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    m_column = o_column < D
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for chosen in tl.static_range(CHOSEN):
        pair = row * CHOSEN + chosen
        expert = tl.load(experts_RC + pair).to(tl.int32) - first
        is_here = (expert >= 0) & (expert < num_experts)
        weight = tl.load(weights_RC + pair)
        # The output of a pair that was not computed may be NaN.
        y = tl.load(y_PD + pair * D + o_column, mask=m_column & is_here, other=0.0).to(tl.float32)
        total += tl.where(is_here, weight, 0.0) * y
    if shared_RD is not None:
        is_row = tl.load(experts_RC + row * CHOSEN) >= 0
        shared = tl.load(shared_RD + row * stride_shared + o_column, mask=m_column & is_row, other=0.0)
        total += shared.to(tl.float32)
    tl.store(out_RD + row * D + o_column, total.to(out_RD.dtype.element_ty), mask=m_column)
