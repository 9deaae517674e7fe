"""Progress of a long job on standard error: a bar on a terminal, else a plain line every 30 seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

BAR_WIDTH = 20
BAR_SECONDS, LINE_SECONDS = 0.5, 30.0
"""Time between two updates of a bar, and between two plain lines."""

Clock = Callable[[], float]


class FigureBar(RichProgress):
    """A bar with the figures of each task (its field `text`) on separate lines below, so that they never hide
    it.
    """

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bars, then the figures of each task."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields.get("text"):
                yield Text(task.fields["text"])


def figure_bar(console: Console, *columns: ProgressColumn, **options: Any) -> FigureBar:
    """Return a `FigureBar` with a description, a bar and then `columns`."""
    bar = BarColumn(bar_width=BAR_WIDTH)
    return FigureBar(TextColumn("{task.description}"), bar, *columns, console=console, **options)


class Progress:
    """Shows the progress of a job inside `with`. `total` None: the amount of work is unknown.

    `update` may be called at any rate: it calls `figures` only when it shows them. `counts` False shows a
    percentage instead of two numbers, for totals such as bytes that tell a reader little.
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

    def __enter__(self) -> Self:
        self._start = self._last = self._clock()
        if self._has_bar:
            # Standard output is not redirected, because it may be a file; see `hidden`.
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
        """Seconds since the start."""
        return self._clock() - self._start

    def begin(self, total: int) -> None:
        """Set the amount of work once it is known. The time left follows the rate from here on."""
        if total != self._total:
            self._total, self._start = total, self._clock()
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def update(self, done: int, figures: Callable[[], str] = str) -> None:
        """Show that `done` of the total is done, if the last update was long enough ago."""
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
        """Hide the bar while something is printed to the same terminal."""
        if self._bar is None or not sys.stdout.isatty():
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


def remaining(done: int, total: int | None, seconds: float) -> str:
    """Return the time that the rest takes at the rate so far, as h:mm:ss, or ? while it is unknown."""
    if not done or total is None:
        return "?"
    return str(timedelta(seconds=round(seconds * max(0, total - done) / done)))
