"""Arms of benchmarks.kernels.experts: our layer, the loop over experts, and torch's grouped matmul.

R rows, E experts, C chosen experts, P = R C pairs, D width, F ffn of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.kernels.experts import Routing, experts, route
from idlm.kernels.experts.launch import Launch, choose, grouped, plan_tiles
from idlm.kernels.experts.op import plain_experts, plain_route
from idlm.kernels.linear import Linears
from idlm.kernels.swiglu import swiglu

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer of experts, a softmax router."""

    num_experts: int
    num_chosen: int
    ffn: int
    width: int

    @property
    def expert_numbers(self) -> int:
        """Number of weights of one expert."""
        return 3 * self.ffn * self.width


SHAPES = {
    "sdar-30b-a3b": Shape(num_experts=128, num_chosen=8, ffn=768, width=2048),
    "llada2-mini": Shape(num_experts=256, num_chosen=8, ffn=512, width=2048),
    "tiny": Shape(num_experts=8, num_chosen=2, ffn=64, width=128),
}


class Layer:
    """Random bf16 weights; rows are drawn so that every expert is about as popular."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        self.shape, self.linears = shape, Linears()
        self.routing = Routing(num_chosen=shape.num_chosen, score="softmax", is_normalised=True)
        self.device = device
        self.router = self.drawn(shape.num_experts, shape.width)
        self.gate_up = self.drawn(shape.num_experts, 2 * shape.ffn, shape.width)
        self.down = self.drawn(shape.num_experts, shape.width, shape.ffn)

    def drawn(self, *shape: int) -> Tensor:
        """Random weights whose products keep the size of rows."""
        return torch.randn(shape, device=self.device, dtype=BF16) * shape[-1] ** -0.5

    def rows(self, num: int) -> Tensor:
        return torch.randn(num, self.shape.width, device=self.device, dtype=BF16)

    def ours(self, x_RD: Tensor, launch: Launch | None = None, pdl: bool | None = None) -> Tensor:
        """Our layer, as infer/models/moe.py runs it."""
        chosen, weights = route(self.linears.linear(x_RD, self.router), self.routing, pdl=pdl)
        return experts(x_RD, self.gate_up, self.down, chosen, weights, launch=launch, pdl=pdl)

    def loop(self, x_RD: Tensor) -> Tensor:
        """The experts one after another, which waits for the host."""
        chosen, weights = plain_route(F.linear(x_RD, self.router), self.routing)
        return plain_experts(x_RD, (self.gate_up, self.down), (chosen, weights))

    def library(self, x_RD: Tensor) -> Tensor:
        """torch's grouped matmul with sorting, our SwiGLU and the weighted sum."""
        scores_RE = F.linear(x_RD, self.router).softmax(dim=-1, dtype=torch.float32)
        weights_RC, chosen_RC = scores_RE.topk(self.shape.num_chosen, dim=-1)
        weights_RC = (weights_RC / weights_RC.sum(dim=-1, keepdim=True)).to(BF16)
        order_P, offsets_E = self.sorted_pairs(chosen_RC)
        y_PD = self.library_products(x_RD[order_P // self.shape.num_chosen], offsets_E)
        by_pair_PD = torch.empty_like(y_PD)
        by_pair_PD[order_P] = y_PD
        return torch.bmm(weights_RC[:, None], by_pair_PD.view(*chosen_RC.shape, -1))[:, 0]

    def sorted_pairs(self, chosen_RC: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs sorted by expert and the end of each expert's pairs, without waiting for the host."""
        sorted_P, order_P = chosen_RC.flatten().sort(stable=True)
        numbers_E = torch.arange(self.shape.num_experts, device=sorted_P.device)
        return order_P, torch.searchsorted(sorted_P, numbers_E, right=True).int()

    def library_products(self, x_PD: Tensor, offsets_E: Tensor) -> Tensor:
        """Both products of sorted pairs and the SwiGLU between them."""
        gate_up_PF = grouped_mm(x_PD, self.gate_up.transpose(1, 2), offsets_E)
        return grouped_mm(swiglu(gate_up_PF), self.down.transpose(1, 2), offsets_E)

    def products(self, x_RD: Tensor, launch: Launch | None = None) -> Callable[[], Any]:
        """Our two products with a given plan; they include SwiGLU and the gather of rows."""
        chosen, _ = route(self.linears.linear(x_RD, self.router), self.routing)
        launch = launch or choose(len(x_RD), self.shape.num_chosen, self.shape.num_experts, BF16)
        plan = plan_tiles(chosen, 0, self.shape.num_experts, launch.block_r, False)
        hidden = x_RD.new_empty(chosen.numel(), self.shape.ffn)
        y = x_RD.new_empty(chosen.numel(), self.shape.width)

        def run() -> None:
            both = (
                (x_RD, self.gate_up, hidden, launch.gate_up, True),
                (hidden, self.down, y, launch.down, False),
            )
            for source, weight, target, tile, is_gated in both:
                grouped(source, weight, target, plan, chosen, 0, launch.block_r, tile, True, is_gated)

        return run

    def num_active(self, x_RD: Tensor) -> int:
        """Experts that some row chooses."""
        chosen, _ = route(self.linears.linear(x_RD, self.router), self.routing)
        return int(chosen.unique().numel())

    def is_right(self, x_RD: Tensor) -> bool:
        """Whether our error against fp64 is at most 1.5 times that of the loop."""
        chosen, weights = route(self.linears.linear(x_RD, self.router), self.routing)
        given = ((self.gate_up, self.down), (chosen, weights))
        ours_RD, loop_RD = self.ours(x_RD), plain_experts(x_RD, *given)
        few = slice(0, 64)
        used = chosen[few].unique().long()
        place = torch.zeros(self.shape.num_experts, dtype=torch.long, device=self.device)
        place[used] = torch.arange(len(used), device=self.device)
        wide = (self.gate_up[used].double(), self.down[used].double())
        true_RD = plain_experts(x_RD[few].double(), wide, (place[chosen[few].long()], weights[few].double()))
        ours, loop = (float((one[few].double() - true_RD).norm()) for one in (ours_RD, loop_RD))
        return ours <= 1.5 * loop


def grouped_mm(x_PD: Tensor, weight_EDO: Tensor, offsets_E: Tensor) -> Tensor:
    """torch's grouped matmul under its public or its older private name."""
    public = getattr(F, "grouped_mm", None)
    op = torch._grouped_mm if public is None else public
    return torch.as_tensor(op(x_PD, weight_EDO, offs=offsets_E))
