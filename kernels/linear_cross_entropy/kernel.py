"""Softmax statistics, logit gradients (in place) and overlaps of rows, on a GPU. Contract in README.md.

One program per row. It reads the row once for the statistics and once more for the gradient, which it writes
over the logits; the second read mostly hits the L2 cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
def _rows_kernel(
    p_logits,
    p_labels,
    p_coefficients,
    p_nll,
    row_stride,
    num_tokens,
    WITH_GRADIENT: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_row * row_stride
    o_tile = tl.arange(0, TILE)
    label = tl.load(p_labels + i_row)
    is_valid = (label >= 0) & (label < num_tokens)
    at_label = tl.load(p_row + label, mask=is_valid, other=float("nan")).to(tl.float32)
    log_total = _log_total(p_row, num_tokens, TILE)
    tl.store(p_nll + i_row, log_total - at_label)

    if WITH_GRADIENT:
        coefficient = tl.load(p_coefficients + i_row)
        for start in range(0, num_tokens, TILE):
            o_token = start + o_tile
            m_tile = o_token < num_tokens
            b_logits = tl.load(p_row + o_token, mask=m_tile, other=float("-inf")).to(tl.float32)
            b_gradient = tl.exp(b_logits - log_total) - tl.where(o_token == label, 1.0, 0.0)
            b_gradient = coefficient * b_gradient
            tl.store(p_row + o_token, b_gradient.to(p_logits.dtype.element_ty), mask=m_tile)


@triton.jit
def _overlap_kernel(
    p_draft, p_verify, p_overlap, draft_stride, verify_stride, num_tokens, TILE: tl.constexpr
):
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
def _distilled_kernel(
    p_draft,
    p_verify,
    p_labels,
    p_coefficients,
    p_loss,
    p_nll,
    draft_stride,
    verify_stride,
    num_tokens,
    share,
    IS_KL: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    TILE: tl.constexpr,
):
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

    if WITH_GRADIENT:
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
def _scale_kernel(p_values, p_factor, num_values, TILE: tl.constexpr):
    factor = tl.load(p_factor).to(tl.float32)
    if factor != 1.0:
        o_value = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        m_value = o_value < num_values
        b_values = tl.load(p_values + o_value, mask=m_value).to(tl.float32)
        tl.store(p_values + o_value, (b_values * factor).to(p_values.dtype.element_ty), mask=m_value)


def rows_inplace(logits_MV: Tensor, labels_M: Tensor, coefficients_M: Tensor | None, nll_M: Tensor) -> None:
    """Write `nll_M` (fp32); with coefficients, overwrite `logits_MV` by the gradient of the weighted loss.

    Rows of `logits_MV` are contiguous, `row_stride` apart. A label outside [0, V) gives a NaN loss."""
    num_rows, num_tokens = logits_MV.shape
    assert logits_MV.stride(1) == 1, f"{logits_MV.stride()=}"
    assert labels_M.is_contiguous() and nll_M.is_contiguous()
    if num_rows == 0:
        return
    _rows_kernel[(num_rows,)](
        logits_MV,
        labels_M,
        nll_M if coefficients_M is None else coefficients_M,
        nll_M,
        logits_MV.stride(0),
        num_tokens,
        WITH_GRADIENT=coefficients_M is not None,
        TILE=min(TILE, triton.next_power_of_2(num_tokens)),
        num_warps=NUM_WARPS,
    )


def overlap_rows(draft_MV: Tensor, verify_MV: Tensor, overlap_M: Tensor) -> None:
    """Write sum_v min(softmax(draft), softmax(verify)) per row into `overlap_M` (fp32)."""
    num_rows, num_tokens = draft_MV.shape
    assert draft_MV.stride(1) == verify_MV.stride(1) == 1, f"{draft_MV.stride()=} {verify_MV.stride()=}"
    if num_rows:
        _overlap_kernel[(num_rows,)](
            draft_MV,
            verify_MV,
            overlap_M,
            draft_MV.stride(0),
            verify_MV.stride(0),
            num_tokens,
            TILE=min(TILE, triton.next_power_of_2(num_tokens)),
            num_warps=NUM_WARPS,
        )


def distilled_rows_inplace(
    draft_MV: Tensor,
    verify_MV: Tensor,
    labels_M: Tensor,
    coefficients_M: Tensor | None,
    *,
    loss_M: Tensor,
    nll_M: Tensor,
    divergence: str,
    share: float,
) -> None:
    """Write `loss_M` and `nll_M` (fp32); with coefficients, overwrite `draft_MV` by the gradient of the
    weighted loss. Rows are contiguous; a label outside [0, V) gives NaN."""
    num_rows, num_tokens = draft_MV.shape
    assert draft_MV.stride(1) == verify_MV.stride(1) == 1, f"{draft_MV.stride()=} {verify_MV.stride()=}"
    assert labels_M.is_contiguous() and loss_M.is_contiguous() and nll_M.is_contiguous()
    if num_rows:
        _distilled_kernel[(num_rows,)](
            draft_MV,
            verify_MV,
            labels_M,
            nll_M if coefficients_M is None else coefficients_M,
            loss_M,
            nll_M,
            draft_MV.stride(0),
            verify_MV.stride(0),
            num_tokens,
            share,
            IS_KL=divergence == "kl",
            WITH_GRADIENT=coefficients_M is not None,
            TILE=min(TILE // 2, triton.next_power_of_2(num_tokens)),
            num_warps=NUM_WARPS,
        )


def scale_inplace(values: Tensor, factor: Tensor) -> None:
    """Multiply contiguous `values` by the device scalar `factor`; does not access them if it is 1."""
    assert values.is_contiguous(), f"{values.stride()=}"
    num_values = values.numel()
    if num_values:
        grid = (triton.cdiv(num_values, SCALE_TILE),)
        _scale_kernel[grid](values, factor, num_values, TILE=SCALE_TILE, num_warps=8)
