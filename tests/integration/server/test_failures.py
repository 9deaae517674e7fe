"""What happens when clients leave, the queue is full, the engine dies, and the server is asked to end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import serve_soak
from idlm.cli import command
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments
from idlm.infer.request import ANONYMOUS
from idlm.infer.server import engine_client, engine_process
from idlm.infer.server.engine_client import EngineClient, Generation
from idlm.infer.server.errors import RETRY_SECONDS, ApiError
from idlm.infer.server.messages import AnswerEvent, EngineInfo, SampleCounts, pack, unpacker
from idlm.infer.server.metrics import Metrics
from idlm.text.tokenizer import encode_prompt
from tests.contracts.engines import clear_answers
from tests.integration.server.servers import (
    PATIENCE,
    PROMPT,
    Running,
    checkpoint,
    commanded,
    events,
    reference,
    running,
)

pytestmark = pytest.mark.sweep

KEY = "a-key-of-this-test"
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
"""A request that takes seconds: it is under way while a test looks."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("max_waiting=2", "max_length=2000", api_key=KEY) as found:
        yield found


def is_running(server: Running, num: int) -> bool:
    return server.metric("vllm:num_requests_running") == num


def test_a_client_that_leaves_a_stream_frees_its_pages(server: Running) -> None:
    with server.client.stream("POST", "/v1/completions", json={**LONG, "n": 2, "stream": True}) as response:
        lines = response.iter_lines()  # kept: the connection closes when the last reference to it goes
        next(lines)
        server.wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") > 0)
    server.wait_until_idle()
    assert server.metric("vllm:request_success_total", finished_reason="abort") == 2
    assert server.metric("vllm:generation_tokens_total") < 2 * LONG["max_tokens"]


@pytest.mark.parametrize("padding", [0, 200_000])
def test_a_client_that_leaves_before_the_answer_frees_its_pages(server: Running, padding: int) -> None:
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        body = b'{"prompt": "Lea has 3 hats.", "max_tokens": 1900, "ignore_eos": true}' + b" " * padding
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        server.wait_until(lambda: is_running(server, 1))
    server.wait_until_idle()
    assert server.metric("vllm:request_success_total", finished_reason="abort") == before + 1


def test_survivors_of_many_disconnects_have_the_text_of_a_quiet_run(server: Running) -> None:
    """Every third stream is left at some chunk; what the others read does not change."""
    streams = [
        serve_soak.Stream(
            f"Tom has {number} pens. Tom finds 3.", number, 24, None if number % 3 else 1 + number // 3
        )
        for number in range(12)
    ]
    params = [SamplingParams(seed=stream.seed, max_tokens=stream.answer) for stream in streams]
    ids = [encode_prompt(reference().tokenizer, stream.prompt, template="none") for stream in streams]
    quiet = [done.text for done in clear_answers(reference(), ids, params)]
    num_tasks = server.num_tasks
    port = int(server.url.rpartition(":")[2])
    found = asyncio.run(serve_soak.read_streams(port, streams, concurrency=4, api_key=KEY))
    assert found == [text if number % 3 else None for number, text in enumerate(quiet)]
    server.wait_until_idle()
    server.wait_until(lambda: server.num_tasks <= num_tasks)


