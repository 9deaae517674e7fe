"""Figures of the benchmarks `eviction` and `decodability`, from recorded rows; the newest of each case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import read_rows

Lines = Mapping[str, Mapping[Any, float]]
"""By label, y by x."""


def draw_eviction(results: Path, folder: Path) -> list[Path]:
    """Throughput over full blocks by batch, with the limit, by block size and context (figures 6, 7)."""
    kinds: dict[str, dict[str, dict[Any, float]]] = {}
    for row in _newest("eviction", "throughput_over_full_block", results):
        case = row["case"]
        lines = kinds.setdefault(f"block{case['block']}_context{case['context']}_{case['trace']}", {})
        lines.setdefault(case["commit"], {})[case["batch"]] = row["value"]
        lines.setdefault(f"limit, {case['commit']}", {})[case["batch"]] = row["floor"]
    drawn = [
        _save(folder, f"eviction_{name}", lines, "sequences", "throughput over full blocks")
        for name, lines in kinds.items()
    ]
    toggles: dict[str, dict[Any, float]] = {}
    for row in _newest("eviction", "toggle_gain", results):
        toggles.setdefault(f"batch {row['case']['batch']}", {})[row["case"]["toggle"]] = row["value"]
    return [*drawn, _save(folder, "eviction_toggles", toggles, "without", "slower by")] if toggles else drawn


def draw_decodability(results: Path, folder: Path) -> list[Path]:
    """Share of decided masks by percentile of importance (figures 4, 13), and exact match by threshold; of
    the model that was measured last.
    """
    rows = read_rows("decodability", results=results)
    model = rows[-1]["case"]["model"] if rows else None
    signals: dict[str, dict[Any, float]] = {}
    for row in _newest("decodability", "decoded_share", results, model=model):
        signals.setdefault(row["case"]["signal"], {})[row["case"]["percentile"]] = row["value"]
    quality: dict[str, dict[Any, float]] = {}
    for row in _newest("decodability", "exact_match", results, model=model):
        case = row["case"]
        if case["k"] == "-" and case["commit"] in ("-", "clean") and case["arm"] in ("full", "focus"):
            label = case["arm"] if case["alpha"] == "-" else f"focus, alpha {case['alpha']}"
            quality.setdefault(label, {})[case["threshold"]] = row["value"]
    drawn = []
    if signals:
        drawn.append(_save(folder, "decodability_signal", signals, "percentile of importance", "decided"))
    if quality:
        drawn.append(_save(folder, "decodability_quality", quality, "threshold", "exact match"))
    return drawn


def _newest(bench: str, metric: str, results: Path, **case: Any) -> list[dict[str, Any]]:
    """The last row of each case that has `case` in it, those whose gate failed left out."""
    rows = [row for row in read_rows(bench, results=results) if row["metric"] == metric]
    rows = [row for row in rows if all(row["case"].get(key) == value for key, value in case.items())]
    return list({str(row["case"]): row for row in rows if row["gate_passed"] is not False}.values())


def _save(folder: Path, name: str, lines: Lines, x_label: str, y_label: str) -> Path:
    """One figure; numbers and names on the x axis are as far apart as their order."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(6, 3.5))
    axes = figure.add_subplot()
    for label, points in lines.items():
        is_limit = label.startswith("limit")
        axes.plot([str(x) for x in points], list(points.values()), "--" if is_limit else "o-", label=label)
    axes.set(xlabel=x_label, ylabel=y_label, ylim=(0, None), title=name.replace("_", " "))
    axes.tick_params("x", rotation=30 if x_label == "without" else 0)
    axes.legend(fontsize=8)
    FigureCanvasSVG(figure)
    path = folder / f"{name}.svg"
    with rc_context({"svg.hashsalt": "idlm", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    return path
