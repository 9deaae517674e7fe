"""What `idlm-chat` shows: on a terminal coloured answers above a status line, else plain text.

Tokens that one forward pass emitted together have a colour, another one than the group before; single tokens
have none. A server that does not count the tokens of its chunks has a colour for each.
rich leaves colours out without a colour terminal and with NO_COLOR."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import termios
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

STYLES = ("cyan", "green", "yellow", "magenta")
REFRESHES_PER_SECOND = 12
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters that would let an answer command the terminal."""


class Chunk(NamedTuple):
    """What one pass emitted, and the passes and drafts of the answer so far; None is unknown."""

    text: str
    num_tokens: int | None = None
    num_forwards: int | None = None
    num_accepted: int | None = None
    num_tested: int | None = None


@dataclass(slots=True)
class AnswerFigures:
    num_tokens: int | None = 0
    num_pieces: int = 0
    last: Chunk = Chunk("")
    start: float = field(default_factory=time.perf_counter)
    seconds: float = math.inf

    @property
    def speed(self) -> float:
        """Tokens a second; 0 if they are not counted."""
        return (self.num_tokens or 0) / self.seconds

    def add(self, piece: Chunk) -> None:
        counted = self.num_tokens is not None and piece.num_tokens is not None
        self.num_tokens = (self.num_tokens or 0) + (piece.num_tokens or 0) if counted else None
        self.num_pieces += 1
        self.last, self.seconds = piece, time.perf_counter() - self.start

    def line(self) -> str:
        """The status line. Until a server reports how many passes there were, each piece counts as one."""
        if self.num_tokens is None:
            return f"{self.num_pieces} chunks  {self.num_pieces / self.seconds:.0f} chunks/s"
        num_forwards = self.last.num_forwards or self.num_pieces or 1
        parts = [f"{self.num_tokens} tokens", f"{self.num_tokens / num_forwards:.2f} tokens/forward"]
        if self.last.num_tested and self.last.num_accepted is not None:
            parts.append(f"acceptance {self.last.num_accepted / self.last.num_tested:.2f}")
        return "  ".join([*parts, f"{self.speed:.0f} tokens/s"])


class PlainView:
    """Text without colours: for pipes and files. Notes go to standard error."""

    is_terminal = False

    def __init__(self, *, has_stats: bool) -> None:
        self._has_stats = has_stats

    def read(self) -> str:
        # None: the command was started with standard input closed.
        line = "" if sys.stdin is None else sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def show(self, pieces: Iterable[Chunk]) -> Iterator[str]:
        """Show an answer as it comes; yields all of it so far after each piece."""
        self.figures, text = (figures := AnswerFigures()), ""
        try:
            for piece in pieces:
                figures.add(piece)
                text += piece.text
                shown = piece.text.translate(CONTROLS) if sys.stdout.isatty() else piece.text
                print(shown, end="", flush=True)
                yield text
        finally:
            if figures.num_pieces:
                print(flush=True)
        if self._has_stats:
            self.note(figures.line())

    def note(self, text: str, *, is_greeting: bool = False) -> None:
        if not is_greeting:
            print(text, file=sys.stderr)


class TerminalView:
    """A terminal. Whole lines of an answer are printed; the last line and the status are drawn anew."""

    is_terminal = True

    def __init__(self, console: Console, *, has_stats: bool) -> None:
        self._console, self._has_stats = console, has_stats
        with contextlib.suppress(ImportError):
            # Lines can be edited and recalled.
            import readline  # noqa: F401

    def read(self) -> str:
        return input("> ")

    def show(self, pieces: Iterable[Chunk]) -> Iterator[str]:
        self.figures, text, tail = (figures := AnswerFigures()), "", Text()
        console, styles = self._console, itertools.cycle(STYLES)
        try:
            with Live(
                console=console,
                transient=True,
                refresh_per_second=REFRESHES_PER_SECOND,
                redirect_stdout=False,
                redirect_stderr=False,
            ) as live:
                for piece in pieces:
                    figures.add(piece)
                    text += piece.text
                    is_group = piece.num_tokens is None or piece.num_tokens > 1
                    tail.append(piece.text.translate(CONTROLS), next(styles) if is_group else "")
                    *whole, tail = tail.wrap(console, console.width)
                    for line in whole:
                        console.print(line)
                    status = Text(figures.line() if self._has_stats else "", "dim")
                    live.update(Group(tail, status))
                    yield text
        finally:
            if figures.num_pieces:
                console.print(tail)
        if self._has_stats:
            console.print(Text(figures.line(), "dim"))

    def note(self, text: str, *, is_greeting: bool = False) -> None:
        self._console.print(Text(text, "dim"))


View = PlainView | TerminalView


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """What is typed meanwhile, on a terminal, does not appear within an answer, and is there at the next
    prompt."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    try:
        termios.tcsetattr(file, termios.TCSADRAIN, quiet)
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def make_view(*, has_stats: bool) -> View:
    if sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalView(Console(highlight=False), has_stats=has_stats)
    return PlainView(has_stats=has_stats)
