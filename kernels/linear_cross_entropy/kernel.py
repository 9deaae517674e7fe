"""Softmax statistics, logit gradients (in place) and overlaps of rows, on a GPU. Contract in README.md.

One program per row. It reads the row once for the statistics and once more for the gradient, which it writes
over the logits; the second read mostly hits the L2 cache."""

from __future__ import annotations

import triton
import triton.language as tl

# Fastest of tiles 2048 to 16384 and 4 to 32 warps on an H200, at 512 and 640 rows of 151,936 bf16 logits.
TILE, NUM_WARPS = 16384, 16
SCALE_TILE = 8192


@triton.jit
def _log_total(p_row, num_tokens, TILE: tl.constexpr):
    o_tile = tl.arange(0, TILE)
    # A finite start: a tile of -inf alone would otherwise give -inf - -inf.
    largest = tl.full((), -3.4e38, tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, num_tokens, TILE):
        m_tile = start + o_tile < num_tokens
        b_logits = tl.load(p_row + start + o_tile, mask=m_tile, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(b_logits, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(b_logits - larger), 0)
        largest = larger
    return largest + tl.log(total)


@triton.jit
def rows_kernel(p_logits, p_labels, p_coefficients, p_nll, row_stride, num_tokens, TILE: tl.constexpr):
    """nll of a row; with coefficients, its logits become the gradient of the weighted loss. A label outside
    [0, V) gives NaN."""
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_row * row_stride
    o_tile = tl.arange(0, TILE)
    label = tl.load(p_labels + i_row)
    is_valid = (label >= 0) & (label < num_tokens)
    at_label = tl.load(p_row + label, mask=is_valid, other=float("nan")).to(tl.float32)
    log_total = _log_total(p_row, num_tokens, TILE)
    tl.store(p_nll + i_row, log_total - at_label)

    if p_coefficients is not None:
        coefficient = tl.load(p_coefficients + i_row)
        for start in range(0, num_tokens, TILE):
            o_token = start + o_tile
            m_tile = o_token < num_tokens
            b_logits = tl.load(p_row + o_token, mask=m_tile, other=float("-inf")).to(tl.float32)
            b_gradient = tl.exp(b_logits - log_total) - tl.where(o_token == label, 1.0, 0.0)
            b_gradient = coefficient * b_gradient
            tl.store(p_row + o_token, b_gradient.to(p_logits.dtype.element_ty), mask=m_tile)


@triton.jit
def overlap_kernel(p_draft, p_verify, p_overlap, draft_stride, verify_stride, num_tokens, TILE: tl.constexpr):
    """sum_v min(softmax(draft), softmax(verify)) of a row."""
    i_row = tl.program_id(0).to(tl.int64)
    p_draft += i_row * draft_stride
    p_verify += i_row * verify_stride
    draft_total = _log_total(p_draft, num_tokens, TILE)
    verify_total = _log_total(p_verify, num_tokens, TILE)
    o_tile = tl.arange(0, TILE)
    overlap = tl.zeros((), tl.float32)
    for start in range(0, num_tokens, TILE):
        m_tile = start + o_tile < num_tokens
        b_draft = tl.load(p_draft + start + o_tile, mask=m_tile, other=float("-inf")).to(tl.float32)
        b_verify = tl.load(p_verify + start + o_tile, mask=m_tile, other=float("-inf")).to(tl.float32)
        overlap += tl.sum(tl.exp(tl.minimum(b_draft - draft_total, b_verify - verify_total)), 0)
    tl.store(p_overlap + i_row, overlap)


@triton.jit
def distilled_kernel(
    p_draft,
    p_verify,
    p_labels,
    p_coefficients,
    p_loss,
    p_nll,
    draft_stride,
    verify_stride,
    share,
    num_tokens,
    IS_KL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Loss and nll of a row of the draft; with coefficients, its logits become the gradient."""
    i_row = tl.program_id(0).to(tl.int64)
    p_draft += i_row * draft_stride
    p_verify += i_row * verify_stride
    o_tile = tl.arange(0, TILE)
    label = tl.load(p_labels + i_row)
    is_valid = (label >= 0) & (label < num_tokens)
    at_label = tl.load(p_draft + label, mask=is_valid, other=float("nan")).to(tl.float32)
    draft_total = _log_total(p_draft, num_tokens, TILE)
    verify_total = _log_total(p_verify, num_tokens, TILE)
    divergence = tl.zeros((), tl.float32)
    # Of 1 - overlap: the probability that the draft gives to tokens of which it has too little.
    below = tl.zeros((), tl.float32)
    for start in range(0, num_tokens, TILE):
        m_tile = start + o_tile < num_tokens
        b_draft = tl.load(p_draft + start + o_tile, mask=m_tile, other=float("-inf")).to(tl.float32)
        b_verify = tl.load(p_verify + start + o_tile, mask=m_tile, other=float("-inf")).to(tl.float32)
        b_draft, b_verify = b_draft - draft_total, b_verify - verify_total
        if IS_KL:
            b_lost = tl.exp(b_verify) * (b_verify - b_draft)
            divergence += tl.sum(tl.where(b_verify > float("-inf"), b_lost, 0.0), 0)
        else:
            b_low = b_draft < b_verify
            divergence += tl.sum(tl.where(b_low, tl.exp(b_verify) - tl.exp(b_draft), 0.0), 0)
            below += tl.sum(tl.where(b_low, tl.exp(b_draft), 0.0), 0)
    nll = draft_total - at_label
    tl.store(p_nll + i_row, nll)
    tl.store(p_loss + i_row, (1.0 - share) * nll + share * divergence)

    if p_coefficients is not None:
        coefficient = tl.load(p_coefficients + i_row)
        for start in range(0, num_tokens, TILE):
            o_token = start + o_tile
            m_tile = o_token < num_tokens
            b_draft = (
                tl.load(p_draft + o_token, mask=m_tile, other=float("-inf")).to(tl.float32) - draft_total
            )
            b_verify = tl.load(p_verify + o_token, mask=m_tile, other=float("-inf")).to(tl.float32)
            b_verify -= verify_total
            b_prob = tl.exp(b_draft)
            b_hard = b_prob - tl.where(o_token == label, 1.0, 0.0)
            if IS_KL:
                b_soft = b_prob - tl.exp(b_verify)
            else:
                b_soft = b_prob * (below - tl.where(b_draft < b_verify, 1.0, 0.0))
            b_gradient = coefficient * ((1.0 - share) * b_hard + share * b_soft)
            tl.store(p_draft + o_token, b_gradient.to(p_draft.dtype.element_ty), mask=m_tile)


@triton.jit
def scale_kernel(p_values, p_factor, num_values, TILE: tl.constexpr):
    """Multiply by a device scalar; does not access the values if it is 1."""
    factor = tl.load(p_factor).to(tl.float32)
    if factor != 1.0:
        o_value = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        m_value = o_value < num_values
        b_values = tl.load(p_values + o_value, mask=m_value).to(tl.float32)
        tl.store(p_values + o_value, (b_values * factor).to(p_values.dtype.element_ty), mask=m_value)
