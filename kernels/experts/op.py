"""Routing of rows to experts, and the experts: Triton kernels on a GPU, plain torch elsewhere. Contract in
README.md.

R rows, E experts that are here, X experts that rows choose from, C chosen experts, G groups, S rows of one
expert, D width, F ffn of an expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from idlm.kernels.backend import computes, has_pdl
from idlm.kernels.experts.types import MIN_SUM, Routing
from idlm.kernels.linear import library_linear
from idlm.kernels.swiglu import swiglu

if TYPE_CHECKING:
    from idlm.kernels.experts.launch import ExpertsLaunch

BEST_OF_GROUP = 2
"""Number of scores of a group that are added to rank it."""


def route(
    logits_RX: Tensor,
    routing: Routing,
    *,
    bias_X: Tensor | None = None,
    slots_R: Tensor | None = None,
    positions_R: Tensor | None = None,
    pdl: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The chosen experts of each row (integers) and their weights, fp32 (fp64 for fp64), both [R, C].

    Scores are computed in fp32; `bias_X` affects the choice, not the weights; weights are rounded once to the
    dtype of the logits, as the published routers do. Among equal scores, the lower number is chosen.
    A row whose slot is negative is padding: its experts are -1, its weights unspecified, and its block does
    not see it. `positions_R` (integers), needed with a capacity: the rows of a block follow one another, from
    a position that `block_size` divides on."""
    assert logits_RX.stride(1) == 1, f"{logits_RX.stride()=}"
    assert logits_RX.shape[1] % routing.num_groups == 0, f"{logits_RX.shape=} {routing=}"
    assert routing.capacity is None or positions_R is not None, f"{routing=}"
    if computes(logits_RX):
        from idlm.kernels.experts.launch import run_route

        pdl = has_pdl(logits_RX.device) if pdl is None else pdl
        return run_route(logits_RX, routing, bias_X=bias_X, slots_R=slots_R, positions_R=positions_R, pdl=pdl)
    return plain_route(logits_RX, routing, bias_X, slots_R, positions_R)


