"""The table and the plot of a decode benchmark."""

from __future__ import annotations

from benchmarks.engine.decoding.harness import Measured

HEAD = ("context", "C", "arm", "ms/step", "of stream", "TPF", "tok/s", "tok/s/user", "over AR")


def table(measured: list[Measured], floors: dict[tuple[int, int], float]) -> str:
    """One line per arm and load, in Markdown, which is readable in a terminal too."""
    ar = {_load(one): one.tokens_per_second() for one in measured if one.arm.decoder == "ar"}
    lines = [HEAD, *(_line(one, floors, ar) for one in measured)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    text = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths)) + " |" for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join(["", text[0], rule, *text[1:], ""])


def _load(one: Measured) -> tuple[int, int]:
    return one.load.concurrency, one.load.context


def _line(
    one: Measured, floors: dict[tuple[int, int], float], ar: dict[tuple[int, int], float]
) -> tuple[str, ...]:
    rate, load = one.tokens_per_second(), _load(one)
    return (
        str(one.load.context),
        str(one.load.concurrency),
        one.arm.name,
        f"{one.step_ms():.3f}",
        f"{floors[load] / one.step_ms():.1%}",
        f"{one.tokens_per_forward():.3f}",
        f"{rate:.0f}",
        f"{rate / one.load.concurrency:.1f}",
        f"{rate / ar[load]:.2f}x" if load in ar else "-",
    )
