"""The sweep of `python -m benchmarks.block_attention sweep=true`: launch parameters of blocks.

All are compiled first, in as many processes as there are cores. Every variant of a case is checked, timed
alone, and the best few then in turns with the chosen launch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernels.attention_step import (
    captured,
    launch_of,
    norms_alone,
    numbers,
    replay_seconds,
    time_in_turns,
)
from benchmarks.kernels.attention_sweep import HOPELESS, compile_everything, name_of
from benchmarks.kernels.blocks.block_attention_step import block_error, block_layers, make_block_step
from benchmarks.stream import matmul_rate, stream_rate

FINALISTS = 5
WALKS = (
    # block_m, warps, block_n, stages, registers
    (64, 4, 64, 3, 0),
    (128, 8, 64, 3, 0),
    (128, 8, 64, 4, 0),
    (128, 8, 64, 2, 128),
    (128, 8, 32, 4, 128),
    (128, 4, 32, 4, 0),
)
SHORT_WALKS = (
    (64, 4, 32, 3, 0),
    (64, 4, 64, 3, 0),
    (128, 8, 32, 4, 0),
    (128, 8, 64, 3, 0),
)
PROGRAMS = (1, 2, 3, 4)


def variants(chosen: Any, *, short: bool) -> Iterator[Any]:
    """Launches to try, the chosen one first."""
    yield chosen
    sums = [(1, 32), (2, 16), (4, 8)] if short else [(chosen.combine_rows, chosen.combine_parts)]
    for walk, programs, (rows, parts) in itertools.product(SHORT_WALKS if short else WALKS, PROGRAMS, sums):
        block_m, warps, block_n, stages, registers = walk
        yield replace(
            chosen,
            block_m=block_m,
            warps=warps,
            block_n=block_n,
            stages=stages,
            registers=registers,
            programs_per_sm=programs,
            combine_rows=rows,
            combine_parts=parts,
            half_parts=True,
        )


def sweep(options: dict[str, str], arguments: list[str]) -> int:
    """Print the best of every case."""
    start = time.perf_counter()
    compile_everything("benchmarks.kernels.blocks.block_attention", arguments)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    rates = stream_rate(), matmul_rate()
    print(f"stream {rates[0] / 1e12:.3f} TB/s, product {rates[1] / 1e12:.0f} TFLOP/s", flush=True)
    k = int(options["k"])
    for case in options["exact"].split(","):
        context, batch = numbers(case.replace("x", ","))
        block = make_block_step(options, batch=batch, context=context)
        print(f"exact {context} x {batch}, {time.perf_counter() - start:.0f} s", flush=True)
        _rank(block, rates, short=False)
    for batch in numbers(options["lists"]):
        lists = make_block_step(options, batch=batch, context=int(options["context"]), k=k)
        short = make_block_step(options, batch=batch, context=k, in_order=True)
        for name, block in (("lists", lists), ("short context", short)):
            print(f"{name} of {k} x {batch}, {time.perf_counter() - start:.0f} s", flush=True)
            _rank(block, rates, short=True)
    return 0


def _rank(block: Any, rates: tuple[float, float], *, short: bool) -> None:
    """Print the finalists and the chosen launch."""
    from triton.runtime.errors import OutOfResources

    chosen = replace(launch_of(block.step, fixed=False), pdl=True)
    norms = captured(norms_alone(block.step, pdl=True))
    norm_seconds = min(replay_seconds(norms) for _ in range(5))
    graphs, arms, seconds = {}, {}, {}
    for launch in dict.fromkeys(variants(chosen, short=short)):
        # A graph reads the lists of its arm's plan, which has to live as long.
        arms[launch] = block_layers(block, launch=launch)
        try:
            graphs[launch] = captured(arms[launch])
        except OutOfResources:
            continue
        replay_seconds(graphs[launch])
        seconds[launch] = replay_seconds(graphs[launch])
        if seconds[launch] < HOPELESS * min(seconds.values()):
            seconds[launch] = min(seconds[launch], replay_seconds(graphs[launch]))
    ranked = sorted(seconds, key=lambda launch: seconds[launch])
    best_of_walk = {
        (each.block_m, each.warps, each.block_n, each.stages, each.registers): each for each in ranked[::-1]
    }
    detail = list(dict.fromkeys([*ranked[:FINALISTS], *best_of_walk.values(), chosen]))
    medians = time_in_turns({str(i): graphs[launch] for i, launch in enumerate(detail)}, 5)
    floor, num_layers = block.floor(*rates), len(block.step.keys)
    for i, launch in sorted(enumerate(detail), key=lambda pair: medians[str(pair[0])]):
        layer = (medians[str(i)] - norm_seconds) / num_layers
        error = block_error(block, arms[launch])
        wrong = "" if error <= 2 else f"  WRONG {error:.1f}"
        print(f"  {layer * 1e6:8.2f} us {floor / layer:6.3f}  {name_of(launch, chosen)}{wrong}", flush=True)


def compile_part(options: dict[str, str]) -> int:
    """Launch this part of the variants once on little data."""
    from triton.runtime.errors import OutOfResources

    index, num_parts = numbers(options["compile_part"].replace("/", ","))
    launches: dict[Any, Any] = {}
    k = int(options["k"])
    for short, is_listed in ((False, False), (True, True), (True, False)):
        block = make_block_step(options, batch=1, context=4 * k, k=k if is_listed else None, layers=2)
        chosen = replace(launch_of(block.step, fixed=False), pdl=True)
        for launch in variants(chosen, short=short):
            # Programs are an argument of the kernels, not a constant.
            launches.setdefault((replace(launch, programs_per_sm=2), is_listed), block)
    for (launch, _), block in list(launches.items())[index::num_parts]:
        try:
            block_layers(block, launch=launch)()
        except OutOfResources:
            continue
    torch.cuda.synchronize()
    return 0
