"""Progress of a long job on standard error: a bar on a terminal, else a plain line every 30 seconds.

While a bar is drawn, everything else that goes to the terminal, printed or logged, appears above it."""

from __future__ import annotations

import contextlib
import logging
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
    """A bar with the figures of each task (its field `text`) on separate lines below."""

    _moved: list[tuple[logging.StreamHandler[Any], Any]]

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._moved = []

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields.get("text"):
                yield Text(task.fields["text"])

    def start(self) -> None:
        """Draw the bar. Handlers of all loggers, which hold their stream since they were made, follow
        `sys.stdout` and `sys.stderr` to where rich has put them."""
        if self.live.is_started:
            return
        before = sys.stdout, sys.stderr
        # Else a bar that starts again erases as many lines above it as it had when it stopped.
        self.live._live_render._shape = None
        super().start()
        now = {id(old): new for old, new in zip(before, (sys.stdout, sys.stderr), strict=True)}
        for handler in _stream_handlers():
            old = handler.stream
            if now.get(id(old), old) is not old:
                self._moved.append((handler, old))
                handler.setStream(now[id(old)])

    def stop(self) -> None:
        """Leave the bar as it is; safe to call again."""
        while self._moved:
            handler, stream = self._moved.pop()
            handler.setStream(stream)
        super().stop()

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the bar away for a while, such as for another one."""
        was_transient, self.live.transient = self.live.transient, True
        self.stop()
        try:
            yield
        finally:
            self.live.transient = was_transient
            self.start()


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler


def figure_bar(console: Console, *columns: ProgressColumn, **options: Any) -> FigureBar:
    """Return a `FigureBar` with a description, a bar and then `columns`. A stream that is a file stays so."""
    bar = BarColumn(bar_width=BAR_WIDTH)
    options = {"redirect_stdout": sys.stdout.isatty(), "redirect_stderr": sys.stderr.isatty(), **options}
    return FigureBar(TextColumn("{task.description}"), bar, *columns, console=console, **options)


class Progress:
    """Shows the progress of a job inside `with`. `total` None: the amount of work is unknown; `counts` False
    shows a percentage instead of two numbers. `update` calls `figures` only when it shows them."""

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
            self._bar = self._started_bar()
        return self

    def _started_bar(self) -> FigureBar:
        bar = figure_bar(
            self._console,
            TextColumn("{task.fields[share]}"),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            transient=True,
            refresh_per_second=1 / BAR_SECONDS,
            get_time=self._clock,
        )
        self._task = bar.add_task(self._title, total=self._total, text="", share="", left="?")
        bar.start()
        return bar

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def seconds(self) -> float:
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
        with self._bar.hidden():
            yield


def remaining(done: int, total: int | None, seconds: float) -> str:
    """Return the time that the rest takes at the rate so far, as h:mm:ss, or ? while it is unknown."""
    if not done or total is None:
        return "?"
    return str(timedelta(seconds=round(seconds * max(0, total - done) / done)))
