"""Attention of diffusion blocks: 32 rows a sequence over the whole context, or over lists of slots.

    python -m benchmarks.block_attention [record=true]
        [exact=131072x6,65536x13,131072x1,32768x1] [lists=1,16] [k=1024] [rows=32] [results=DIR]

Rows of the bench `sparse_attention`. The floor of exact attention is the larger of its bytes at the rate of
a read-only stream and its products at the rate of a matrix product, both measured in the same process. Lists
are slots scattered over a context of shuffled pages, drawn anew for each layer and KV head; what they are
compared with is the exact kernel over a context of k slots in pages in order. Every arm is checked against
float64 first. One CUDA graph runs an arm over as many layers as outgrow the L2 cache, with a norm between
two layers whose own time is subtracted; medians, the arms of a case in turns. `lists=` leaves lists out. It
needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.kernels.attention_step import (
    COLD_BYTES,
    ERROR_LIMIT,
    Attend,
    Step,
    attention_layers,
    error_of,
    launch_of,
    layer_seconds,
    make_step,
)
from benchmarks.shared import Report, defaults, numbers, parse_options, start
from benchmarks.stream import Rates, measure_rates

DEFAULTS = defaults(
    "exact=131072x6,65536x13,131072x1,32768x1 lists=1,16 k=1024 rows=32 context=32768 "
    "heads=32,8,128 page_size=16 rounds=9 record=false"
)
CHAIN_BYTES = 4 * COLD_BYTES
"""Of a chain of layers: no kernel before the first one hides its beginning."""


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="block_attention")
    rates = measure_rates()
    report = Report("sparse_attention", options, "python -m benchmarks.block_attention")
    for context, batch in (map(int, case.split("x")) for case in options["exact"].split(",")):
        _exact(report, batch, context, rates)
    for batch in numbers(options["lists"]) if options["lists"] else []:
        _listed(report, batch, rates)
    return 0


def _step(options: dict[str, str], **sizes: Any) -> Step:
    step = make_step(options, rows=int(options["rows"]), cold_bytes=CHAIN_BYTES, is_block=True, **sizes)
    assert step is not None, f"{sizes=}: two layers do not fit"
    return step


def _layers(step: Step, *, before: bool = False) -> Attend:
    launch = replace(launch_of(step, fixed=False), pdl=True)
    return attention_layers(step, "triton", launch=launch, before=before)


def _measured(
    report: Report, arms: dict[str, tuple[Step, Attend]]
) -> tuple[dict[str, float], dict[str, bool]]:
    gates = {}
    for name, (step, attend) in arms.items():
        last = len(step.rows.block_table) - 1
        gates[name] = error_of(step, attend, range(last, last + 1)) <= ERROR_LIMIT
    with_norms = {name: (*arm, True) for name, arm in arms.items()}
    return layer_seconds(with_norms, int(report.options["rounds"])), gates


def _add_us(report: Report, arm: str, step: Step, seconds: float, gate: bool, rates: Rates) -> None:
    floor = max(step.layer_bytes / rates.stream, step.layer_flops / rates.product)
    rows = step.rows
    case = {"rows": rows.max_rows, "batch": len(rows.block_table), "context": rows.max_slots}
    case["k"] = rows.num_listed
    report.add({"arm": arm} | case, "us", seconds * 1e6, "us", floor=floor * 1e6, gate_passed=gate)
    if arm == "exact":
        report.add(case, "exact_share_of_floor", floor / seconds, "share", gate_passed=gate)


def _exact(report: Report, batch: int, context: int, rates: Rates) -> None:
    step = _step(dict(report.options), batch=batch, context=context)
    arms = {"exact": (step, _layers(step)), "ranking": (step, _layers(step, before=True))}
    seconds, gates = _measured(report, arms)
    for arm in arms:
        _add_us(report, arm, step, seconds[arm], gates[arm], rates)


def _listed(report: Report, batch: int, rates: Rates) -> None:
    """Attention over lists, against exact attention over a context as long as they are."""
    options = dict(report.options)
    k = int(options["k"])
    steps = {
        "listed": _step(options, batch=batch, context=int(options["context"]), k=k),
        "exact": _step(options, batch=batch, context=k, in_order=True),
    }
    seconds, gates = _measured(report, {arm: (step, _layers(step)) for arm, step in steps.items()})
    for arm, step in steps.items():
        _add_us(report, arm, step, seconds[arm], gates[arm], rates)
    ratio, gate = seconds["listed"] / seconds["exact"], all(gates.values())
    report.add({"batch": batch, "k": k}, "listed_over_short_exact", ratio, "x", gate_passed=gate)


if __name__ == "__main__":
    start(measure, __doc__)
