"""Conversions of a real checkpoint next to published figures, from the newest rows of bench `real`."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.results import RESULTS, read_rows
from docs.figures.style import Theme, panel
from idlm.acceptance import tokens_per_forward_cold

ARMS = {
    "best": "rank 24, 4,000 steps",
    "r64": "rank 64, 906 steps",
    "tv": "rank 24, 906 steps",
    "fullkl20": "full, 1,900 steps",
}
"""Arms of the rows, by what was trained."""
TEMPERATURES: dict[float, Any] = {0.0: "-", 1.0: (0, (4, 2))}
PROBABILITIES = [0.2 + 0.02 * step for step in range(36)]
PUBLISHED: tuple[tuple[str, float, Any], ...] = (
    ("paper, 8B: 2.96", 2.96, "-"),
    ("Uno, 8B, T=1: 2.59", 2.59, (0, (1, 2))),
)
"""Tokens per forward: table 3 of arXiv 2604.11035 at N=4; GSM8K at T=1 with blocks of 8 in SGLang."""


def rows(metric: str, **wanted: Any) -> list[dict[str, Any]]:
    """The newest row of each case that has these values."""
    newest = {
        str(row["case"]): row
        for row in read_rows("real", results=RESULTS)
        if row["metric"] == metric and row["case"].items() >= wanted.items()
    }
    return list(newest.values())


def evidence(theme: Theme) -> Figure:
    """Acceptance by position in held-out chats, and tokens per pass by the acceptance of the first draft."""
    figure = Figure(figsize=(8.2, 3.9))
    with panel(figure, theme, (0.06, 0.14, 0.36, 0.76)) as axes:
        for (arm, name), color in zip(ARMS.items(), theme.series, strict=True):
            for temperature, line in TEMPERATURES.items():
                found = rows("acceptance", arm=arm, set="chat", subset="all", temperature=temperature)
                shares = {str(row["case"]["position"]): row["value"] for row in found}
                label = name if temperature == 0 else None
                axes.plot(
                    *zip(*shares.items(), strict=True), color=color, linestyle=line, marker="o", label=label
                )
        axes.set_ylim(0, 0.8)
        axes.set_title("accepted, by position (dashed: T=1)", loc="left", fontsize=10.5, color=theme.ink)
        axes.legend(frameon=False, fontsize=8, labelcolor=theme.ink, loc="lower left", ncols=2)
    with panel(figure, theme, (0.5, 0.14, 0.47, 0.76)) as axes:
        values = [tokens_per_forward_cold([probability] * 3) for probability in PROBABILITIES]
        axes.plot(PROBABILITIES, values, color=theme.muted, label="eq. 3 at N=4, of the paper's own schedule")
        for arm, color in zip(ARMS, theme.series, strict=True):
            first = {
                _case(row): row["value"] for row in rows("acceptance", arm=arm, position=1, subset="all")
            }
            given = {_case(row): row["value"] for row in rows("tokens_per_forward", arm=arm, subset="all")}
            axes.plot([first[case] for case in given], list(given.values()), "o", color=color, markersize=4)
        for name, value, dashes in PUBLISHED:
            axes.axhline(value, color=theme.grid, linestyle=dashes, linewidth=1.2)
            axes.text(0.2, value + 0.04, name, color=theme.muted, fontsize=8.5)
        axes.set_ylim(1, 3.4)
        axes.set_xlabel("accepted at the first position (curve: at each)", color=theme.muted, fontsize=10)
        axes.set_title("tokens per forward pass", loc="left", fontsize=10.5, color=theme.ink)
        axes.legend(frameon=False, fontsize=8.5, labelcolor=theme.ink, loc="lower right")
    return figure


def _case(row: dict[str, Any]) -> tuple[str, float]:
    return row["case"]["set"], row["case"]["temperature"]
