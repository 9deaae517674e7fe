"""The trunk with experts: every layer but the dense ones sends a row through a few of many feed-forwards.

In plain torch, expert after expert: it waits for the host once per layer to learn how many rows each has. So
no CUDA graph holds it, and ranks do not share it yet.
R rows fed this pass, E experts, G groups of experts, C chosen experts, S rows of one expert, F ffn of an
expert, D width.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from idlm.errors import UserError
from idlm.infer.models.base import ModelSpec, MoeSpec, TensorNames
from idlm.infer.models.dense import (
    DenseLayer,
    DenseTrunk,
    Layer,
    Rows,
    WeightTarget,
    empty_weight,
    target_of,
)
from idlm.infer.parallel import ALONE, Shards
from idlm.kernels.linear import Linears

LEAST_SUM = 1e-20
BEST_OF_GROUP = 2
"""How many of a group's scores count for it."""


class Experts(nn.Module):
    """A router and what it chooses from. The router of sigmoid scores is kept in fp32, for its scores lie
    close together; gate and up rows of an expert are stacked.
    """

    def __init__(self, moe: MoeSpec, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.moe, num = moe, moe.num_experts
        wide = torch.promote_types(dtype, torch.float32)
        empty = partial(empty_weight, device=device, dtype=dtype)
        is_sigmoid = moe.score == "sigmoid"
        self.router = empty_weight(num, width, device=device, dtype=wide if is_sigmoid else dtype)
        self.router_bias = empty_weight(num, device=device, dtype=wide) if moe.has_bias else None
        self.gate_up = empty(num, 2 * moe.ffn_width, width)
        self.down = empty(num, width, moe.ffn_width)
        shared = moe.shared_ffn_width
        self.shared_gate_up = empty(2 * shared, width) if shared else None
        self.shared_down = empty(width, shared) if shared else None

    def forward(self, x_RD: Tensor, linears: Linears) -> Tensor:
        """The weighted sum of the chosen experts' outputs, in fp32 and in order of experts, plus the shared
        expert's.
        """
        experts_RC, weights_RC = self.route(x_RD, linears)
        if x_RD.is_cuda and torch.cuda.is_current_stream_capturing():
            refuse("graphs=on (allowed: off)")
        counts_E = experts_RC.flatten().bincount(minlength=self.moe.num_experts).tolist()
        by_expert = experts_RC.flatten().argsort(stable=True)
        rows, weights = by_expert // self.moe.num_chosen, weights_RC.flatten()[by_expert, None]
        out_RD = torch.zeros_like(x_RD, dtype=weights.dtype)
        for number, (rows_S, weights_S1) in enumerate(
            zip(rows.split(counts_E), weights.split(counts_E), strict=True)
        ):
            if len(rows_S):
                hidden_SF = linears.swiglu(x_RD[rows_S], self.gate_up[number])
                out_SD = linears.linear(hidden_SF, self.down[number])
                out_RD.index_add_(0, rows_S, out_SD * weights_S1)
        if self.shared_gate_up is not None and self.shared_down is not None:
            out_RD += linears.linear(linears.swiglu(x_RD, self.shared_gate_up), self.shared_down)
        return out_RD.to(x_RD.dtype)

    def route(self, x_RD: Tensor, linears: Linears) -> tuple[Tensor, Tensor]:
        """The chosen experts of each row and their weights (fp32), both [R, C]."""
        moe = self.moe
        logits_RE = linears.linear(x_RD.to(self.router.dtype), self.router)
        wide_RE = logits_RE.to(torch.promote_types(logits_RE.dtype, torch.float32))
        scores_RE = wide_RE.softmax(dim=-1) if moe.score == "softmax" else wide_RE.sigmoid()
        chosen_RE = scores_RE if self.router_bias is None else scores_RE + self.router_bias
        if moe.num_chosen_groups < moe.num_groups:
            chosen_RE = self._in_best_groups(chosen_RE)
        experts_RC = chosen_RE.topk(moe.num_chosen, dim=-1).indices
        weights_RC = scores_RE.gather(1, experts_RC)
        if moe.is_normalised:
            weights_RC = weights_RC / (weights_RC.sum(dim=-1, keepdim=True) + LEAST_SUM)
        # Rounded once to the router's dtype, as the reference does.
        return experts_RC, (weights_RC * moe.scaling).to(self.router.dtype).to(scores_RE.dtype)

    def _in_best_groups(self, chosen_RE: Tensor) -> Tensor:
        """-inf outside the groups whose best scores have the largest sums."""
        moe = self.moe
        grouped_RGx = chosen_RE.view(len(chosen_RE), moe.num_groups, -1)
        sums_RG = grouped_RGx.topk(BEST_OF_GROUP, dim=-1).values.sum(dim=-1)
        best = sums_RG.topk(moe.num_chosen_groups, dim=-1).indices
        is_out_RG = torch.ones_like(sums_RG, dtype=torch.bool).scatter_(1, best, False)
        return grouped_RGx.masked_fill(is_out_RG[:, :, None], float("-inf")).view_as(chosen_RE)

    def targets(self, number: int, names: TensorNames) -> dict[str, WeightTarget]:
        """Where the tensors of layer `number` go."""
        found: dict[str, Tensor] = {names.router.format(number): self.router}
        if self.router_bias is not None:
            found[names.router_bias.format(number)] = self.router_bias
        for expert in range(self.moe.num_experts):
            gate_FD, up_FD = self.gate_up[expert].chunk(2)
            found[names.expert_gate.format(number, expert)] = gate_FD
            found[names.expert_up.format(number, expert)] = up_FD
            found[names.expert_down.format(number, expert)] = self.down[expert]
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate_FD, up_FD = self.shared_gate_up.chunk(2)
            found[names.shared_gate.format(number)] = gate_FD
            found[names.shared_up.format(number)] = up_FD
            found[names.shared_down.format(number)] = self.shared_down
        return {name: target_of(view) for name, view in found.items()}


class MoeLayer(Layer):
    """A layer whose feed-forward are experts."""

    def __init__(
        self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, shards: Shards = ALONE
    ) -> None:
        super().__init__(spec, device, dtype, shards)
        assert spec.moe is not None
        self.mlp = Experts(spec.moe, spec.width, device, dtype)

    def further_targets(self, number: int, names: TensorNames) -> dict[str, WeightTarget]:
        """Those of router and experts."""
        return self.mlp.targets(number, names)

    def feed_forward(self, normed_RD: Tensor, rows: Rows) -> Tensor:
        """What the chosen experts make of each row."""
        return self.mlp(normed_RD, rows.linears)


class MoeTrunk(DenseTrunk):
    """`DenseTrunk` with experts in all layers but `spec.moe.dense_layers`."""

    def _layer(self, number: int, device: torch.device, dtype: torch.dtype) -> Layer:
        assert self.spec.moe is not None
        kind = DenseLayer if number in self.spec.moe.dense_layers else MoeLayer
        return kind(self.spec, device, dtype, self.shards)


def make_trunk(
    spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, shards: Shards = ALONE
) -> DenseTrunk:
    """An empty trunk of the kind that the spec asks for; UserError IDLM-0617: experts among several ranks."""
    if spec.moe is None:
        return DenseTrunk(spec, device=device, dtype=dtype, shards=shards)
    if shards.size > 1:
        refuse(f"tensor_parallel={shards.size} (allowed: 1)")
    return MoeTrunk(spec, device=device, dtype=dtype)


def refuse(problem: str) -> NoReturn:
    """UserError IDLM-0617: what a model with experts is asked for and cannot do yet."""
    raise UserError(
        "IDLM-0617",
        f"a model with experts does not go with {problem}",
        fix="use the allowed setting named, or leave it out",
    )
