"""The drawn figures: one pass of introspective strided decoding, row layouts, the life of a request."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.figures.style import Theme, arrow, box, canvas
from idlm.infer.decoders.rejection import STRATEGIES, DraftBuffer, RowLayout
from idlm.kernels.step_rows import MASK

CELL = (58, 34)
STEP = 68
LEFT = 150


def one_pass(theme: Theme) -> Figure:
    """Two passes at stride 4: what each is fed, by position, and what its rows predict."""
    figure, axes = canvas(920, 372)

    def at(column: int) -> float:
        return LEFT + STEP * column + CELL[0] / 2

    fed = {
        305: (0, ["Mia", "has", "5", "nuts", "MASK", "MASK", "MASK"]),
        125: (4, [".", "Mia", "earns", "6", "MASK", "MASK", "MASK"]),
    }
    for y, (first, tokens) in fed.items():
        for offset, word in enumerate(tokens):
            kind = theme.known if offset == 0 else theme.mask if word == "MASK" else theme.draft
            size = 9.5 if word == "MASK" else 11
            box(axes, theme, (at(first + offset), y), CELL, word, fill=kind, fontsize=size)
    labels = {
        221: [
            *((1, "has", "yes"), (2, "5", "yes"), (3, "nuts", "yes"), (4, ".", "new")),
            *((5, "Mia", "next"), (6, "earns", "next"), (7, "6", "next")),
        ],
        41: [(5, "Mia", "yes"), (6, "buys", "no")],
    }
    for y, words in labels.items():
        for column, word, verdict in words:
            line = {"yes": theme.good, "new": theme.good, "no": theme.bad, "next": theme.muted}[verdict]
            box(axes, theme, (at(column), y), CELL, word, fill="none", line=line, dashed=verdict == "next")
            mark = {"yes": "\u2713", "no": "\u2717", "new": "+", "next": ""}[verdict]
            axes.text(at(column) + 20, y + 9, mark, ha="center", va="center", fontsize=9, color=line)
            arrow(axes, (at(column - 1) + 8, y + 84 - 18), (at(column) - 8, y + 18), theme.muted)
    for index in range(4, 8):
        arrow(axes, (at(index), 221 - 18), (at(index), 125 + 18), theme.muted)
    for y, text in (
        (305, "pass 1 is fed"),
        (221, "pass 1 predicts"),
        (125, "pass 2 is fed"),
        (41, "pass 2 predicts"),
    ):
        axes.text(12, y, text, va="center", fontsize=11.5, color=theme.ink, weight="bold")
    for first, last, y, text in (
        (0, 0, 338, "known"),
        (1, 3, 338, "drafts, tested in this pass"),
        (4, 6, 338, "masks, which draft for the next"),
    ):
        axes.text((at(first) + at(last)) / 2, y, text, ha="center", fontsize=9.5, color=theme.muted)
    notes = (
        (at(7) + 42, 221, "Four tokens come out:\nthree drafts passed,\nthe fourth is free."),
        (
            at(6) + 42,
            41,
            "\u201cearns\u201d failed. Its position is drawn anew,\n"
            "so the text keeps the distribution\nof AR decoding.",
        ),
    )
    for x, y, text in notes:
        axes.text(x, y, text, va="center", fontsize=9.5, color=theme.muted, linespacing=1.35)
    return figure


def _name(layout: RowLayout, row: int) -> str:
    if row == 0:
        return "token"
    if row <= layout.num_drafts:
        return f"draft {row}"
    return f"mask {(row - 1 - layout.num_drafts) % layout.num_masks + 1}"


def _matrix(axes: Axes, theme: Theme, layout: RowLayout, left: float, top: float, cell: float) -> None:
    """Who sees whom among the rows of one layout; row 0 is the last known token."""
    rows = layout.rows
    for number, (source, position, limit, branch) in enumerate(rows):
        colour = theme.mask if source == MASK else theme.known if number == 0 else theme.draft
        y = top - (number + 1) * cell
        axes.text(left - 8, y + cell / 2, _name(layout, number), ha="right", va="center", fontsize=8.5)
        right = left + len(rows) * cell + 8
        axes.text(right, y + cell / 2, f"+{position}", va="center", fontsize=8.5, color=theme.muted)
        for other in range(len(rows)):
            sees = other < limit or branch <= other <= number
            axes.add_patch(
                Rectangle(
                    (left + other * cell, y),
                    cell,
                    cell,
                    facecolor=colour if sees else "none",
                    edgecolor=theme.grid,
                    linewidth=0.9,
                )
            )


def layouts(theme: Theme) -> Figure:
    """Cold, tree and branch at stride 3: the rows of a pass, and which other rows each of them sees."""
    figure, axes = canvas(920, 545)
    cell = 21.0
    buffers = {
        "cold": (DraftBuffer(2), DraftBuffer(0)),
        "tree": (DraftBuffer(2), DraftBuffer(2, True)),
        "branch": (DraftBuffer(2), DraftBuffer(2)),
    }
    notes = {
        "cold": "drop all drafts; draft anew",
        "tree": "keep drafts from the\nrejected pass, and masks",
        "branch": "masks after every\npossible rejection",
    }
    for column, (name, pair) in enumerate(buffers.items()):
        left = 135 + 270 * column
        axes.text(left - 62, 525, name, fontsize=13, weight="bold", va="center")
        axes.text(left - 62, 511, notes[name], fontsize=9.5, va="top", color=theme.muted, linespacing=1.3)
        for stock, top in zip(pair, (452, 222), strict=True):
            _matrix(axes, theme, STRATEGIES.get(name)().layout(stock, 2), left, top, cell)
    for y, text in ((400, "after every\ndraft passed"), (170, "after a\nrejection")):
        axes.text(8, y, text, fontsize=9.5, va="center", rotation=90, ha="left", color=theme.muted)
    return figure


def life(theme: Theme) -> Figure:
    """The life of a request in the engine."""
    figure, axes = canvas(920, 330)
    size, line, half = (122, 46), theme.muted, 61
    top, low = 240, 90

    def stop(x: float, y: float, title: str, note: str, fill: str) -> None:
        box(axes, theme, (x, y), size, title, fill=fill)
        axes.text(x, y - 31, note, ha="center", va="top", fontsize=8.8, color=line, linespacing=1.3)

    def say(x: float, y: float, text: str, color: str = line) -> None:
        axes.text(x, y, text, ha="center", va="center", fontsize=8.8, color=color, linespacing=1.3)

    stop(80, top, "add_request", "checks, token ids,\nits own seed", theme.known)
    stop(80, low, "waiting", "a queue,\noldest first", theme.known)
    stop(350, top, "schedule", "who runs, how many\nprompt rows", theme.draft)
    stop(510, top, "plan", "which rows\nare fed", theme.draft)
    stop(670, top, "forward", "one pass of\nthe model", theme.draft)
    stop(830, top, "advance", "verify, emit,\ndraft", theme.draft)
    stop(670, low, "read results", "up to four passes\nlater on a GPU", theme.draft)
    stop(510, low, "deliver", "tokens, text,\nstop strings", theme.draft)
    stop(350, low, "finish", "its KV pages stay\nin the prefix cache", theme.known)
    arrow(axes, (80, top - 62), (80, low + 25), line)
    for x in (350, 510, 670):
        arrow(axes, (x + half, top), (x + 160 - half, top), line)
    for x in (670, 510):
        arrow(axes, (x - half, low), (x - 160 + half, low), line)
    arrow(axes, (830, top - 62), (670 + half, low), line, curve=-0.35)
    arrow(axes, (830, top + 25), (360, top + 25), line, curve=0.12)
    say(595, 316, "the next pass, until the answer is complete")
    arrow(axes, (80 + half, low + 12), (350 - half, top - 14), line, curve=0.3)
    say(215, 66, "admit: a lane,\nKV pages, what the\nprefix cache has")
    box(axes, theme, (212, top), (96, 40), "preempted", fill="none", line=theme.bad, dashed=True, fontsize=10)
    say(212, top + 36, "no pages, keeps its lane", theme.bad)
    arrow(axes, (350 - half, top + 14), (262, top + 14), theme.bad)
    arrow(axes, (262, top + 3), (350 - half, top + 3), theme.bad)
    return figure
