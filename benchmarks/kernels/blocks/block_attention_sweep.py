"""The sweep of `python -m benchmarks.block_attention sweep=true`: launch parameters of blocks.

All are compiled and checked first, in as many processes as there are cores. Every variant of a case is timed
alone, and the best few then in turns with the chosen launch.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
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
from benchmarks.kernels.attention_sweep import HOPELESS, name_of
from benchmarks.kernels.blocks.block_attention_step import block_error, block_layers, make_block_step
from benchmarks.stream import matmul_rate, stream_rate

FINALISTS = 8
TALL = {"block_m": 128, "warps": 8, "block_n": 64, "stages": 3, "half_parts": True}
WALKS: tuple[dict[str, Any], ...] = (
    TALL | {"two_groups": False},
    TALL | {"two_groups": True},
    TALL | {"block_m": 64, "warps": 4, "two_groups": False},
)
FEW_ROWS_WALKS: tuple[dict[str, Any], ...] = tuple(
    {"block_n": block_n, "stages": stages} for block_n, stages in ((64, 3), (64, 4), (128, 2), (128, 3))
)
SHORT_WALKS: tuple[dict[str, Any], ...] = tuple(
    TALL | {"block_m": block_m, "warps": block_m // 16, "block_n": block_n, "stages": stages}
    for block_m, block_n, stages in ((64, 32, 3), (64, 64, 3), (128, 32, 4), (128, 64, 3))
)
PROGRAMS = (1, 2, 4)
CHECK_SECONDS = 30
SUMS = ((1, 32, 1), (2, 16, 1), (4, 8, 1))
"""combine_rows, combine_parts and combine_warps."""


def variants(chosen: Any, *, short: bool) -> Iterator[Any]:
    """Launches to try, the chosen one first: walks, sums of the chosen walk, and walks that may be split."""
    yield chosen
    yield replace(chosen, whole_slots=0)
    few = chosen.block_m < 64
    sums = SUMS if short else [(chosen.combine_rows, chosen.combine_parts, chosen.combine_warps)]
    walks = SHORT_WALKS if short else FEW_ROWS_WALKS if few else WALKS
    programs_of = dict.fromkeys((*(PROGRAMS[:2] if few else PROGRAMS), chosen.programs_per_sm))
    for walk, programs, each in itertools.product(walks, programs_of, sums):
        yield replace(chosen, **walk, programs_per_sm=programs, **_sum_options(each))
    for early, each in itertools.product((False, True), () if short or few else SUMS):
        yield replace(chosen, early=early, **_sum_options(each))


def _sum_options(numbers_of_sum: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("combine_rows", "combine_parts", "combine_warps"), numbers_of_sum, strict=True))


def sweep(options: dict[str, str], arguments: list[str]) -> int:
    """Print the best of every case."""
    start = time.perf_counter()
    right = _compiled_and_checked(arguments)
    print(f"compiled and checked in {time.perf_counter() - start:.0f} s", flush=True)
    rates = stream_rate(), matmul_rate()
    print(f"stream {rates[0] / 1e12:.3f} TB/s, product {rates[1] / 1e12:.0f} TFLOP/s", flush=True)
    k = int(options["k"])
    for case, (context, batch, its_options) in _cases(options):
        block = make_block_step(its_options, batch=batch, context=context)
        print(f"exact {case}, {time.perf_counter() - start:.0f} s", flush=True)
        _rank(block, rates, right, short=False)
        del block
    for batch in numbers(options["lists"]) if options["lists"] else ():
        lists = make_block_step(options, batch=batch, context=int(options["context"]), k=k)
        short = make_block_step(options, batch=batch, context=k, in_order=True)
        for name, block in (("lists", lists), ("short context", short)):
            print(f"{name} of {k} x {batch}, {time.perf_counter() - start:.0f} s", flush=True)
            _rank(block, rates, right, short=True)
    return 0


def _cases(options: dict[str, str]) -> Iterator[tuple[str, tuple[int, int, dict[str, str]]]]:
    """Cases of `exact`: contexts x sequences, or contexts x sequences x rows."""
    for case in options["exact"].split(",") if options["exact"] else ():
        context, batch, *rows = numbers(case.replace("x", ","))
        yield case, (context, batch, options | {"rows": str(rows[0] if rows else options["rows"])})


def _rank(block: Any, rates: tuple[float, float], right: set[str], *, short: bool) -> None:
    """Print the finalists and the chosen launch."""
    from triton.runtime.errors import OutOfResources

    chosen = replace(launch_of(block.step, fixed=False), pdl=True)
    norms = captured(norms_alone(block.step, pdl=True))
    norm_seconds = min(replay_seconds(norms) for _ in range(5))
    graphs, arms, seconds = {}, {}, {}
    is_listed = block.lists_LBKC is not None
    for launch in dict.fromkeys(variants(chosen, short=short)):
        if launch != chosen and _key(launch, is_listed=is_listed) not in right:
            continue
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
        (each.block_m, each.warps, each.block_n, each.stages, each.early, each.two_groups): each
        for each in ranked[::-1]
    }
    detail = list(dict.fromkeys([*ranked[:FINALISTS], *best_of_walk.values(), chosen]))
    medians = time_in_turns({str(i): graphs[launch] for i, launch in enumerate(detail)}, 5)
    floor, num_layers = block.floor(*rates), len(block.step.keys)
    for i, launch in sorted(enumerate(detail), key=lambda pair: medians[str(pair[0])]):
        layer = (medians[str(i)] - norm_seconds) / num_layers
        error = block_error(block, arms[launch])
        wrong = "" if error <= 2 else f"  WRONG {error:.1f}"
        print(f"  {layer * 1e6:8.2f} us {floor / layer:6.3f}  {name_of(launch, chosen)}{wrong}", flush=True)


def _key(launch: Any, *, is_listed: bool) -> str:
    """What is compiled for a launch; programs are an argument of the kernels, not a constant."""
    return f"{_compiled(launch)} {is_listed}"


def _compiled(launch: Any) -> Any:
    return replace(launch, programs_per_sm=2, whole_slots=0)


def _compiled_and_checked(arguments: list[str]) -> set[str]:
    """Keys of the launches that are right, found in many processes: a fault ends one of them."""
    num_parts = min(16, os.cpu_count() or 1)
    base = [sys.executable, "-m", "benchmarks.kernels.blocks.block_attention", *arguments]
    parts = [
        subprocess.Popen([*base, f"compile_part={i}/{num_parts}"], stdout=subprocess.PIPE, text=True)
        for i in range(num_parts)
    ]
    right, deadline = set[str](), time.perf_counter() + CHECK_SECONDS
    for part in parts:
        try:
            said, _ = part.communicate(timeout=max(0.1, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            part.kill()
            said, _ = part.communicate()
            print("a process of checks took too long", flush=True)
        for line in said.splitlines():
            if line.startswith("right "):
                right.add(line.removeprefix("right "))
            else:
                print(line, flush=True)
    return right


def compile_part(options: dict[str, str]) -> int:
    """Check this part of the variants on little data; prints those that are right."""
    index, num_parts = numbers(options["compile_part"].replace("/", ","))
    launches: dict[str, tuple[Any, Any]] = {}
    k, batches = int(options["k"]), numbers(options["lists"]) if options["lists"] else ()
    small = {
        rows: make_block_step(options | {"rows": rows}, batch=1, context=4 * k - 24, layers=2)
        for rows in dict.fromkeys(its_options["rows"] for _, (_, _, its_options) in _cases(options))
    }
    tried = [
        (_chosen(small[its_options["rows"]], batch, context), small[its_options["rows"]], False)
        for _, (context, batch, its_options) in _cases(options)
    ]
    if batches:
        lists = make_block_step(options, batch=1, context=4 * k - 24, k=k, layers=2)
        in_order = make_block_step(options, batch=1, context=k, layers=2, in_order=True)
        tried += [(_chosen(lists, batch, k + int(options["rows"])), lists, True) for batch in batches]
        tried += [(_chosen(in_order, batch, k), in_order, True) for batch in batches]
    for chosen, block, short in tried:
        is_listed = block.lists_LBKC is not None
        for launch in variants(chosen, short=short):
            launches.setdefault(_key(launch, is_listed=is_listed), (_compiled(launch), block))
    for key, (launch, block) in list(launches.items())[index::num_parts]:
        try:
            error = block_error(block, block_layers(block, launch=launch))
            print(f"right {key}" if error <= 2 else f"WRONG {error:.1f} {key}", flush=True)
        except Exception as reason:  # The others are checked all the same.
            print(f"{type(reason).__name__} {str(reason)[-300:]!r} {key}", flush=True)
    torch.cuda.synchronize()
    return 0


def _chosen(block: Any, batch: int, context: int) -> Any:
    """The launch that the back end would choose for so many such sequences."""
    from idlm.kernels.paged_attention.choice import choose_launch

    rows, num_rows = block.step.rows, block.step.rows.max_rows
    sizes = {"max_rows": num_rows, "num_rows": num_rows * batch, "max_slots": context, "num_sequences": batch}
    assert len(rows.block_table) == 1, f"{rows.block_table.shape=}"
    return replace(choose_launch(block.step.shape, **sizes), pdl=True)
