"""What all figures share: two themes, deterministic SVG, and boxes with text.

A figure is drawn once for light and once for dark pages: `NAME-light.svg` and `NAME-dark.svg`."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of one variant. `series` are the lines of charts, in order."""

    name: str
    ink: str
    muted: str
    grid: str
    known: str
    draft: str
    mask: str
    good: str
    bad: str
    paper: str
    series: tuple[str, str, str, str]


LIGHT = Theme(
    name="light",
    ink="#1f2328",
    muted="#59636e",
    grid="#d1d9e0",
    known="#e6eaef",
    draft="#cfe3ff",
    mask="#ffe3c2",
    good="#1a7f37",
    bad="#cf222e",
    paper="#ffffff",
    series=("#0969da", "#bc4c00", "#8250df", "#1a7f37"),
)
DARK = Theme(
    name="dark",
    ink="#e6edf3",
    muted="#9198a1",
    grid="#3d444d",
    known="#2a313c",
    draft="#123a6b",
    mask="#5a3411",
    good="#3fb950",
    bad="#f85149",
    paper="#0d1117",
    series=("#4493f8", "#f0883e", "#ab7df8", "#3fb950"),
)
THEMES = (LIGHT, DARK)
Draw = Callable[[Theme], Figure]


def svg(draw: Draw, theme: Theme) -> str:
    """One variant as SVG text: the same bytes for the same matplotlib, without a date."""
    settings = {
        "svg.hashsalt": "idlm",
        "svg.fonttype": "path",
        "font.family": "DejaVu Sans",
        "font.size": 11,
        "text.color": theme.ink,
    }
    with matplotlib.rc_context(settings):
        figure = draw(theme)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of `width` x `height` units with one plain axes whose units are squares of 0.01 inch."""
    figure = Figure(figsize=(width / 100, height / 100))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    return figure, axes


def box(
    axes: Axes,
    theme: Theme,
    center: tuple[float, float],
    size: tuple[float, float],
    text: str,
    *,
    fill: str,
    line: str | None = None,
    dashed: bool = False,
    color: str | None = None,
    fontsize: float = 11,
) -> None:
    """A rounded box with centered text; `line` is its outline."""
    (x, y), (width, height) = center, size
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=5",
            facecolor=fill,
            edgecolor=line or theme.grid,
            linewidth=1.2,
            linestyle=(0, (3, 2)) if dashed else "-",
        )
    )
    axes.text(x, y - 1, text, ha="center", va="center", fontsize=fontsize, color=color or theme.ink)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, *, curve: float = 0.0
) -> None:
    """A thin arrow; `curve` bends it."""
    axes.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={
            "arrowstyle": "-|>,head_width=0.18,head_length=0.35",
            "color": color,
            "linewidth": 1.1,
            "shrinkA": 0,
            "shrinkB": 0,
            "connectionstyle": f"arc3,rad={curve}",
        },
    )


@contextmanager
def panel(figure: Figure, theme: Theme, box: tuple[float, float, float, float]) -> Iterator[Axes]:
    """Axes of a chart with a quiet grid and no frame."""
    axes = figure.add_axes(box)
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.muted, length=0)
    yield axes
