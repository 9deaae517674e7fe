"""How events become parts of a stream: at once where the client reads; nothing is lost where it does not."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from idlm.contracts import SamplingParams
from idlm.infer.server.app import EventStream, connected
from idlm.infer.server.engine_client import Generation
from idlm.infer.server.guard import TimedProtocol
from idlm.infer.server.messages import AnswerEvent, SampleCounts
from idlm.infer.server.metrics import Metrics
from idlm.infer.server.parsers import AnswerParser
from idlm.infer.server.protocol.requests import ChatRequest, CompletionRequest
from idlm.infer.server.replies.choices import ChatReply, CompletionReply, Reply, Shown, TokenTexts
from idlm.text.calls import FORMATS
from tests.integration.server.servers import PROMPT, Running, running

pytestmark = pytest.mark.sweep

FIGURES = SampleCounts("length", 1, 3, 0, 3, [], [], "exact")
TEXTS = [
    "a",
    ' "quoted" \\',
    "\n\u2028\u2029\x85",
    "\u00e4\u6f22\U0001f600",
    "",
    "\ud800",
    "data: [DONE]\n\n",
    "</think>",
]


class StubClient:
    def forget(self, request_id: str) -> None:
        """Nothing is open."""

    abort = forget


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("max_length=400") as found:
        yield found


def new_generation() -> Generation:
    return Generation(StubClient(), Metrics("x"), {"0-0": [1]}, SamplingParams())  # type: ignore[arg-type]


def new_reply(kind: str, generation: Generation, **fields: Any) -> Reply:
    given = FORMATS["hermes"] if "tools" in fields else None
    shown = Shown("tiny", TokenTexts(None), lambda: AnswerParser(calls=given))
    if kind == "chat":
        chat = ChatRequest(messages=[{"role": "user", "content": "x"}], **fields)  # type: ignore[list-item]
        return ChatReply(chat, generation, shown)
    return CompletionReply(CompletionRequest(prompt=[1], **fields), generation, shown)


def content(chunks: bytes) -> list[dict[str, Any]]:
    """The objects of chunks."""
    parts = chunks.decode().split("\n\n")
    assert parts.pop() == ""
    # Clients that split text by lines, as with httpx's `iter_lines`, see the same events.
    assert chunks.decode().splitlines() == chunks.decode().split("\n")[:-1]
    return [json.loads(part.removeprefix("data: ")) for part in parts if part != "data: [DONE]"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_chunks_that_are_spliced_hold_the_whole_object(kind: str) -> None:
    events = [AnswerEvent("0-0", 0, [5], text) for text in TEXTS]
    reply = new_reply(kind, new_generation(), stream_options={"continuous_usage_stats": True})
    chunks = [chunk for event in events for chunk in content(reply.chunks(0, event))]
    fields = ["id", "created", "model", "system_fingerprint", "object", "choices", "usage"]
    assert all(list(chunk) == fields for chunk in chunks)
    assert all({**chunk, **reply._head} == chunk for chunk in chunks)
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [each["delta"]["content"] if kind == "chat" else each["text"] for each in deltas]
    assert "".join(texts) == "".join(TEXTS)


@pytest.mark.parametrize("seed", range(2))
def test_events_keep_their_order_whether_the_client_can_take_them_or_not(seed: int) -> None:
    """A writer that is free now and then, and a reader that is slow now and then."""
    rng = random.Random(seed)

    async def read() -> tuple[bytes, int]:
        generation, sent, num_pushed = new_generation(), [], 0
        options = {"include_passes": True}
        reply = new_reply("completion", generation, stream=True, stream_options=options)

        def sink(index: int, event: AnswerEvent) -> bool:
            nonlocal num_pushed
            if rng.random() < 0.4:
                return False
            sent.append(reply.chunks(index, event))
            num_pushed += 1
            return True

        async def stream() -> None:
            async for chunks in reply.stream():
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
                sent.append(chunks)

        generation.sink = sink
        task = asyncio.create_task(stream())
        for number in range(100):
            figures = FIGURES if number == 99 else None
            event = AnswerEvent("0-0", 0, [5], f"{number},", [], figures, passes=[[1, 0, number]])
            generation.put(event)
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        await task
        return b"".join(sent), num_pushed

    chunks, num_pushed = asyncio.run(read())
    assert num_pushed > 5
    choices = [choice for chunk in content(chunks) for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "".join(f"{number}," for number in range(100))
    # Events that become one chunk leave their passes apart.
    assert [one["tested"] for choice in choices for one in choice["passes"]] == [*range(100)]


@pytest.mark.parametrize(("version", "is_chunked"), [("1.0", False), ("1.1", True)])
def test_a_stream_is_framed_for_the_clients_version_of_http(
    server: Running, version: str, is_chunked: bool
) -> None:
    sent = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "temperature": 0}
    whole = server.completion(**sent)["choices"][0]["text"]
    body = json.dumps({**sent, "stream": True}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        data = b"".join(iter(lambda: connection.recv(1000), b""))
    answer_head, _, rest = data.partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in answer_head.lower()) == is_chunked
    if is_chunked:
        rest = unchunked(rest)
    assert rest.endswith(b"data: [DONE]\n\n")
    assert "".join(choice["text"] for chunk in content(rest) for choice in chunk["choices"]) == whole


async def serve_one(app: ASGIApp) -> weakref.ref[TimedProtocol]:
    """Answer one request with `app`; the connection, which is closed."""
    config = uvicorn.Config(app, http=TimedProtocol, ws="none", lifespan="off", log_config=None)
    made: list[weakref.ref[TimedProtocol]] = []

    def new_protocol() -> TimedProtocol:
        protocol = TimedProtocol(config, ServerState(), {})
        made.append(weakref.ref(protocol))
        return protocol

    listener = await asyncio.get_running_loop().create_server(new_protocol, "127.0.0.1", 0)
    async with listener:
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname()[:2])
        writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        await reader.read()
        writer.close()
        await writer.wait_closed()
    for _ in range(5):
        await asyncio.sleep(0)
    return made[0]


def test_a_connection_that_closes_cancels_its_request_once(caplog: pytest.LogCaptureFixture) -> None:
    """It closes before the stream begins, and is lost a turn of the event loop later."""
    left: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request, generation = Request(scope), new_generation()
        request.state.protocol.transport.close()
        stream = EventStream(new_reply("completion", generation), generation, request)
        await stream(scope, receive, send)
        left.append((request.state.protocol.on_lost, generation.num_open, generation.sink))
        for _ in range(3):
            await asyncio.sleep(0)
        left.append("not cancelled")

    asyncio.run(serve_one(app))
    assert left == [(None, 0, None), "not cancelled"]
    assert not caplog.records


def test_a_connection_that_ends_is_freed_without_garbage_collection() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with connected(Request(scope)):
            await Response()(scope, receive, send)

    gc.disable()
    try:
        assert asyncio.run(serve_one(app))() is None
    finally:
        gc.enable()


def unchunked(data: bytes) -> bytes:
    """The body of chunked transfer coding, which must be whole."""
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        assert data[length : length + 2] == b"\r\n"
        if not length:
            assert data == b"\r\n"
            return body
        body, data = body + data[:length], data[length + 2 :]
