"""Weighted cross-entropy of a linear head in chunks of rows, with gradients computed in the forward pass.

The coefficient of every row is known beforehand, so one pass over the chunks gives loss and gradients with
the three products of an unfused loss and no recomputation. Contract, memory and rounding in README.md. M
rows, m rows of a chunk, D width, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from idlm.kernels.backend import runs_kernels

MAX_LOGITS_BYTES = 200_000_000
"""Maximum bytes of logits in memory."""
ROW_MULTIPLE = 128
ALIGNED_BYTES = 16
DIVERGENCES = ("kl", "overlap")


def linear_cross_entropy(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    coefficients_M: Tensor,
    *,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum of coefficient * nll, a scalar differentiable in hidden, weight and bias; nll [M], detached).

    Both are fp32 (fp64 for fp64 hidden). `labels_M` int64 in [0, V): elsewhere a CPU raises and a GPU gives a
    NaN loss. Under autocast the products run in its dtype, with gradients of an fp32 weight summed in fp32.
    The result can be differentiated once."""
    return _loss(hidden_MD, weight_VD, labels_M, coefficients_M, bias_V, None)


def linear_distillation(
    draft_MD: Tensor,
    verify_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    coefficients_M: Tensor,
    *,
    divergence: str,
    share: float,
    bias_V: Tensor | None = None,
    verify_head: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `linear_cross_entropy`, of (1 - share) * nll + share * divergence in place of nll.

    q is the distribution of a row of `draft_MD`, p, a constant, that of the row of `verify_MD` [M, D], by the
    same head or by the weight [V, D] and bias [V] of `verify_head`.
    `divergence` is "kl", sum_v p (log p - log q), or "overlap", 1 - sum_v min(p, q), the expected rate of
    rejection of a sampled draft."""
    assert draft_MD.shape == verify_MD.shape, f"{draft_MD.shape=} {verify_MD.shape=}"
    assert divergence in DIVERGENCES and 0 <= share <= 1, f"{divergence=} {share=}"
    teacher = _Teacher(verify_MD.detach(), *(verify_head or (weight_VD, bias_V)), divergence, share)
    return _loss(draft_MD, weight_VD, labels_M, coefficients_M, bias_V, teacher)


def _loss(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    coefficients_M: Tensor,
    bias_V: Tensor | None,
    teacher: _Teacher | None,
) -> tuple[Tensor, Tensor]:
    _check(hidden_MD, weight_VD, labels_M, bias_V)
    assert coefficients_M.shape == labels_M.shape, f"{coefficients_M.shape=} {labels_M.shape=}"
    parameters = (hidden_MD, weight_VD, bias_V)
    if not torch.is_grad_enabled() or not any(p is not None and p.requires_grad for p in parameters):
        loss_M, nll_M = _Pass(*parameters).run(labels_M, None, teacher)
        return (coefficients_M * loss_M).sum(), nll_M
    loss, nll_M = _LinearCrossEntropy.apply(*parameters, labels_M, coefficients_M.detach(), teacher)
    return loss, nll_M


@torch.no_grad()
def token_nll(
    hidden_MD: Tensor, weight_VD: Tensor, labels_M: Tensor, *, bias_V: Tensor | None = None
) -> Tensor:
    """Negative log-likelihood [M] without gradients: one product instead of three."""
    _check(hidden_MD, weight_VD, labels_M, bias_V)
    return _Pass(hidden_MD, weight_VD, bias_V).run(labels_M, None)[1]


@torch.no_grad()
def linear_overlap(
    draft_MD: Tensor, verify_MD: Tensor, weight_VD: Tensor, *, bias_V: Tensor | None = None
) -> Tensor:
    """sum_v min(p, q) of two distributions per row [M], fp32 (fp64 for fp64 hidden), without gradients."""
    assert draft_MD.shape == verify_MD.shape, f"{draft_MD.shape=} {verify_MD.shape=}"
    work = [_Pass(hidden, weight_VD, bias_V) for hidden in (draft_MD, verify_MD)]
    overlap_M = torch.empty(len(draft_MD), dtype=work[0].loss_dtype, device=draft_MD.device)
    for (chunk, draft_mV), (_, verify_mV) in zip(*(one.logits(num_walks=2) for one in work), strict=True):
        _overlap(draft_mV, verify_mV, overlap_M[chunk])
    return overlap_M


def chunk_rows(num_rows: int, row_bytes: int, max_bytes: int) -> int:
    """Rows per chunk: as few, about equal chunks as `max_bytes` allows, in whole tiles of a product."""
    maximum = max(1, max_bytes // row_bytes)
    if maximum >= ROW_MULTIPLE:
        maximum -= maximum % ROW_MULTIPLE
    num_chunks = max(1, -(-num_rows // maximum))
    even = -(-num_rows // num_chunks)
    return max(1, min(maximum, -(-even // ROW_MULTIPLE) * ROW_MULTIPLE))


class _Teacher(NamedTuple):
    """What a draft is compared with, see `linear_distillation`."""

    verify_MD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    divergence: str
    share: float


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_M: Tensor,
        coefficients_M: Tensor,
        teacher: _Teacher | None,
    ) -> tuple[Tensor, Tensor]:
        work = _Pass(hidden_MD, weight_VD, bias_V)
        work.allocate_gradients(*ctx.needs_input_grad[:3])
        loss_M, nll_M = work.run(labels_M, coefficients_M.to(work.loss_dtype).contiguous(), teacher)
        ctx.gradients = work.gradients
        ctx.mark_non_differentiable(nll_M)
        return (coefficients_M * loss_M).sum(), nll_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "this loss was differentiated before"
        for gradient in gradients:
            if gradient is not None:
                _scale(gradient, grad_loss)
        return (*gradients, None, None, None)


class _Pass:
    """One pass over the chunks. `gradients` of hidden, weight and bias: None if not needed."""

    def __init__(self, hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> None:
        device = hidden_MD.device.type
        autocast = torch.is_autocast_enabled(device) and hidden_MD.dtype != torch.float64
        self.dtype = torch.get_autocast_dtype(device) if autocast else weight_VD.dtype
        assert autocast or hidden_MD.dtype == weight_VD.dtype, f"{hidden_MD.dtype=} {weight_VD.dtype=}"
        self.loss_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.hidden_MD, self.own_weight_VD = hidden_MD.detach(), weight_VD.detach()
        self.weight_VD = self.own_weight_VD.to(self.dtype)
        self.bias_V = None if bias_V is None else bias_V.detach().to(self.dtype)
        self.gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)

    def allocate_gradients(self, hidden: bool, weight: bool, bias: bool) -> None:
        """Allocate gradients, uninitialised: the first chunk writes, later ones add; without rows they are
        zero."""
        allocate = torch.empty_like if len(self.hidden_MD) else torch.zeros_like
        grad_bias = None
        if bias:
            assert self.bias_V is not None
            # Autograd rounds it to the dtype of the bias.
            grad_bias = torch.zeros_like(self.bias_V, dtype=self.loss_dtype)
        self.gradients = (
            allocate(self.hidden_MD, memory_format=torch.contiguous_format) if hidden else None,
            allocate(self.own_weight_VD, memory_format=torch.contiguous_format) if weight else None,
            grad_bias,
        )

    def run(
        self, labels_M: Tensor, coefficients_M: Tensor | None, teacher: _Teacher | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss and nll [M], the same without a teacher; with coefficients it also fills the allocated
        gradients."""
        nll_M = torch.empty(len(self.hidden_MD), dtype=self.loss_dtype, device=self.hidden_MD.device)
        loss_M = nll_M if teacher is None else torch.empty_like(nll_M)
        num_walks = 1 if teacher is None else 2
        verify = None if teacher is None else _Pass(*teacher[:3]).logits(num_walks=num_walks)
        for chunk, logits_mV in self.logits(num_walks=num_walks):
            labels_m = labels_M[chunk]
            coefficients_m = None if coefficients_M is None else coefficients_M[chunk]
            if teacher is None or verify is None:
                _softmax_inplace(logits_mV, labels_m, coefficients_m, nll_M[chunk])
            else:
                both_mV, results_m = (logits_mV, next(verify)[1]), (loss_M[chunk], nll_M[chunk])
                _distilled_inplace(*both_mV, labels_m, coefficients_m, *results_m, teacher)
            if coefficients_m is not None:
                self._accumulate(logits_mV, chunk)
        return loss_M, nll_M

    def logits(self, *, num_walks: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of rows with their logits, which the next chunk overwrites; `num_walks` of them in step
        share the memory."""
        num_rows, num_tokens = len(self.hidden_MD), len(self.weight_VD)
        per_row = ALIGNED_BYTES // self.weight_VD.element_size()
        padded = -(-num_tokens // per_row) * per_row
        row_bytes = padded * self.weight_VD.element_size()
        step = chunk_rows(num_rows, row_bytes, MAX_LOGITS_BYTES // num_walks)
        buffer_mV = self.weight_VD.new_empty(min(step, num_rows), padded)[:, :num_tokens]
        for start in range(0, num_rows, step):
            chunk = slice(start, min(start + step, num_rows))
            logits_mV = buffer_mV[: chunk.stop - start]
            hidden_mD = self.hidden_MD[chunk].to(self.dtype)
            if self.bias_V is None:
                torch.mm(hidden_mD, self.weight_VD.T, out=logits_mV)
            else:
                torch.addmm(self.bias_V, hidden_mD, self.weight_VD.T, out=logits_mV)
            yield chunk, logits_mV

    def _accumulate(self, gradient_mV: Tensor, chunk: slice) -> None:
        grad_hidden_MD, grad_weight_VD, grad_bias_V = self.gradients
        if grad_hidden_MD is not None:
            if grad_hidden_MD.dtype == self.dtype:
                torch.mm(gradient_mV, self.weight_VD, out=grad_hidden_MD[chunk])
            else:
                grad_hidden_MD[chunk] = gradient_mV @ self.weight_VD
        if grad_weight_VD is not None:
            hidden_mD = self.hidden_MD[chunk].to(self.dtype)
            _add_product(grad_weight_VD, gradient_mV.T, hidden_mD, is_first=chunk.start == 0)
        if grad_bias_V is not None:
            grad_bias_V += gradient_mV.sum(dim=0, dtype=grad_bias_V.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """total = left @ right, or total += left @ right; a wider `total` receives the product unrounded."""
    if total.dtype == left.dtype:
        if is_first:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)
    elif total.is_cuda and is_first:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=not is_first, out=total)


def _softmax_inplace(
    logits_mV: Tensor, labels_m: Tensor, coefficients_m: Tensor | None, nll_m: Tensor
) -> None:
    """Fill `nll_m`; with coefficients, turn the logits into the gradient of the weighted loss, in place."""
    if runs_kernels(logits_mV):
        from idlm.kernels.linear_cross_entropy.kernel import TILE, rows_kernel

        given = logits_mV, labels_m, coefficients_m, nll_m, logits_mV.stride(0)
        _launch(rows_kernel, logits_mV, *given, tile=TILE)
        return
    wide_mV = logits_mV.to(nll_m.dtype)
    log_total_m = wide_mV.logsumexp(dim=-1)
    torch.sub(log_total_m, wide_mV.gather(1, labels_m[:, None])[:, 0], out=nll_m)
    if coefficients_m is not None:
        gradient_mV = torch.exp(wide_mV - log_total_m[:, None])
        gradient_mV[torch.arange(len(labels_m)), labels_m] -= 1
        logits_mV.copy_(gradient_mV.mul_(coefficients_m[:, None]))


def _distilled_inplace(
    draft_mV: Tensor,
    verify_mV: Tensor,
    labels_m: Tensor,
    coefficients_m: Tensor | None,
    loss_m: Tensor,
    nll_m: Tensor,
    teacher: _Teacher,
) -> None:
    """Fill `loss_m` and `nll_m`; with coefficients, turn the draft's logits into the gradient, in place."""
    share, is_kl = teacher.share, teacher.divergence == "kl"
    if runs_kernels(draft_mV):
        from idlm.kernels.linear_cross_entropy.kernel import TILE, distilled_kernel

        given = draft_mV, verify_mV, labels_m, coefficients_m, loss_m, nll_m
        strides = draft_mV.stride(0), verify_mV.stride(0)
        _launch(distilled_kernel, draft_mV, *given, *strides, share, tile=TILE // 2, IS_KL=is_kl)
        return
    both = (logits.to(nll_m.dtype).log_softmax(dim=-1) for logits in (draft_mV, verify_mV))
    log_q_mV, log_p_mV = both
    q_mV, p_mV = log_q_mV.exp(), log_p_mV.exp()
    rows = torch.arange(len(labels_m))
    torch.neg(log_q_mV[rows, labels_m], out=nll_m)
    if is_kl:
        lost_m = torch.where(p_mV > 0, p_mV * (log_p_mV - log_q_mV), 0).sum(dim=-1)
        soft_mV = q_mV - p_mV
    else:
        is_low = q_mV < p_mV
        lost_m = torch.where(is_low, p_mV - q_mV, 0).sum(dim=-1)
        soft_mV = q_mV * ((q_mV * is_low).sum(dim=-1, keepdim=True) - is_low.to(q_mV.dtype))
    loss_m.copy_((1 - share) * nll_m + share * lost_m)
    if coefficients_m is not None:
        q_mV[rows, labels_m] -= 1
        draft_mV.copy_(coefficients_m[:, None] * ((1 - share) * q_mV + share * soft_mV))


def _overlap(draft_mV: Tensor, verify_mV: Tensor, overlap_m: Tensor) -> None:
    if runs_kernels(draft_mV):
        from idlm.kernels.linear_cross_entropy.kernel import TILE, overlap_kernel

        strides = draft_mV.stride(0), verify_mV.stride(0)
        _launch(overlap_kernel, draft_mV, draft_mV, verify_mV, overlap_m, *strides, tile=TILE)
        return
    probs = (logits.softmax(dim=-1, dtype=overlap_m.dtype) for logits in (draft_mV, verify_mV))
    torch.sum(torch.minimum(*probs), dim=-1, out=overlap_m)


def _launch(kernel: Any, rows_mV: Tensor, *arguments: Any, tile: int, **constants: Any) -> None:
    """A program for each row of logits, whose number of tokens is the last argument."""
    import triton

    from idlm.kernels.linear_cross_entropy.kernel import NUM_WARPS

    assert all(x.stride(-1) == 1 for x in arguments if isinstance(x, Tensor)), f"{rows_mV.stride()=}"
    num_rows, num_tokens = rows_mV.shape
    if num_rows:
        tile = min(tile, triton.next_power_of_2(num_tokens))
        kernel[(num_rows,)](*arguments, num_tokens, **constants, TILE=tile, num_warps=NUM_WARPS)


def _scale(values: Tensor, factor: Tensor) -> None:
    """Multiply by a device scalar in place, without a wait for it; on a GPU nothing is read if it is 1."""
    if not runs_kernels(values):
        values.mul_(factor)
    elif num_values := values.numel():
        from idlm.kernels.linear_cross_entropy.kernel import SCALE_TILE, scale_kernel

        assert values.is_contiguous(), f"{values.stride()=}"
        grid = (-(-num_values // SCALE_TILE),)
        scale_kernel[grid](values, factor, num_values, TILE=SCALE_TILE, num_warps=8)


def _check(hidden_MD: Tensor, weight_VD: Tensor, labels_M: Tensor, bias_V: Tensor | None) -> None:
    num_rows, width = hidden_MD.shape
    num_tokens = len(weight_VD)
    assert weight_VD.shape == (num_tokens, width), f"{hidden_MD.shape=} {weight_VD.shape=}"
    assert labels_M.shape == (num_rows,), f"{hidden_MD.shape=} {labels_M.shape=}"
    assert labels_M.dtype == torch.int64, f"{labels_M.dtype=}"
    assert bias_V is None or bias_V.shape == (num_tokens,), f"{bias_V=}"
    if not labels_M.is_cuda and num_rows:
        low, high = int(labels_M.min()), int(labels_M.max())
        assert low >= 0 and high < num_tokens, f"labels from {low} to {high}, vocabulary {num_tokens}"
