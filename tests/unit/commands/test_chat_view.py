"""What `idlm-chat` shows on a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import sys
import termios
from collections.abc import Iterator

import pytest
from rich.console import Console

from idlm.cli.command import Terminated
from idlm.infer.clients.answers import Chunk
from idlm.infer.clients.view import AnswerFigures, PlainView, TerminalView, unechoed

CURSOR = re.compile(r"\x1b\[(\?25[lh]|\d*A|2K|\d*[GK])|\r")
COLOUR = re.compile(r"\x1b\[(3\d)m([^\x1b]*)")
PIECES = [
    Chunk("Lea has", 2, None, 1, 2),
    Chunk(" 9", 1),
    Chunk(" shells", 3),
    Chunk(".\nTom\x1b[2J", 4, 5, 7, 8),
]


def shown(*, has_stats: bool = True, width: int = 70, **options: object) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, highlight=False, **options)  # type: ignore[arg-type]
    last = [*TerminalView(console, has_stats=has_stats).show(PIECES)][-1]
    assert last == "".join(piece.text for piece in PIECES)
    return out.getvalue()


def test_tokens_of_one_pass_have_one_colour() -> None:
    text = shown(color_system="standard")
    final = text[text.rindex("Lea") - 5 :]
    colours = {part.strip(): colour for colour, part in COLOUR.findall(final)}
    assert len({colours["Lea has"], colours["shells"], colours["."]}) == 3
    assert "9" not in colours, "a single token has no colour"
    assert "\x1b[2J" not in text, "an answer does not command the terminal"
    assert "10 tokens  2.00 tokens/forward  acceptance 0.88" in text


@pytest.mark.parametrize("options", [{"color_system": None}, {"no_color": True, "color_system": "standard"}])
def test_no_colours_where_none_are_wanted(options: dict[str, object]) -> None:
    assert not COLOUR.search(shown(**options))


def test_long_lines_wrap_and_nothing_is_lost() -> None:
    text = CURSOR.sub("\n", shown(width=8, color_system=None, has_stats=False))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert lines[-1].startswith("Tom") and "shells." in lines
    assert "tokens" not in text


def test_a_pipe_has_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    list(PlainView(has_stats=True).show(PIECES))
    captured = capsys.readouterr()
    assert captured.out == "Lea has 9 shells.\nTom\x1b[2J\n"
    assert "2.00 tokens/forward" in captured.err
    list(PlainView(has_stats=False).show([]))
    assert capsys.readouterr() == ("", "")


def test_a_server_that_counts_nothing_shows_chunks() -> None:
    figures = AnswerFigures()
    for piece in (Chunk("a"), Chunk("b")):
        figures.add(piece)
    assert figures.line().startswith("2 chunks")


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of a terminal that is the standard input."""
    other, own = pty.openpty()
    with os.fdopen(own) as file:
        monkeypatch.setattr(sys, "stdin", file)
        yield other
    os.close(other)


def echoes() -> bool:
    return bool(termios.tcgetattr(sys.stdin)[3] & termios.ECHO)


def test_what_is_typed_during_an_answer_waits_for_the_prompt(keyboard: int) -> None:
    with unechoed():
        os.write(keyboard, b"next turn\n")
        assert sys.stdin.readline() == "next turn\n"
        assert not select.select([keyboard], [], [], 0)[0], "the terminal shows nothing of it"
    os.write(keyboard, b"a\n")
    assert os.read(keyboard, 9).startswith(b"a")


@pytest.mark.usefixtures("keyboard")
@pytest.mark.parametrize("error", [KeyboardInterrupt, Terminated, ValueError])
def test_the_terminal_echoes_again_whatever_ends_an_answer(error: type[BaseException]) -> None:
    assert echoes()
    with contextlib.suppress(error), unechoed():
        assert not echoes()
        raise error
    assert echoes()


def test_input_that_is_no_terminal_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin in (None, io.StringIO("a\n")):
        monkeypatch.setattr(sys, "stdin", stdin)
        with unechoed():
            pass
