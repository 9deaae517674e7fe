"""How `idlm-chat` and `idlm-bench` read streams of servers, ours and others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.clients.answers import ServerAnswerer
from idlm.infer.clients.generator import run_on_server
from idlm.infer.clients.http import Server, stream
from idlm.infer.clients.loads import Job, Load

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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (sent(delta("hi"), end=""), "without .DONE."),
        (sent({"error": {"message": "engine lost"}}), "engine lost"),
        (sent({"error": "engine lost"}), "engine lost"),
        (sent([1]), "the stream holds"),
    ],
)
def test_a_stream_that_fails_is_no_answer(content: bytes, words: str) -> None:
    with pytest.raises(UserError, match=words):
        answer(content)


def test_an_answer_that_is_no_stream_is_refused() -> None:
    with pytest.raises(UserError, match="text/event-stream"):
        answer(b"{}", kind="application/json")


def test_a_task_reads_the_same_chunks() -> None:
    async def read() -> list[Any]:
        async with ScriptedServer(sent(delta("a\u2028b"))).async_client() as client:
            return [chunk async for chunk in stream(client, "/chat/completions", {})]

    assert asyncio.run(read()) == [delta("a\u2028b")]
