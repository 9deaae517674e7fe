"""The table and the figure of `idlm-bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

RATE = "mean_output_throughput_tokens_per_s"
HEADINGS = (
    *("arm", "load", "at once", "done", "failed", "tok/s", "x first", "tok/pass"),
    *("TTFT p50", "p95", "p99", "TPOT p50", "ITL p50", "p95", "p99"),
)
FILE_WIDTH = 200
RANDOM_NOTE = ", after which drafts fail more often than in text (prompts=text or FILE)"


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each arm and load; what failed first is said above it."""
    for row in rows:
        if row["num_error_requests"]:
            place = f"{row['arm']}, {_at_once(row)}: {row['num_error_requests']} of {row['num_requests']}"
            print(f"{place} requests failed; the first one: {row['first_error']}", file=sys.stderr)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=not console.is_terminal)
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    console.print(
        "tok/s: output tokens; x first: over the first arm; tok/pass: per forward pass; times in ms"
    )
    console.print(f"prompts: {rows[0]['prompts']}{RANDOM_NOTE if rows[0]['prompts'] == 'random' else ''}")


def _cells(row: dict[str, Any]) -> list[str]:
    stats = row["stats"]
    latencies = [stats["ttft"][each] for each in ("p50", "p95", "p99")]
    latencies += [stats["tpot"]["p50"], *(stats["itl"][each] for each in ("p50", "p95", "p99"))]
    return [
        row["arm"],
        row["scenario"],
        _at_once(row),
        str(row["num_completed_requests"]),
        str(row["num_error_requests"]),
        f"{row[RATE]:,.0f}",
        _number(row["over_first"], "x"),
        _number(row["tokens_per_forward"]),
        *("-" if value is None else f"{1e3 * value:.1f}" for value in latencies),
    ]


def _at_once(row: dict[str, Any]) -> str:
    rate = row["arrival_requests_per_second"]
    return str(row["num_concurrency"]) if rate is None else f"{rate:g}/s"


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    loads = sorted({row["num_concurrency"] for row in rows})
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        own = [row for row in rows if row["arm"] == name]
        places, colour = [row["num_concurrency"] for row in own], f"C{number}"
        left.plot(places, [row[RATE] for row in own], marker="o", color=colour, label=name)
        for metric, line in (("ttft", "--"), ("tpot", "-")):
            values = [float("nan") if (v := row["stats"][metric]["p50"]) is None else 1e3 * v for row in own]
            right.plot(places, values, line, marker="o", color=colour, label=f"{name} {metric.upper()}")
    is_open = rows[0]["arrival_requests_per_second"] is not None
    for axes, title in ((left, "output tokens/s"), (right, "median ms")):
        axes.set(title=title, xlabel="arrivals/s" if is_open else "requests at a time", xscale="log", ylim=0)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.minorticks_off()
        axes.legend()
    figure.savefig(path)