def test_a_full_queue_answers_429_with_retry_after(server: Running) -> None:
    with server.client.stream("POST", "/v1/completions", json={**LONG, "n": 6, "stream": True}):
        response = server.client.post("/v1/completions", json={"prompt": PROMPT})
        assert (response.status_code, response.headers["retry-after"]) == (429, str(RETRY_SECONDS))
        assert response.json()["error"]["type"] == "rate_limit_error"
    server.wait_until_idle()
    assert server.completion(prompt=PROMPT, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_killed_engine_fails_its_requests_and_is_started_again(server: Running) -> None:
    before = server.completion(prompt=PROMPT, temperature=0, max_tokens=6)["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.client.post, "/v1/completions", json=LONG)
        with server.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.wait_until(lambda: is_running(server, 2))
            os.kill(server.client.get("/server_info").json()["engine"]["pid"], signal.SIGKILL)
            rest = [line for line in lines if line]
        assert '"code":"engine_lost"' in rest[-1] and "[DONE]" not in rest[-1]
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "engine_lost")
    refused = server.client.post("/v1/completions", json={"prompt": PROMPT})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, str(RETRY_SECONDS))
    assert server.client.get("/health").status_code == 200, "the front end stays"
    assert server.client.get("/ready").status_code == 503
    assert server.metric("idlm:engine_restarts_total") == 1
    assert not server.metric("vllm:kv_cache_usage_perc")
    server.wait_until_ready()
    assert server.completion(prompt=PROMPT, temperature=0, max_tokens=6)["choices"][0]["text"] == before


def test_the_command_drains_and_exits_with_status_0() -> None:
    """A stream that began before SIGTERM ends in [DONE]; requests after it are refused."""
    words = (f"model={checkpoint()}", "max_length=1500")
    with commanded(*words, api_key=KEY) as (server, process):
        with server.client.stream(
            "POST", "/v1/completions", json={**LONG, "max_tokens": 250, "stream": True}
        ) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            server.wait_until(lambda: server.client.get("/ready").json()["status"] == "draining")
            refused = server.client.post("/v1/completions", json={"prompt": PROMPT})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, str(RETRY_SECONDS))
            assert list(events(lines))[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(PATIENCE) == 0


def test_a_server_that_ends_while_it_starts_an_engine_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "PROGRAM", ("-c", "import time; time.sleep(1000)"))
    arguments = EngineArguments(model="", decoder="", settings={}, options={})
    client = EngineClient(arguments, Metrics("x"))
    start = asyncio.create_subprocess_exec
    processes = []

    async def start_and_close(*words: Any, **options: Any) -> Any:
        processes.append(await start(*words, **options))
        await client.close()
        return processes[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_close)
    asyncio.run(asyncio.wait_for(client.run(), PATIENCE))
    assert [process.returncode for process in processes] == [-signal.SIGKILL]
    assert client.state == "stopped"


READY = EngineInfo(
    stride=3,
    **dict.fromkeys(("directory", "decoder", "exactness"), ""),
    **dict.fromkeys(("max_length", "vocab_size", "num_pages", "page_size", "pid"), 0),
    decoder_options={},
    settings={},
)
DEAF = f"""
import socket, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
connection.recv(1 << 16)
connection.sendall({pack({"type": "ready", **dataclasses.asdict(READY)})!r})
time.sleep(1000)
"""
"""An engine process that is ready, and then hangs."""