def plain_route(
    logits_RX: Tensor,
    routing: Routing,
    bias_X: Tensor | None = None,
    slots_R: Tensor | None = None,
    positions_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`route` in torch ops."""
    wide_RX = logits_RX.to(torch.promote_types(logits_RX.dtype, torch.float32))
    scores_RX = wide_RX.softmax(dim=-1) if routing.score == "softmax" else wide_RX.sigmoid()
    quality_RX = scores_RX if bias_X is None else scores_RX + bias_X
    if routing.num_chosen_groups < routing.num_groups:
        quality_RX = _in_best_groups(quality_RX, routing)
    if routing.capacity is not None:
        assert positions_R is not None
        quality_RX = _admitted(quality_RX, routing, positions_R, slots_R)
    experts_RC = _largest(quality_RX, routing.num_chosen)
    weights_RC = scores_RX.gather(1, experts_RC)
    if routing.is_normalised:
        weights_RC = weights_RC / (weights_RC.sum(dim=-1, keepdim=True) + MIN_SUM)
    weights_RC = (weights_RC * routing.scaling).to(logits_RX.dtype).to(scores_RX.dtype)
    if slots_R is not None:
        experts_RC = experts_RC.masked_fill(slots_R[:, None] < 0, -1)
    return experts_RC, weights_RC


def experts(
    x_RD: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    experts_RC: Tensor,
    weights_RC: Tensor,
    *,
    first: int = 0,
    num_choices: int | None = None,
    shared_RD: Tensor | None = None,
    launch: ExpertsLaunch | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """The weighted sum of the chosen experts' outputs plus `shared_RD`, [R, D] in the dtype of `x_RD`.

    This rank holds the experts from `first` on: `gate_up_EFD` [E, 2F, D] with the gate's rows first,
    `down_EDF` [E, D, F]. The others, of `num_choices` in all, add nothing. Rows whose experts are -1
    (padding) give 0, whatever they hold. No row has an expert twice. `launch` None: chosen by rule."""
    assert x_RD.stride(1) == 1 and gate_up_EFD.stride(2) == down_EDF.stride(2) == 1, "columns not contiguous"
    assert x_RD.shape[1] == gate_up_EFD.shape[2] == down_EDF.shape[1], f"{x_RD.shape=} {gate_up_EFD.shape=}"
    assert gate_up_EFD.shape[1] == 2 * down_EDF.shape[2], f"{gate_up_EFD.shape=} {down_EDF.shape=}"
    weights = (gate_up_EFD, down_EDF)
    if computes(x_RD):
        from idlm.kernels.experts.launch import run_experts

        return run_experts(
            x_RD,
            weights,
            (experts_RC, weights_RC),
            first=first,
            shared_RD=shared_RD,
            num_choices=num_choices or len(down_EDF),
            launch=launch,
            pdl=has_pdl(x_RD.device) if pdl is None else pdl,
        )
    return plain_experts(x_RD, weights, (experts_RC, weights_RC), first, shared_RD)


def plain_experts(
    x_RD: Tensor,
    weights: tuple[Tensor, Tensor],
    chosen: tuple[Tensor, Tensor],
    first: int = 0,
    shared_RD: Tensor | None = None,
) -> Tensor:
    """`experts` in torch ops, one expert after another; the sum is in fp32 and in the order of experts."""
    (gate_up_EFD, down_EDF), (experts_RC, weights_RC) = weights, chosen
    num_experts = len(down_EDF)
    is_here_RC = (experts_RC >= first) & (experts_RC < first + num_experts)
    local = torch.where(is_here_RC, experts_RC - first, num_experts).flatten()
    counts = local.bincount(minlength=num_experts + 1).tolist()
    by_expert = local.argsort(stable=True)
    rows, factors = by_expert // experts_RC.shape[1], weights_RC.flatten()[by_expert, None]
    out_RD = torch.zeros_like(x_RD, dtype=weights_RC.dtype)
    for number, (rows_S, factors_S1) in enumerate(
        zip(rows.split(counts), factors.split(counts), strict=True)
    ):
        if len(rows_S) and number < num_experts:
            gate_up_SF = library_linear(x_RD[rows_S], gate_up_EFD[number])
            out_SD = library_linear(swiglu(gate_up_SF), down_EDF[number])
            out_RD.index_add_(0, rows_S, out_SD * factors_S1)
    if shared_RD is not None:
        out_RD += shared_RD.masked_fill(experts_RC[:, :1] < 0, 0)
    return out_RD.to(x_RD.dtype)


def _largest(scores: Tensor, num: int) -> Tensor:
    """Numbers of the `num` largest scores of each row, lower numbers first among equal ones, as in the
    kernel. topk does not promise an order of ties."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :num]


def _in_best_groups(quality_RX: Tensor, routing: Routing) -> Tensor:
    """Set scores to -inf outside the groups whose best scores have the largest sums."""
    grouped_RGx = quality_RX.view(len(quality_RX), routing.num_groups, -1)
    sums_RG = grouped_RGx.topk(BEST_OF_GROUP, dim=-1).values.sum(dim=-1)
    best = _largest(sums_RG, routing.num_chosen_groups)
    is_out_RG = torch.ones_like(sums_RG, dtype=torch.bool).scatter_(1, best, False)
    return grouped_RGx.masked_fill(is_out_RG[:, :, None], float("-inf")).view_as(quality_RX)


def _admitted(quality_RX: Tensor, routing: Routing, positions_R: Tensor, slots_R: Tensor | None) -> Tensor:
    """Set qualities to -inf for the experts that a row's block does not admit."""
    assert routing.capacity is not None
    never = float("-inf")
    seen_RX = quality_RX if slots_R is None else quality_RX.masked_fill(slots_R[:, None] < 0, never)
    # The first row of a block stands for it.
    rows_R = torch.arange(len(quality_RX), device=quality_RX.device)
    first_R1 = (rows_R - positions_R % routing.block_size).clamp(min=0)[:, None]
    best_RX = torch.full_like(quality_RX, never)
    best_RX.scatter_reduce_(0, first_R1.expand_as(seen_RX), seen_RX, "amax")
    is_out_RX = torch.ones_like(quality_RX, dtype=torch.bool)
    is_out_RX.scatter_(1, _largest(best_RX, routing.capacity), False)
    return quality_RX.masked_fill(is_out_RX[first_R1[:, 0]], never)
