"""Figures of recorded rows as SVG, the same bytes from the same rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.results import read_rows

SPARSE_BENCH = "sparse_attention"
SPEEDUP = "tpob_speedup_vs_exact"
PARTS_OF_A_PASS = {"attention_ms": None, "estimation_ms": "///", "rest_ms": None}
"""Rows of a pass of each arm, from below, with the hatching of their bars."""
Row = dict[str, Any]
Cell = tuple[int, int]
"""Context and batch."""


def save_svg(figure: Any, path: Path) -> Path:
    """Write a matplotlib figure without dates and with names that do not vary; returns the path."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasSVG(figure)
    with rc_context({"svg.hashsalt": "idlm", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    return path


def draw_sparse_attention(results: Path, folder: Path) -> list[Path]:
    """Draw recorded rows of `benchmarks.sparse_attention` like Figures 5 and 6 of MAGE (ICML 2026 workshop
    AdaptFM): the speedup of an output block over exact attention, and what a pass consists of. One SVG for
    every budget k and number of passes a block; returns the paths.

    Departures: cells are contexts and batches of one model, and a pass is the mean over a whole block, in
    which the first pass of MAGE, that ranks, is one of many.
    """
    newest: dict[tuple[Any, ...], Row] = {}
    for row in read_rows(SPARSE_BENCH, results=results):
        if row["metric"] in (SPEEDUP, *PARTS_OF_A_PASS) and row["gate_passed"] is not False:
            newest[(row["metric"], *row["case"].values())] = row
    drawn = []
    # Exact attention has no budget, so its rows are those of any.
    settings = dict.fromkeys((row["case"]["k"], row["case"]["passes"]) for row in newest.values())
    for k, num_passes in sorted(settings):
        rows = [
            row
            for row in newest.values()
            if row["case"]["passes"] == num_passes
            and (row["case"]["k"] == k or row["case"]["arm"].startswith("exact"))
        ]
        name = f"k{k}_passes{num_passes}.svg"
        speedups = [row for row in rows if row["metric"] == SPEEDUP]
        if speedups:
            title = f"output block over exact attention, k {k}, {num_passes} passes a block"
            drawn.append(save_svg(_speedups(speedups, title), folder / f"sparse_speedup_{name}"))
        times = [row for row in rows if row["metric"] in PARTS_OF_A_PASS]
        if any(row["case"]["k"] == k for row in times):
            drawn.append(save_svg(_passes(times), folder / f"sparse_pass_{name}"))
    return drawn


def _cells(rows: Iterable[Row]) -> list[Cell]:
    return sorted({(row["case"]["context"], row["case"]["batch"]) for row in rows})


def _name(cell: Cell) -> str:
    context, batch = cell
    return f"{context // 1024}K x {batch}" if context % 1024 == 0 else f"{context} x {batch}"


def _speedups(rows: list[Row], title: str) -> Any:
    """A group of bars for each cell, a bar for each arm."""
    from matplotlib.figure import Figure

    cells, arms = _cells(rows), list(dict.fromkeys(row["case"]["arm"] for row in rows))
    figure = Figure(figsize=(1.5 + 1.2 * len(cells), 3.5))
    axes = figure.add_subplot()
    width = 0.8 / len(arms)
    for place, arm in enumerate(arms):
        of_arm = [row for row in rows if row["case"]["arm"] == arm]
        values = {(row["case"]["context"], row["case"]["batch"]): row["value"] for row in of_arm}
        at = [cells.index(cell) + (place - (len(arms) - 1) / 2) * width for cell in values]
        bars = axes.bar(at, list(values.values()), width, label=arm)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(cells)), [_name(cell) for cell in cells])
    axes.set(xlabel="slots of context x sequences", ylabel="speedup", title=title)
    axes.legend()
    return figure


def _passes(rows: list[Row]) -> Any:
    """A panel for each cell: a bar for each arm, in parts, and a line at the sum of exact attention."""
    from matplotlib.figure import Figure

    cells = _cells(rows)
    figure = Figure(figsize=(4 * len(cells), 3.5))
    for place, cell in enumerate(cells, start=1):
        axes = figure.add_subplot(1, len(cells), place)
        here = [row for row in rows if (row["case"]["context"], row["case"]["batch"]) == cell]
        arms = list(dict.fromkeys(row["case"]["arm"] for row in here))
        bottoms = dict.fromkeys(arms, 0.0)
        for metric, hatch in PARTS_OF_A_PASS.items():
            values = {row["case"]["arm"]: row["value"] for row in here if row["metric"] == metric}
            below = [bottoms[arm] for arm in values]
            axes.bar(list(values), list(values.values()), bottom=below, label=metric[:-3], hatch=hatch)
            for arm, value in values.items():
                bottoms[arm] += value
        if "exact" in bottoms:
            axes.axhline(bottoms["exact"], color="black", linestyle="--", linewidth=1)
        axes.set(ylabel="kernel time of a pass, ms", title=_name(cell))
        axes.tick_params(axis="x", labelsize=7)
        axes.legend(fontsize=7)
    figure.tight_layout()
    return figure
