"""The sweep of `python -m benchmarks.attention sweep=true`: which launch parameters are best, case by case.

    python -m benchmarks.attention sweep=true batches=1,16 contexts=1024,32768 rows=1,7,15

Four families (`families=walk,sum`): walks (blocks, stages, warps, programs per multiprocessor and the
shortest item, jointly), what parts hold and when their sum is launched, ways to add parts up, and fixed
splits. All are compiled first, in as many processes as there are cores. Every variant is timed alone, then
the best few of a family in turns with the chosen launch, with and without dependent launch. Layers and norms
as in attention_step.py; keys and values are twice the L2 cache of an H200.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from benchmarks.kernels.attention_step import (
    Step,
    attention_layers,
    captured,
    launch_of,
    make_step,
    norms_alone,
    numbers,
    replay_seconds,
    time_in_turns,
)
from benchmarks.stream import stream_rate
from idlm.errors import UserError

LAYERS = 32
FINALISTS = 4
HOPELESS = 1.5
"""A variant this much slower than the best so far is timed once."""
BLOCKS = ((32, 3), (32, 4), (64, 2), (64, 3), (64, 4), (128, 2), (128, 3))
"""block_n and stages of walks."""
FIXED_BLOCKS = ((64, 3), (64, 2), (32, 3), (128, 2))
TILES = ((32, 4), (64, 4), (64, 8))
"""block_m and warps of fixed splits, which may not depend on the rows."""
Variants = dict[str, dict[Any, None]]


def variants(step: Step, names: str) -> Variants:
    """Launches of the families in `names`, the chosen one first; without repetition. UserError IDLM-0107."""
    chosen, fixed = (replace(launch_of(step, fixed=fixed), pdl=True) for fixed in (False, True))
    families = {
        "walk": (chosen, _walks),
        "overlap": (chosen, _overlaps),
        "sum": (chosen, _sums),
        "fixed": (fixed, _fixed),
    }
    unknown = sorted(set(names.split(",")) - families.keys())
    if unknown:
        raise UserError("IDLM-0107", f"families={names}", fix=f"use some of {sorted(families)}")
    found = {}
    for name in names.split(","):
        first, family = families[name]
        found[name] = dict.fromkeys([first, *family(first), replace(first, pdl=False)])
    return found


def _walks(chosen: Any) -> Iterator[Any]:
    tiles = [(chosen.block_m, 4), *((block_m, 4) for block_m in (16, 32) if block_m < chosen.block_m)]
    if chosen.block_m > 32:
        tiles += [(chosen.block_m, 8), (2 * chosen.block_m, 8)]
    for (block_n, stages), (block_m, warps), programs, min_blocks in itertools.product(
        BLOCKS, tiles, (1, 2, 3, 4), (1, 2)
    ):
        yield replace(
            chosen,
            block_m=block_m,
            block_n=block_n,
            stages=stages,
            warps=warps,
            programs_per_sm=programs,
            min_blocks=min_blocks,
        )


def _overlaps(chosen: Any) -> Iterator[Any]:
    for half_parts, early, programs, min_blocks in itertools.product(
        (False, True), (False, True), (1, 2, 3), (1, 2)
    ):
        yield replace(
            chosen, half_parts=half_parts, early=early, programs_per_sm=programs, min_blocks=min_blocks
        )


def _sums(chosen: Any) -> Iterator[Any]:
    for rows, parts, warps in itertools.product((1, 2, 4, 16), (2, 8, 16, 32), (1, 2, 4)):
        # More would not fit a program's registers.
        if rows * parts <= 32 * warps:
            yield replace(chosen, combine_rows=rows, combine_parts=parts, combine_warps=warps)


def _fixed(chosen: Any) -> Iterator[Any]:
    for (block_n, stages), (block_m, warps), programs in itertools.product(FIXED_BLOCKS, TILES, (1, 2, 3)):
        walk = {"block_n": block_n, "stages": stages, "block_m": block_m, "warps": warps}
        yield replace(chosen, **walk, split_slots=max(64, block_n), programs_per_sm=programs)
    for split_slots, octave, programs in itertools.product((64, 128, 256), (8, 16, 32), (1, 2, 3)):
        yield replace(chosen, split_slots=split_slots, octave=octave, programs_per_sm=programs)
    for rows, warps in itertools.product((1, 2, 4), (1, 2, 4)):
        yield replace(chosen, combine_rows=rows, combine_warps=warps)


def sweep(options: dict[str, str], arguments: list[str]) -> int:
    """Print the best of every family and case."""
    start = time.perf_counter()
    compile_everything("benchmarks.kernels.attention", arguments)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    rate = stream_rate()
    cases = itertools.product(*(numbers(options[name]) for name in ("batches", "contexts", "rows")))
    for batch, context, rows in cases:
        step = make_step(options, batch=batch, context=context, rows=rows, layers=LAYERS)
        if step is None:
            continue
        for family, launches in variants(step, options["families"]).items():
            print(f"B={batch} context={context} rows={rows} {family}, {time.perf_counter() - start:.0f} s")
            _rank(step, list(launches), step.layer_bytes / rate, int(options["rounds"]))
    return 0


def _rank(step: Step, launches: list[Any], floor: float, rounds: int) -> None:
    """Print the finalists and the chosen launch, which is the first."""
    from triton.runtime.errors import OutOfResources

    norms = {pdl: captured(norms_alone(step, pdl=pdl)) for pdl in (False, True)}
    alone = {pdl: statistics.median(replay_seconds(norms[pdl]) for _ in range(rounds)) for pdl in norms}
    seconds, graphs, arms = {}, {}, {}
    for launch in launches:
        # A graph reads the lists of its arm's plan, which has to live as long.
        arms[launch] = attention_layers(step, "triton", launch=launch)
        try:
            graphs[launch] = captured(arms[launch])
        except OutOfResources:
            continue
        replay_seconds(graphs[launch])
        seconds[launch] = replay_seconds(graphs[launch]) - alone[launch.pdl]
        if seconds[launch] < HOPELESS * min(seconds.values()):
            seconds[launch] = min(seconds[launch], replay_seconds(graphs[launch]) - alone[launch.pdl])
    ranked = sorted(seconds, key=lambda launch: seconds[launch])
    detail = list(dict.fromkeys([*ranked[:FINALISTS], launches[0], launches[-1]]))
    names = {name_of(launch, launches[0]): launch for launch in detail if launch in graphs}
    medians = time_in_turns({name: graphs[launch] for name, launch in names.items()}, rounds)
    for name, launch in names.items():
        layer = (medians[name] - alone[launch.pdl]) / len(step.keys)
        print(f"  {layer * 1e6:8.2f} us {floor / layer:6.3f} of the stream  {name}", flush=True)


def name_of(launch: Any, chosen: Any) -> str:
    """The parameters that differ from the chosen launch."""
    changed = (field.name for field in fields(launch))
    detail = [
        f"{name}={getattr(launch, name)}"
        for name in changed
        if getattr(launch, name) != getattr(chosen, name)
    ]
    return " ".join(detail) or f"chosen: {chosen}"


def compile_everything(module: str, arguments: list[str]) -> None:
    """Compile all variants into Triton's cache in parallel; in sequence it would take minutes."""
    num_parts = min(16, os.cpu_count() or 1)
    base = [sys.executable, "-m", module, *arguments]
    parts = [subprocess.Popen([*base, f"compile_part={i}/{num_parts}"]) for i in range(num_parts)]
    codes = [part.wait() for part in parts]
    assert not any(codes), f"{codes=}"


def compile_part(options: dict[str, str]) -> int:
    """Launch this part of the variants once on little data."""
    from triton.runtime.errors import OutOfResources

    index, num_parts = numbers(options["compile_part"].replace("/", ","))
    launches: dict[Any, Step] = {}
    for rows in numbers(options["rows"]):
        step = make_step(options, batch=1, context=1024, rows=rows, layers=2)
        assert step is not None
        for family in variants(step, options["families"]).values():
            for launch in family:
                # These are arguments of the kernels, not constants.
                launches.setdefault(replace(launch, programs_per_sm=2, min_blocks=1), step)
    for launch, step in list(launches.items())[index::num_parts]:
        try:
            attention_layers(step, "triton", launch=launch)()
        except OutOfResources:
            continue
    torch.cuda.synchronize()
    return 0
