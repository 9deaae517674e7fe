"""Charts of measured data, from the newest rows of benchmarks/results.

As in the tables, a row whose parity gate failed is never shown, and a metric without a gate has none to fail.
The caption under a chart comes from the same rows: `python -m benchmarks.table`."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results import RESULTS, read_rows
from docs.figures.style import Theme, panel
from idlm.infer.decoders.rejection import strategy_of

GPU, CONTEXT, ADAPTERS = "NVIDIA H200", 1024, {0: "-", 128: (0, (4, 2))}
"""Ranks of adapters (0: none) and their lines."""
ACCEPTED = (0.9, 0.78)
CURVES = (1, 4, 16, 64)
PROBABILITIES = [0.5 + 0.025 * step for step in range(19)]


def steps(adapter: int) -> dict[int, dict[tuple[str, int], float]]:
    """Of the newest rows: times of a step over AR's, by number of requests and by strategy and stride."""
    found: dict[int, dict[tuple[str, int], float]] = {}
    for row in read_rows("decode", results=RESULTS):
        case = row["case"]
        is_shown = row["metric"] == "isd_step_over_ar_step" and case.get("adapter") == adapter
        if is_shown and row["gpu"] == GPU and case["context"] == CONTEXT and case["strategy"] != "adaptive":
            found.setdefault(case["concurrency"], {})[case["strategy"], case["stride"]] = row["value"]
    return dict(sorted(found.items()))


def best(arms: dict[tuple[str, int], float], probability: float) -> float:
    """Tokens per second of the fastest over AR's, if each draft is accepted with this probability."""
    return max(
        strategy_of(strategy).tokens_per_forward([probability] * (stride - 1)) / ratio
        for (strategy, stride), ratio in arms.items()
    )


def speedup(theme: Theme) -> Figure:
    """Tokens per second over AR's on the same engine, by requests at once and by acceptance."""
    figure = Figure(figsize=(8.2, 3.7))
    with panel(figure, theme, (0.06, 0.15, 0.42, 0.75)) as axes:
        for rank, line in ADAPTERS.items():
            for probability, color in zip(ACCEPTED, theme.series):
                values = {size: best(arms, probability) for size, arms in steps(rank).items()}
                name = f"{probability:.2f} accepted" + ", adapter" * (rank > 0)
                axes.plot(
                    *zip(*values.items()), color=color, linestyle=line, marker="o", markersize=4, label=name
                )
        axes.set_xscale("log", base=2)
        ticks = [4**power for power in range(5)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        _finish(axes, theme, "requests at once", "tokens per second, times AR on the same engine")
    with panel(figure, theme, (0.55, 0.15, 0.42, 0.75)) as axes:
        for rank, line in ADAPTERS.items():
            known = steps(rank)
            for size, color in zip(CURVES, theme.series):
                ratios = [best(known[size], probability) for probability in PROBABILITIES]
                shown = f"{size} at once" if rank == 0 else None
                axes.plot(PROBABILITIES, ratios, color=color, linestyle=line, label=shown)
        _finish(axes, theme, "chance of a draft to be accepted", "")
    return figure


def _finish(axes: Axes, theme: Theme, label: str, title: str) -> None:
    axes.axhline(1, color=theme.muted, linewidth=1.2, linestyle=(0, (1, 2)))
    axes.set_ylim(0, None)
    axes.set_xlabel(label, color=theme.muted, fontsize=10)
    axes.set_title(title, loc="left", fontsize=10.5, color=theme.ink)
    axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink)
