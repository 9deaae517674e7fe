"""Charts of measured data, from the newest rows of benchmarks/results.

As in the tables, a row whose parity gate failed is never shown, and a metric without a gate has none to fail.
The caption under a chart comes from the same rows: `python -m benchmarks.table`.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.results import RESULTS, read_rows
from docs.figures.style import Theme, panel

STRATEGIES = ("cold", "branch", "adaptive", "tree")
CONTEXT, STRIDE = 1024, 4
MARKERS = ("o", "s", "D", "^")


def newest(bench: str, metric: str, **case: Any) -> dict[Any, float]:
    """Value by concurrency of the newest rows of `metric` with this case."""
    found: dict[Any, float] = {}
    for row in read_rows(bench, results=RESULTS):
        same = all(row["case"].get(key) == value for key, value in case.items())
        if row["metric"] == metric and row["gate_passed"] is not False and same:
            found[row["case"]["concurrency"]] = row["value"]
    return dict(sorted(found.items()))


def speedup(theme: Theme) -> Figure:
    """Tokens per second over AR's on the same engine, against the number of requests at once."""
    figure = Figure(figsize=(8.2, 3.7))
    with panel(figure, theme, (0.075, 0.15, 0.78, 0.75)) as axes:
        axes.axhline(1, color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.text(0.8, 0.93, "AR = 1", ha="left", va="top", fontsize=9.5, color=theme.muted)
        for name, color, marker in zip(STRATEGIES, theme.series, MARKERS, strict=True):
            values = newest("decode", "isd_over_ar", strategy=name, context=CONTEXT, stride=STRIDE)
            if not values:
                continue
            axes.plot(
                list(values), list(values.values()), color=color, marker=marker, markersize=5, linewidth=2,
                label=name,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        ticks = [2**power for power in range(9)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(0, 3.6)
        axes.set_xlabel("requests at once", color=theme.muted, fontsize=10)
        axes.set_title(
            "tokens per second, times AR on the same engine", loc="left", fontsize=10.5, color=theme.ink
        )
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.2, 1.0), labelcolor=theme.ink)
    return figure
