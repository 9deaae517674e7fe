"""Progress of a long job on standard error: a bar on a terminal, a plain line now and then elsewhere.

Standard output and output files never get any of it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

BAR_WIDTH = 20
BAR_SECONDS, LINE_SECONDS = 0.5, 30.0
"""Time between two updates of a bar, and between two plain lines."""

Clock = Callable[[], float]


class FigureBar(RichProgress):
    """A bar whose figures stand on lines of their own below it, so that long figures never hide the bar.

    The figures of a task are its field `text`.
    """

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars, then the figures of each task."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields.get("text"):
                yield Text(task.fields["text"])


def figure_bar(console: Console, *columns: ProgressColumn, **options: Any) -> FigureBar:
    """A `FigureBar` with a description, a bar and then `columns`."""
    bar = BarColumn(bar_width=BAR_WIDTH)
    return FigureBar(TextColumn("{task.description}"), bar, *columns, console=console, **options)


class Progress:
    """Shows how far a job is, from `with` to its end. `total` None: nobody knows how much there is to do.

    `update` may be called at any rate: it asks for the figures only when it shows them. `counts` False: show
    a percentage in place of two numbers, for totals (of bytes) that say little to a reader.
    """

    def __init__(
        self,
        title: str,
        *,
        total: int | None = None,
        counts: bool = True,
        is_shown: bool = True,
        console: Console | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._title, self._total, self._counts, self._clock = title, total, counts, clock
        self._is_shown, self._has_bar = is_shown, is_shown and self._console.is_terminal
        self._bar: FigureBar | None = None
        self._task: Any = None
        self._start = self._last = clock()

    def __enter__(self) -> Progress:
        self._start = self._last = self._clock()
        if self._has_bar:
            # Standard output is left alone: it may be a file. What is printed there hides the bar (`hidden`).
            self._bar = figure_bar(
                self._console,
                TextColumn("{task.fields[share]}"),
                TimeElapsedColumn(),
                TextColumn("left {task.fields[left]}"),
                transient=True,
                redirect_stdout=False,
                refresh_per_second=1 / BAR_SECONDS,
                get_time=self._clock,
            )
            self._task = self._bar.add_task(self._title, total=self._total, text="", share="", left="?")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return self._clock() - self._start

    def begin(self, total: int) -> None:
        """Say how much there is to do, once that is known. The time left follows the pace from here on."""
        if total != self._total:
            self._total, self._start = total, self._clock()
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def update(self, done: int, figures: Callable[[], str] = str) -> None:
        """`done` of the total is done; show it if the last update is long enough ago."""
        now = self._clock()
        is_due = now - self._last >= (BAR_SECONDS if self._has_bar else LINE_SECONDS)
        if not self._is_shown or not (is_due or (self._has_bar and done == self._total)):
            return
        self._last = now
        text, share, left = figures(), self._share(done), remaining(done, self._total, now - self._start)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, text=text, share=share, left=left)
        else:
            line = "  ".join(filter(None, (self._title, share, text, f"left {left}")))
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _share(self, done: int) -> str:
        if self._total is None:
            return ""
        return f"{done}/{self._total}" if self._counts else f"{done / max(self._total, 1):.0%}"

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the bar off the terminal while something is printed to standard output there."""
        if self._bar is None or not sys.stdout.isatty():
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


def remaining(done: int, total: int | None, seconds: float) -> str:
    """The time that the rest takes at the pace so far, as h:mm:ss; ? while that is unknown."""
    if not done or total is None:
        return "?"
    return str(timedelta(seconds=round(seconds * max(0, total - done) / done)))
