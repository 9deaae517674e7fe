"""A layer of experts on a GPU: share of the stream of its active experts, or of the matmul rate.

    python -m benchmarks.experts [rows=1,32,256,2048,8192] [shape=sdar-30b-a3b|llada2-mini]
                                 [rounds=7] [record=true] [results=DIR]

One process measures stream and matmul rate, then router, experts and sum as a replayed graph, torch's grouped
matmul in a graph, and the loop over experts, which cannot be captured. Few rows are several inputs in turn,
so that weights come from memory. `products` are the two grouped products alone. It needs a GPU. R rows, E
experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.experts_arms import SHAPES, Layer
from benchmarks.results import result_row
from benchmarks.shared import defaults, parse_options, save, start
from benchmarks.stream import Timer, matmul_rate

BF16 = torch.bfloat16
DEFAULTS = defaults("rows=1,32,256,2048,8192 shape=sdar-30b-a3b rounds=7 record=true")
INPUTS_OF_FEW = 16
LOOP_ROUNDS = 5


@dataclass(slots=True)
class Bench:
    """Options and measured rates of all parts; parts append to `rows`."""

    timer: Timer
    flops_per_us: float
    name: str
    layer: Layer
    rows: list[dict[str, Any]]

    def floor_us(self, inputs: list[Tensor]) -> tuple[float, str]:
        """Time to read the active experts' weights or to compute their products, and which one is longer."""
        shape = self.layer.shape
        active = statistics.mean(self.layer.num_active(x_RD) for x_RD in inputs)
        read = 2 * active * shape.expert_numbers / self.timer.bytes_per_us
        pairs = len(inputs[0]) * shape.num_chosen
        computed = 2 * pairs * shape.expert_numbers / self.flops_per_us
        return max((read, "stream"), (computed, "matmul"))

    def note(
        self, arm: str, inputs: list[Tensor], us: float, *, baseline: float | None, gate: bool | None
    ) -> None:
        """Record one time as a result row and print it."""
        floor, limit = self.floor_us(inputs)
        case = {"shape": self.name, "rows": len(inputs[0]), "arm": arm, "limit": limit}
        row = result_row(
            "experts", case, "ms", us / 1e3, "ms", baseline=_ms(baseline), floor=floor / 1e3, gate_passed=gate
        )
        self.rows.append(row)
        against = "" if baseline is None else f"{baseline:9.1f} us {baseline / us:6.2f}x"
        verdict = "  WRONG" if gate is False else ""
        share = f"{floor / us:6.1%} of {limit:6s}"
        print(f"{len(inputs[0]):6d} rows {arm:18s} {us:9.1f} us {share} {against}{verdict}", flush=True)


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1e3


def measure(arguments: list[str]) -> int:
    """Run the parts, print lines and record the rows; returns the exit status."""
    options = parse_options(arguments, DEFAULTS, needs_gpu="experts")
    torch.manual_seed(0)
    timer = Timer(rounds=int(options["rounds"]))
    bench = Bench(
        timer=timer,
        flops_per_us=matmul_rate() / 1e6,
        name=options["shape"],
        layer=Layer(SHAPES[options["shape"]]),
        rows=[],
    )
    print(
        f"stream {timer.bytes_per_us / 1e6:.3f} TB/s, matmul {bench.flops_per_us / 1e6:.0f} TFLOP/s",
        flush=True,
    )
    for num_rows in (int(rows) for rows in options["rows"].split(",")):
        inputs = [bench.layer.rows(num_rows) for _ in range(INPUTS_OF_FEW if num_rows <= 32 else 1)]
        _layer(bench, inputs)
    save("experts", bench.rows, options)
    return 0


def _layer(bench: Bench, inputs: list[Tensor]) -> None:
    """Measure the whole layer, its products and both baselines."""
    layer = bench.layer
    is_right = layer.is_right(inputs[0])
    loop = _eager_us(partial(layer.loop, inputs[0]))
    library = _library_us(bench, [partial(layer.library, x_RD) for x_RD in inputs])
    strongest = loop if library is None else min(loop, library)
    bench.note("loop", inputs, loop, baseline=None, gate=None)
    if library is not None:
        bench.note("grouped_mm", inputs, library, baseline=loop, gate=None)
    for pdl in (False, True):
        us = bench.timer.us_per_call([partial(layer.ours, x_RD, None, pdl) for x_RD in inputs])
        bench.note("ours" if pdl else "ours_without_pdl", inputs, us, baseline=strongest, gate=is_right)
    sorted_of = []
    for x_RD in inputs:
        order_P, offsets_E = layer.sorted_pairs(_choices(layer, x_RD))
        sorted_of.append((x_RD[order_P // layer.shape.num_chosen], offsets_E))
    alone = _library_us(bench, [partial(layer.library_products, *given) for given in sorted_of])
    us = bench.timer.us_per_call([layer.products(x_RD) for x_RD in inputs])
    bench.note("ours_products", inputs, us, baseline=alone, gate=is_right)


def _choices(layer: Layer, x_RD: Tensor) -> Tensor:
    logits_RE = torch.nn.functional.linear(x_RD, layer.router)
    return logits_RE.topk(layer.shape.num_chosen, dim=-1).indices


def _library_us(bench: Bench, calls: list[Callable[[], Any]]) -> float | None:
    """Time of torch's grouped matmul; None if this torch or this GPU has none."""
    try:
        return bench.timer.us_per_call(calls)
    except (RuntimeError, AttributeError) as error:
        print(f"torch's grouped matmul cannot be had: {error}", flush=True)
        return None


def _eager_us(call: Callable[[], Any]) -> float:
    """Median time of calls that wait for the host."""
    times = []
    for _ in range(LOOP_ROUNDS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times[2:])


if __name__ == "__main__":
    start(measure, __doc__)
