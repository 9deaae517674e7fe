"""The definition of both ops, row by row, in fp32 or, for fp64 input, fp64. Formula in README.md.

R rows, E experts, C chosen experts, D width, F ffn of an expert."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.experts.types import MIN_SUM, Routing


def route_reference(
    logits_RE: Tensor, routing: Routing, *, bias_E: Tensor | None = None, blocks: list[int] | None = None
) -> tuple[list[list[int]], list[list[float]]]:
    """Per row the numbers of the chosen experts, ascending, and their weights, not rounded. `blocks`: with a
    capacity, the number of each row's block; rows of a block may stand anywhere."""
    experts, weights = [], []
    rows = []
    for logits_E in logits_RE.to(torch.promote_types(logits_RE.dtype, torch.float32)):
        scores = (logits_E.softmax(dim=0) if routing.score == "softmax" else logits_E.sigmoid()).tolist()
        added = [0.0] * len(scores) if bias_E is None else bias_E.tolist()
        rows.append((scores, [score + bias for score, bias in zip(scores, added, strict=True)]))
    for row, (scores, quality) in enumerate(rows):
        size = len(scores) // routing.num_groups
        sums = []
        for group in range(routing.num_groups):
            best = sorted(quality[group * size : (group + 1) * size], reverse=True)
            sums.append(sum(best[:2]))
        groups = sorted(range(routing.num_groups), key=lambda group: -sums[group])
        groups = groups[: routing.num_chosen_groups]
        allowed = [expert for expert in range(len(scores)) if expert // size in groups]
        if routing.capacity is not None:
            assert blocks is not None
            mine = [other for other, block in enumerate(blocks) if block == blocks[row]]
            best = [max(rows[other][1][expert] for other in mine) for expert in allowed]
            allowed = sorted(allowed, key=lambda expert: -best[expert])[: routing.capacity]
        chosen = sorted(sorted(allowed, key=lambda expert: -quality[expert])[: routing.num_chosen])
        total = sum(scores[expert] for expert in chosen) + MIN_SUM if routing.is_normalised else 1.0
        experts.append(chosen)
        weights.append([scores[expert] / total * routing.scaling for expert in chosen])
    return experts, weights


def experts_reference(
    x_RD: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    experts_RC: Tensor,
    weights_RC: Tensor,
    *,
    first: int = 0,
    shared_RD: Tensor | None = None,
) -> Tensor:
    """The weighted sum of the chosen experts of this rank plus the shared expert's output [R, D], not
    rounded. A row whose experts are -1 is 0."""
    dtype = torch.promote_types(x_RD.dtype, torch.float32)
    out_RD = torch.zeros(x_RD.shape, dtype=dtype, device=x_RD.device)
    for row, chosen in enumerate(experts_RC.tolist()):
        if min(chosen) < 0:
            continue
        for number, expert in enumerate(chosen):
            if first <= expert < first + len(down_EDF):
                gate_up_FD, down_DF = gate_up_EFD[expert - first], down_EDF[expert - first]
                gate_F, up_F = (gate_up_FD.to(dtype) @ x_RD[row].to(dtype)).chunk(2)
                hidden_F = gate_F * torch.sigmoid(gate_F) * up_F
                out_RD[row] += weights_RC[row, number].to(dtype) * (down_DF.to(dtype) @ hidden_F)
        if shared_RD is not None:
            out_RD[row] += shared_RD[row].to(dtype)
    return out_RD
