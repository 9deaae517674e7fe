"""Figures of recorded rows as SVG, the same bytes from the same rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.results import read_rows

SPARSE_BENCH = "sparse_attention"
SPEEDUP = "tpob_speedup_vs_exact"
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
    """Draw recorded rows of `benchmarks.sparse_attention` like Figure 5 of MAGE (ICML 2026 workshop
    AdaptFM): the speedup of an output block over exact attention, by contexts and batches of one model.
    One SVG for every budget k and number of passes a block; returns the paths.
    """
    newest: dict[tuple[Any, ...], Row] = {}
    for row in read_rows(SPARSE_BENCH, results=results):
        if row["metric"] == SPEEDUP and row["gate_passed"] is not False:
            newest[tuple(row["case"].values())] = row
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
        title = f"output block over exact attention, k {k}, {num_passes} passes a block"
        drawn.append(save_svg(_speedups(rows, title), folder / f"sparse_speedup_{name}"))
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
