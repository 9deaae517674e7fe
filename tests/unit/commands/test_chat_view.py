"""How `idlm-chat` and `idlm-bench` read streams of servers, ours and others, and what `idlm-chat` shows of
them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import sys
import termios
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from idlm.cli.command import Terminated
from idlm.contracts import SamplingParams
from idlm.infer.clients.http import Server, ServerAnswerer, run_on_server
from idlm.infer.clients.loads import Job, Load
from idlm.infer.clients.view import Chunk, PlainView, TerminalView, unechoed
from tests.errors import refused

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


USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
MESSAGES = [{"role": "user", "content": "hello"}]


class ScriptedServer(Server):
    """Answers each request with these bytes."""

    def __init__(self, content: bytes, kind: str = "text/event-stream") -> None:
        response = {"headers": {"content-type": kind}, "content": content}
        transport = httpx.MockTransport(lambda _: httpx.Response(200, **response))  # type: ignore[arg-type]
        self._options = {"base_url": "http://server/v1", "transport": transport}
        self.model, self.owner, self.address, self.timeout = "m", None, "server", 10.0


def sent(*chunks: Any, end: str = "data: [DONE]\n\n", line: str = "\n") -> bytes:
    lines = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks)
    return (lines + end).replace("\n", line).encode()


def delta(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": None if text is None else {"content": text}}], **fields}


def answer(content: bytes, **options: str) -> str:
    pieces = ServerAnswerer(ScriptedServer(content, **options)).answer(MESSAGES, SamplingParams(), ())
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize(
    "text", ["a\u2028b", "a\u2029b", "a\x85b", "a\x0b\x0c\x1c\x1d\x1eb", "data: é\n\nb"], ids=ascii
)
def test_only_line_feeds_and_carriage_returns_end_lines(text: str) -> None:
    for line in ("\n", "\r\n", "\r"):
        assert answer(sent(delta(text), line=line)) == text


@pytest.mark.parametrize(
    "chunks",
    [
        (delta("hi", error=None),),
        (delta("hi"), delta(None)),
        ({"type": "ping"}, delta("hi")),
        (delta("hi"), {"choices": None, "usage": USAGE}),
        (delta("hi"), {"choices": [], "usage": USAGE}),
        (delta("hi", usage=None),),
        ({"choices": [{"index": 0}]}, delta("hi")),
    ],
    ids=str,
)
def test_chunks_of_other_servers_may_lack_what_ours_have(chunks: tuple[Any, ...]) -> None:
    assert answer(b": comment\n\nevent: message\nid: 7\n" + sent(*chunks)) == "hi"
    load = Load("load", [Job("hello", SamplingParams())], concurrency=1)
    [record] = run_on_server(ScriptedServer(sent(*chunks, {"usage": USAGE})), load)
    assert (record.error, record.num_output_tokens, len(record.times)) == (None, 2, 1)


def test_a_finish_reason_ends_a_stream_without_done() -> None:
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE}
    assert answer(sent(delta("hi"), last, end="")) == "hi"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (sent({"choices": ["hi"]}), "no attribute"),
        (sent(delta("hi"), end=""), "without .DONE."),
        (sent({"error": {"message": "engine lost"}}), "engine lost"),
        (sent({"error": "engine lost"}), "engine lost"),
        (sent([1]), "the stream holds"),
    ],
)
def test_a_stream_that_fails_is_no_answer(content: bytes, words: str) -> None:
    refused(words, answer, content)


def test_an_answer_that_is_no_stream_is_refused() -> None:
    refused("text/event-stream", answer, b"{}", kind="application/json")
