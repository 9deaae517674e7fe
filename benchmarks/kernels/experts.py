"""A layer of experts on a GPU: share of the stream of its active experts, or of the matmul rate.

    python -m benchmarks.experts [rows=1,32,256,2048,8192] [rounds=7] [record=true] [results=DIR]

One process measures stream and matmul rate, then router, experts and sum as a replayed graph, torch's grouped
matmul in a graph, and the loop over experts, which cannot be captured. Few rows are several inputs in turn,
so that weights come from memory. `products` are the two grouped products alone. It needs a GPU. R rows, E
experts."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shared import Report, defaults, numbers, parse_options, start
from benchmarks.stream import Timer, device_ms, matmul_rate
from idlm.kernels.experts import Routing, experts, route
from idlm.kernels.experts.launch import choose, grouped, plan_tiles
from idlm.kernels.experts.op import plain_experts, plain_route
from idlm.kernels.linear import Linears
from idlm.kernels.swiglu import swiglu

BF16 = torch.bfloat16


NUM_EXPERTS, NUM_CHOSEN, FFN, WIDTH = 128, 8, 768, 2048
"""A layer of experts of SDAR-30B-A3B, with a softmax router."""
EXPERT_NUMBERS = 3 * FFN * WIDTH


class Layer:
    """Random bf16 weights; rows are drawn so that every expert is about as popular."""

    def __init__(self) -> None:
        self.linears = Linears()
        self.routing = Routing(num_chosen=NUM_CHOSEN, score="softmax", is_normalised=True)
        self.router = self.drawn(NUM_EXPERTS, WIDTH)
        self.gate_up, self.down = self.drawn(NUM_EXPERTS, 2 * FFN, WIDTH), self.drawn(NUM_EXPERTS, WIDTH, FFN)

    def drawn(self, *shape: int) -> Tensor:
        """Random weights whose products have the size of rows."""
        return torch.randn(shape, device="cuda", dtype=BF16) * shape[-1] ** -0.5

    def rows(self, num: int) -> Tensor:
        return torch.randn(num, WIDTH, device="cuda", dtype=BF16)

    def ours(self, x_RD: Tensor, pdl: bool | None = None) -> Tensor:
        chosen, weights = self.routed(x_RD, pdl)
        return experts(x_RD, self.gate_up, self.down, chosen, weights, pdl=pdl)

    def loop(self, x_RD: Tensor) -> Tensor:
        """The experts one after another, which waits for the host."""
        chosen, weights = plain_route(F.linear(x_RD, self.router), self.routing)
        return plain_experts(x_RD, (self.gate_up, self.down), (chosen, weights))

    def library(self, x_RD: Tensor) -> Tensor:
        """torch's grouped matmul with sorting, our SwiGLU and the weighted sum."""
        scores_RE = F.linear(x_RD, self.router).softmax(dim=-1, dtype=torch.float32)
        weights_RC, chosen_RC = scores_RE.topk(NUM_CHOSEN, dim=-1)
        weights_RC = (weights_RC / weights_RC.sum(dim=-1, keepdim=True)).to(BF16)
        order_P, offsets_E = self.sorted_pairs(chosen_RC)
        y_PD = self.library_products(x_RD[order_P // NUM_CHOSEN], offsets_E)
        by_pair_PD = torch.empty_like(y_PD)
        by_pair_PD[order_P] = y_PD
        return torch.bmm(weights_RC[:, None], by_pair_PD.view(*chosen_RC.shape, -1))[:, 0]

    def sorted_pairs(self, chosen_RC: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs sorted by expert and the end of each expert's pairs, without waiting for the host."""
        sorted_P, order_P = chosen_RC.flatten().sort(stable=True)
        numbers_E = torch.arange(NUM_EXPERTS, device=sorted_P.device)
        return order_P, torch.searchsorted(sorted_P, numbers_E, right=True).int()

    def library_products(self, x_PD: Tensor, offsets_E: Tensor) -> Tensor:
        """Both products of sorted pairs and the SwiGLU between them."""
        gate_up_PF = grouped_mm(x_PD, self.gate_up.transpose(1, 2), offsets_E)
        return grouped_mm(swiglu(gate_up_PF), self.down.transpose(1, 2), offsets_E)

    def products(self, x_RD: Tensor) -> Callable[[], Any]:
        """Our two products with a given plan; they include SwiGLU and the gather of rows."""
        chosen, _ = self.routed(x_RD)
        launch = choose(len(x_RD), NUM_CHOSEN, NUM_EXPERTS, BF16)
        plan = plan_tiles(chosen, 0, NUM_EXPERTS, launch.block_r, False)
        hidden = x_RD.new_empty(chosen.numel(), FFN)
        y = x_RD.new_empty(chosen.numel(), WIDTH)

        def run() -> None:
            both = (
                (x_RD, self.gate_up, hidden, launch.gate_up, True),
                (hidden, self.down, y, launch.down, False),
            )
            for source, weight, target, tile, is_gated in both:
                grouped(source, weight, target, plan, chosen, 0, launch.block_r, tile, True, is_gated)

        return run

    def routed(self, x_RD: Tensor, pdl: bool | None = None) -> tuple[Tensor, Tensor]:
        return route(self.linears.linear(x_RD, self.router), self.routing, pdl=pdl)

    def is_right(self, x_RD: Tensor) -> bool:
        """Whether our error against fp64 is at most 1.5 times that of the loop."""
        chosen, weights = self.routed(x_RD)
        given = ((self.gate_up, self.down), (chosen, weights))
        ours_RD, loop_RD = self.ours(x_RD), plain_experts(x_RD, *given)
        few = slice(0, 64)
        used = chosen[few].unique().long()
        index = torch.zeros(NUM_EXPERTS, dtype=torch.long, device="cuda")
        index[used] = torch.arange(len(used), device="cuda")
        wide = (self.gate_up[used].double(), self.down[used].double())
        true_RD = plain_experts(x_RD[few].double(), wide, (index[chosen[few].long()], weights[few].double()))
        ours, loop = (float((one[few].double() - true_RD).norm()) for one in (ours_RD, loop_RD))
        return ours <= 1.5 * loop


def grouped_mm(x_PD: Tensor, weight_EDO: Tensor, offsets_E: Tensor) -> Tensor:
    """torch's grouped matmul under its public or its older private name."""
    public = getattr(F, "grouped_mm", None)
    op = torch._grouped_mm if public is None else public
    return torch.as_tensor(op(x_PD, weight_EDO, offs=offsets_E))


DEFAULTS = defaults("rows=1,32,256,2048,8192 rounds=7 record=true")
INPUTS_OF_FEW = 16
LOOP_ROUNDS = 5


@dataclass(slots=True)
class Bench:
    """Measured rates and the layer of all rows."""

    timer: Timer
    flops_per_us: float
    layer: Layer
    report: Report

    def note(
        self, arm: str, inputs: list[Tensor], us: float, *, baseline: float | None, gate: bool | None
    ) -> None:
        """Record one time. Limit: to read the weights of active experts, or to compute their products."""
        active = statistics.mean(self.layer.routed(x_RD)[0].unique().numel() for x_RD in inputs)
        read = 2 * active * EXPERT_NUMBERS / self.timer.bytes_per_us
        pairs = len(inputs[0]) * NUM_CHOSEN
        floor, limit = max((read, "stream"), (2 * pairs * EXPERT_NUMBERS / self.flops_per_us, "matmul"))
        case = {"shape": "sdar-30b-a3b", "rows": len(inputs[0]), "arm": arm, "limit": limit}
        against = None if baseline is None else baseline / 1e3
        self.report.add(case, "ms", us / 1e3, "ms", baseline=against, floor=floor / 1e3, gate_passed=gate)


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="experts")
    torch.manual_seed(0)
    bench = Bench(
        timer=Timer(rounds=int(options["rounds"])),
        flops_per_us=matmul_rate() / 1e6,
        layer=Layer(),
        report=Report("experts", options),
    )
    for num_rows in numbers(options["rows"]):
        _layer(bench, [bench.layer.rows(num_rows) for _ in range(INPUTS_OF_FEW if num_rows <= 32 else 1)])
    return 0


def _layer(bench: Bench, inputs: list[Tensor]) -> None:
    layer = bench.layer
    is_right = layer.is_right(inputs[0])
    # It waits for the host, so that no graph can hold it.
    loop = 1000 * statistics.median(
        [device_ms(partial(layer.loop, inputs[0])) for _ in range(LOOP_ROUNDS + 2)][2:]
    )
    library = _library_us(bench, [partial(layer.library, x_RD) for x_RD in inputs])
    strongest = loop if library is None else min(loop, library)
    bench.note("loop", inputs, loop, baseline=None, gate=None)
    if library is not None:
        bench.note("grouped_mm", inputs, library, baseline=loop, gate=None)
    for pdl in (False, True):
        us = bench.timer.us_per_call([partial(layer.ours, x_RD, pdl) for x_RD in inputs])
        bench.note("ours" if pdl else "ours_without_pdl", inputs, us, baseline=strongest, gate=is_right)
    sorted_of = []
    for x_RD in inputs:
        chosen_RC = F.linear(x_RD, layer.router).topk(NUM_CHOSEN, dim=-1).indices
        order_P, offsets_E = layer.sorted_pairs(chosen_RC)
        sorted_of.append((x_RD[order_P // NUM_CHOSEN], offsets_E))
    alone = _library_us(bench, [partial(layer.library_products, *given) for given in sorted_of])
    us = bench.timer.us_per_call([layer.products(x_RD) for x_RD in inputs])
    bench.note("ours_products", inputs, us, baseline=alone, gate=is_right)


def _library_us(bench: Bench, calls: list[Callable[[], Any]]) -> float | None:
    """Time of torch's grouped matmul; None if this torch or this GPU has none."""
    try:
        return bench.timer.us_per_call(calls)
    except (RuntimeError, AttributeError) as error:
        print(f"torch's grouped matmul cannot be had: {error}", flush=True)
        return None


if __name__ == "__main__":
    start(measure, __doc__)