@contextlib.asynccontextmanager
async def deaf_engine(
    monkeypatch: pytest.MonkeyPatch, *, timeout: float = PATIENCE
) -> AsyncIterator[EngineClient]:
    """The client of an engine that is ready and hangs; at the end it has ended."""
    monkeypatch.setattr(engine_client, "PROGRAM", ("-c", DEAF))
    monkeypatch.setattr(engine_client, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(engine_client, "STOP_SECONDS", 0.2)
    arguments = EngineArguments(model="", decoder="", settings={}, options={})
    client = EngineClient(arguments, Metrics("x"), timeout=timeout)
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        tasks.create_task(client.run())
        await until_ready(client)
        yield client
        await client.close()
    assert client.state == "stopped"


async def until_ready(client: EngineClient) -> None:
    """Wait for an engine; `deaf_engine` limits it."""
    while client.state != "ready":
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("leaves", [False, True], ids=["waits", "leaves"])
def test_an_engine_that_hangs_is_started_again(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    """Also when the client of the only request has left: the engine owes an answer to its abort."""

    async def run() -> None:
        async with deaf_engine(monkeypatch, timeout=0.2) as client:
            await asyncio.sleep(0.5)
            assert client.num_restarts == 0, "an idle engine has nothing to say"
            request = asyncio.create_task(client.generate([[1]], SamplingParams()))
            if leaves:
                await asyncio.sleep(0)
                request.cancel()
            with pytest.raises(asyncio.CancelledError if leaves else ApiError) as failure:
                await request
            assert leaves or (failure.value.status, failure.value.code) == (503, "engine_lost")
            while not client.num_restarts:
                await asyncio.sleep(0.01)
            await until_ready(client)

    asyncio.run(run())


def test_an_engine_process_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*words: Any, **options: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    arguments = EngineArguments(model="", decoder="", settings={}, options={})
    with pytest.raises(UserError, match="IDLM-0701: .*no more processes"):
        asyncio.run(asyncio.wait_for(EngineClient(arguments, Metrics("x")).run(), PATIENCE))


def test_an_engine_reads_from_a_descriptor_with_a_large_number() -> None:
    """A front end with many clients hands one on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD, 1024)) as large:
        inbox = engine_process.Inbox(large)
        assert inbox.take(0) == []
        ours.sendall(pack({"type": "abort", "id": "0-0"}))
        assert inbox.take(None) == [{"type": "abort", "id": "0-0"}]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_whose_server_is_gone_when_it_is_ready_ends(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    closed: list[bool] = []
    engine: Any = SimpleNamespace(close=lambda: closed.append(True), begin_grammar=lambda params: None)

    def load(self: Any) -> Any:
        ours.close()
        if fails:
            raise UserError("IDLM-0203", "no model", fix="none")
        return engine

    monkeypatch.setattr(EngineArguments, "load", load)
    monkeypatch.setattr(engine_process, "engine_info", lambda _: READY)
    monkeypatch.setattr(engine_process.gc, "freeze", lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start = {"type": "start", "model": "", "decoder": None, "settings": {}, "options": {}}
        ours.sendall(pack(start))
        assert engine_process.run(theirs) == (command.USER_ERROR_STATUS if fails else 0)
    assert closed == ([] if fails else [True])


class StubClient:
    """A client of an engine that is not there."""

    def forget(self, request_id: str) -> None:
        """Take note of nothing."""

    abort = forget


def test_a_mistake_of_ours_while_a_request_is_queued_costs_only_that_request() -> None:
    class Faulty:
        def begin_grammar(self, params: SamplingParams) -> None:
            """None is needed."""

        def add_request(self, *arguments: Any, **options: Any) -> None:
            raise TypeError("a secret")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine: Any = Faulty()
        loop = engine_process.EngineLoop(engine, engine_process.Inbox(theirs), theirs)
        loop._handle({"type": "add", "id": "0-0", "prompt_ids": [1], "params": {}, "turn": ANONYMOUS})
        messages = unpacker()
        messages.feed(ours.recv(1000))
    [answer] = messages
    assert (answer["type"], answer["message"]) == ("refused", "")
    generation = Generation(StubClient(), Metrics("x"), {"0-0": [1]}, SamplingParams())  # type: ignore[arg-type]
    generation.put_answer(answer)
    with pytest.raises(ApiError) as refusal:
        asyncio.run(generation.wait_until_added())
    assert refusal.value.status == 500 and "secret" not in refusal.value.message


@pytest.mark.parametrize(("code", "status"), [("IDLM-0448", 503), ("IDLM-0457", 500)])
def test_an_answer_that_the_engine_fails_is_an_error(code: str, status: int) -> None:
    figures = SampleCounts("error", 1, 1, 0, 1, [], [], "exact")

    async def read() -> list[int]:
        generation = Generation(StubClient(), Metrics("x"), {"0-0": [1]}, SamplingParams())  # type: ignore[arg-type]
        generation.put(AnswerEvent("0-0", 0, [5], "a", [], None, None, []))
        generation.put(AnswerEvent("0-0", 0, [], "", [], figures, (code, "what", "fix"), []))
        found = []
        with pytest.raises(ApiError) as failure:
            async for _, event in generation:
                found += event.token_ids
        assert (failure.value.status, failure.value.code) == (status, code)
        return found

    assert asyncio.run(read()) == [5]
