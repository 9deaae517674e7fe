"""Attention of diffusion blocks: 32 rows a sequence over the whole context, or over lists of slots.

    python -m benchmarks.block_attention [record=true]
        [exact=131072x6,65536x13,131072x1,32768x1] [lists=1,16] [k=1024] [rows=32] [results=DIR]

Rows of the bench `sparse_attention`. The floor of exact attention is the larger of its bytes at the rate of
a read-only stream and its products at the rate of a matrix product, both measured in the same process. Lists
are slots scattered over a context of shuffled pages, drawn anew for each layer and KV head; what they are
compared with is the exact kernel over a context of k slots in pages in order. `gather`: lists of runs of
slots, over lists of the same length that are one run. Every arm is checked against float64 first. One CUDA
graph runs an arm over as many layers as outgrow the L2 cache, with a norm between two layers whose own time
is subtracted; medians, the arms of a case in turns. `lists=` leaves lists out. It needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.kernels.attention_step import Attend, captured, norms_alone, time_in_turns
from benchmarks.kernels.block_attention_step import (
    BlockStep,
    block_error,
    block_layers,
    make_block_step,
)
from benchmarks.results import result_row
from benchmarks.shared import defaults, numbers, parse_options, save, start
from benchmarks.stream import matmul_rate, stream_rate

DEFAULTS = defaults(
    "exact=131072x6,65536x13,131072x1,32768x1 lists=1,16 k=1024 rows=32 context=32768 "
    "gather_k=8192 heads=32,8,128 page_size=16 rounds=9 record=false"
)
BENCH = "sparse_attention"
RUNS = (1, 16, 64, 128)


def measure(arguments: list[str]) -> int:
    """Print and optionally record all cases."""
    options = parse_options(arguments, DEFAULTS, needs_gpu="block_attention")
    stream, products = stream_rate(), matmul_rate()
    rounds, rows = int(options["rounds"]), list[dict[str, Any]]()
    print(f"read-only stream {stream / 1e12:.3f} TB/s, product {products / 1e12:.0f} TFLOP/s", flush=True)
    for context, batch in cases_of(options["exact"]):
        rows += _exact(options, batch, context, (stream, products), rounds)
    batches = numbers(options["lists"]) if options["lists"] else ()
    for batch in batches:
        rows += _listed(options, batch, (stream, products), rounds)
    if batches:
        rows += _gather(options, max(batches), rounds)
    save(BENCH, rows, options)
    return 0


row_of = partial(result_row, BENCH, command="python -m benchmarks.block_attention")


def cases_of(text: str) -> list[tuple[int, int]]:
    """Contexts and batches of "131072x6,32768x1"."""
    return [(int(case.split("x")[0]), int(case.split("x")[1])) for case in text.split(",")]


def layer_seconds(arms: dict[str, tuple[BlockStep, Attend]], rounds: int) -> dict[str, float]:
    """Median seconds of one layer of each arm, without norms."""
    graphs = {name: captured(attend) for name, (_, attend) in arms.items()}
    graphs |= {
        f"{name} norms": captured(norms_alone(block.step, pdl=True)) for name, (block, _) in arms.items()
    }
    seconds = time_in_turns(graphs, rounds)
    return {
        name: (seconds[name] - seconds[f"{name} norms"]) / len(block.step.keys)
        for name, (block, _) in arms.items()
    }


def _us(
    arm: str, case: dict[str, Any], block: BlockStep, seconds: float, error: float, rates: tuple[float, float]
) -> list[dict[str, Any]]:
    """Rows of one arm, which are printed too."""
    floor, gate = block.floor(*rates), error <= 2
    print(
        f"{arm:>8} {case}: {seconds * 1e6:8.2f} us, {floor / seconds:.3f} of the floor, error {error:.2f}"
        + ("" if gate else "  WRONG"),
        flush=True,
    )
    where = {"arm": arm} | case
    return [
        row_of(where, "us", seconds * 1e6, "us", floor=floor * 1e6, gate_passed=gate),
        *(
            [row_of(case, "exact_share_of_floor", floor / seconds, "share", gate_passed=gate)]
            if arm == "exact"
            else []
        ),
    ]


def _exact(
    options: dict[str, str], batch: int, context: int, rates: tuple[float, float], rounds: int
) -> list[dict[str, Any]]:
    """Exact attention of one case, and what the sums before the block cost."""
    block = make_block_step(options, batch=batch, context=context)
    arms = {"exact": (block, block_layers(block)), "ranking": (block, block_layers(block, before=True))}
    errors = {name: block_error(block, attend) for name, (_, attend) in arms.items()}
    seconds = layer_seconds(arms, rounds)
    case = {"rows": int(options["rows"]), "batch": batch, "context": context, "k": 0}
    return [row for arm in arms for row in _us(arm, case, block, seconds[arm], errors[arm], rates)]


def _listed(
    options: dict[str, str], batch: int, rates: tuple[float, float], rounds: int
) -> list[dict[str, Any]]:
    """Attention over lists, against exact attention over a context as long as they are."""
    k, context = int(options["k"]), int(options["context"])
    lists = make_block_step(options, batch=batch, context=context, k=k)
    short = make_block_step(options, batch=batch, context=k, in_order=True)
    arms = {"listed": (lists, block_layers(lists)), "exact": (short, block_layers(short))}
    errors = {name: block_error(block, attend) for name, (block, attend) in arms.items()}
    seconds = layer_seconds(arms, rounds)
    case = {"rows": int(options["rows"]), "batch": batch}
    rows = _us(
        "listed", case | {"context": context, "k": k}, lists, seconds["listed"], errors["listed"], rates
    )
    rows += _us("exact", case | {"context": k, "k": 0}, short, seconds["exact"], errors["exact"], rates)
    ratio, gate = seconds["listed"] / seconds["exact"], max(errors.values()) <= 2
    print(f"listed over short exact, {batch=} {k=}: {ratio:.3f}", flush=True)
    where = {"batch": batch, "k": k}
    return [*rows, row_of(where, "listed_over_short_exact", ratio, "x", gate_passed=gate)]


def _gather(options: dict[str, str], batch: int, rounds: int) -> list[dict[str, Any]]:
    """Time of lists that are one run over the time of lists of short runs."""
    k, context = int(options["gather_k"]), int(options["context"])
    blocks = {
        run: make_block_step(options, batch=batch, context=context, k=k, run=run, layers=2)
        for run in (*RUNS, k)
    }
    arms: dict[str, tuple[BlockStep, Callable[[], list[Tensor]]]] = {
        str(run): (block, block_layers(block)) for run, block in blocks.items()
    }
    gate = all(block_error(*arm) <= 2 for arm in arms.values())
    seconds = layer_seconds(arms, rounds)
    rows = []
    for run in RUNS:
        share = seconds[str(k)] / seconds[str(run)]
        print(f"gather, runs of {run:>3} slots, {batch=} {k=}: {share:.3f} of one run", flush=True)
        case = {"batch": batch, "k": k, "run": run}
        rows.append(row_of(case, "gather_efficiency", share, "share", gate_passed=gate))
    return rows


if __name__ == "__main__":
    start(measure, __doc__)
