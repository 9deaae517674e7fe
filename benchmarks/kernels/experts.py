"""A layer of experts on a GPU: share of the stream of its active experts, or of the matmul rate.

    python -m benchmarks.experts [rows=1,32,256,2048,8192] [shape=sdar-30b-a3b|llada2-mini]
                                 [parts=layer,sweep] [rounds=7] [record=true] [results=DIR]

One process measures stream and matmul rate, then router, experts and sum as a replayed graph, torch's grouped
matmul in a graph, and the loop over experts, which cannot be captured. Few rows are several inputs in turn,
so that weights come from memory. `products` are the two grouped products alone. `sweep` prints tiles. R rows,
E experts.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.experts_arms import SHAPES, Layer
from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from benchmarks.stream import Timer, matmul_rate
from idlm.cli import command
from idlm.errors import UserError
from idlm.kernels.experts.launch import SHARED_BYTES, Tile, choose

BF16 = torch.bfloat16
DEFAULTS = {
    "rows": "1,32,256,2048,8192",
    "shape": "sdar-30b-a3b",
    "parts": "layer",
    "rounds": "7",
    "record": "true",
    "results": str(RESULTS),
}
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


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Run the parts, print lines and record the rows; returns the exit status."""
    options = parse_options(arguments, DEFAULTS)
    if not torch.cuda.is_available():
        raise UserError("IDLM-0543", "no CUDA device", fix="run benchmarks.kernels.experts on a GPU")
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
    parts = options["parts"].split(",")
    for num_rows in (int(rows) for rows in options["rows"].split(",")):
        inputs = [bench.layer.rows(num_rows) for _ in range(INPUTS_OF_FEW if num_rows <= 32 else 1)]
        if "layer" in parts:
            _layer(bench, inputs)
        if "sweep" in parts:
            _sweep(bench, inputs[0])
    if options["record"] == "true":
        append_rows("experts", bench.rows, results=Path(options["results"]))
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


def _sweep(bench: Bench, x_RD: Tensor) -> None:
    """Print the fastest tiles of each product for every plausible number of pairs per tile."""
    shape = bench.layer.shape
    mean = len(x_RD) * shape.num_chosen / shape.num_experts
    usual = choose(len(x_RD), shape.num_chosen, shape.num_experts, BF16)
    for is_gated in (True, False):
        times = {}
        for block_r in (16, 32, 64, 128):
            if not mean / 2 <= block_r <= max(16, 4 * mean):
                continue
            for tile in _tiles(block_r, is_gated):
                launch = replace(usual, block_r=block_r, **{"gate_up" if is_gated else "down": tile})
                call = bench.layer.product(x_RD, launch, is_gated=is_gated)
                times[block_r, tile] = bench.timer.us_per_call([call])
        mine = usual.gate_up if is_gated else usual.down
        print(f"{len(x_RD)} rows, {'gate_up' if is_gated else 'down'}; now {_short(usual.block_r, mine)}")
        for (block_r, tile), us in sorted(times.items(), key=lambda item: item[1])[:6]:
            print(f"    {us:9.1f} us {_short(block_r, tile)}", flush=True)


def _tiles(block_r: int, is_gated: bool) -> Iterator[Tile]:
    """Tiles that fit registers and shared memory: deep pipelines, or many columns at once for few rows."""
    depths = ((128, 3), (128, 4), (64, 6)) if block_r <= 32 else ((64, 3), (64, 4))
    for block_o, (block_i, stages), is_stacked in itertools.product(
        (32, 64, 128, 256), depths, (False, True)
    ):
        height = block_o * (2 if is_gated else 1)
        if is_stacked > is_gated or not 64 <= height <= 256 or (block_o < 64 and not is_stacked):
            continue
        tile = Tile(
            block_o=block_o,
            block_i=block_i,
            warps=8 if height * block_r >= 128 * 128 else 4,
            stages=stages,
            stacked=is_stacked,
        )
        if tile.shared_bytes(2, block_r, gated=is_gated) <= SHARED_BYTES:
            yield tile


def _short(block_r: int, tile: Tile) -> str:
    kind = " stacked" * tile.stacked
    return f"{tile.block_o}x{block_r}x{tile.block_i} w{tile.warps} g{tile.stages}{kind}"


if __name__ == "__main__":
    sys.exit(main())
