"""OpenAI's interface from the side of a client: requests, streams, what is wrong when there is no answer, and
the answers of a conversation and of a load.

Needs httpx (extra `serve`). Requests carry only what differs from `SamplingParams()`, so that the defaults of
a server hold and servers without our extensions understand them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Generator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from idlm.config.project import install_command
from idlm.config.schema import changed
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import KEY_VARIABLE
from idlm.infer.clients.loads import Job, Load, OnDone, Record
from idlm.infer.clients.view import Chunk

try:
    import httpx
    import httpx_sse
except ModuleNotFoundError as error:
    raise UserError(
        "IDLM-0704",
        f"url= needs the package {error.name}",
        fix=f"install the extra serve: {install_command('serve')}",
    ) from error

CONNECT_SECONDS = 10.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NOT_SENT = ("n", "logprobs")
CHUNK_COUNTS = ("idlm", "vllm", "sglang")
"""Owners of models whose servers count the tokens of every chunk (`continuous_usage_stats`)."""


class RequestFailure(Exception):
    """A request without a whole answer; `status` is that of HTTP, or 0 if there was none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def no_answer(error: Exception) -> UserError:
    return UserError(
        "IDLM-0709",
        f"the server gives no answer: {error}",
        fix="correct the request or the settings that it names; /reset ends a conversation too long",
    )


class Server:
    """A server at `url`, and one of its models: `model`, or its first. Raises UserError IDLM-0707 if there is
    no server, IDLM-0708 if it refuses to list its models."""

    def __init__(
        self, url: str, *, api_key: str | None = None, model: str | None = None, timeout: float = 600.0
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        # The variable may hold all keys of a server.
        key = api_key or os.environ.get(KEY_VARIABLE, "").partition(",")[0].strip()
        self.address, self.timeout = urlsplit(base).netloc or base, timeout
        # A proxy of the environment does not lead to this machine.
        trusts = urlsplit(base).hostname not in LOOPBACK
        self._options: dict[str, Any] = {
            "base_url": f"{base}/v1",
            "headers": {"authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            # Loaded once for all clients, which takes longer than a request.
            "verify": httpx.create_ssl_context(trust_env=trusts),
            "trust_env": trusts,
        }
        try:
            with self.client() as client:
                models = _content(client.get("/models"))["data"]
                owners = {each["id"]: each.get("owned_by") for each in models}
                self.model = model or next(iter(owners))
                self.owner = owners.get(self.model)
                is_ours = self.owner == "idlm"
                self.info: dict[str, Any] = _content(client.get(f"{base}/model_info")) if is_ours else {}
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                "IDLM-0707",
                f"no server answers at {url}: {error}",
                fix="start one (idlm-serve model=PATH port=8000), or correct url=http://HOST:PORT",
            ) from error
        except (RequestFailure, LookupError, TypeError, AttributeError, StopIteration) as error:
            raise UserError(
                "IDLM-0708",
                f"the server at {url} does not list its models: {error}",
                fix="check url=, which leads to OpenAI's interface, and the key in IDLM_API_KEY",
            ) from error

    def client(self) -> httpx.Client:
        return httpx.Client(**self._options)

    def async_client(self) -> httpx.AsyncClient:
        """A client of one event loop, with as many connections as requests."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(**self._options, limits=limits)

    def chat_body(self, messages: Any, params: SamplingParams, always: Collection[str]) -> dict[str, Any]:
        """A streamed conversation, with the tokens of each chunk where the server counts them."""
        options = {"include_usage": True}
        if self.owner in CHUNK_COUNTS:
            options["continuous_usage_stats"] = True
        body = {"model": self.model, "messages": messages, **sampling_fields(params, always)}
        return body | {"stream": True, "stream_options": options}

    def load_body(self, job: Job) -> tuple[str, dict[str, Any]]:
        """Path and body of a streamed request: a completion of token ids, or a chat."""
        one = [{"role": "user", "content": job.prompt}] if isinstance(job.prompt, str) else job.turns
        prompt: dict[str, Any] = {"messages": one} if one else {"prompt": job.prompt}
        # Seeds cost vLLM a random generator for each request; ours take none more.
        params = job.params if self.owner == "idlm" else dataclasses.replace(job.params, seed=None)
        body = {"model": self.model, **prompt, **sampling_fields(params)}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return "/chat/completions" if "messages" in prompt else "/completions", body

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer. Raises UserError IDLM-0709 without one."""
        try:
            with self.client() as client:
                return _content(client.post(path, json=body))
        except (RequestFailure, httpx.HTTPError) as error:
            raise no_answer(error) from error

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The chunks of an answer. Raises RequestFailure, httpx.HTTPError. Closing it aborts the request."""
        with self.client() as client, client.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                _content(response)
            reader = ChunkReader()
            for event in httpx_sse.EventSource(response).iter_sse():
                if (chunk := reader.read(event.data)) is not None:
                    yield chunk
            reader.check_end()


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            _content(response)
        reader = ChunkReader()
        async for event in httpx_sse.EventSource(response).aiter_sse():
            if (chunk := reader.read(event.data)) is not None:
                yield chunk
        reader.check_end()


class ChunkReader:
    def __init__(self) -> None:
        self._is_done = False

    def read(self, data: str) -> dict[str, Any] | None:
        """The chunk of an event; None for events without one. Raises RequestFailure for an error."""
        if not data or data == "[DONE]":
            self._is_done |= bool(data)
            return None
        try:
            chunk: Any = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise RequestFailure(0, _message(chunk) or f"the stream holds {data[:80]!r}")
        self._is_done |= any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
        return chunk

    def check_end(self) -> None:
        """Raise RequestFailure if neither [DONE], which some servers leave out, nor an end has come."""
        if not self._is_done:
            raise RequestFailure(0, "the stream ended without [DONE]")


def sampling_fields(params: SamplingParams, always: Collection[str] = ()) -> dict[str, Any]:
    """The settings that a request names: those that are not the default, and `always`."""
    fields = changed(params, SamplingParams()) | {name: getattr(params, name) for name in always}
    return {name: value for name, value in fields.items() if value is not None and name not in NOT_SENT}


def draft_counts(usage: dict[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Forward passes, accepted and tested drafts of an answer; None where the server does not report them."""
    details = usage.get("completion_tokens_details") or {}
    accepted, rejected = (details.get(f"{name}_prediction_tokens") for name in ("accepted", "rejected"))
    num_forwards = usage.get("num_forwards") or None
    if num_forwards is None or accepted is None or rejected is None:
        return num_forwards, None, None
    return num_forwards, accepted, accepted + rejected


def _content(response: httpx.Response) -> dict[str, Any]:
    """The object of an answer. Raises RequestFailure with the server's words for any status but 200."""
    try:
        content: Any = response.json()
    except ValueError:
        content = None
    if response.status_code != httpx.codes.OK or not isinstance(content, dict):
        words = _message(content) or response.text[:200] or response.reason_phrase
        raise RequestFailure(response.status_code, f"status {response.status_code}: {words}")
    return content


def _message(content: Any) -> str:
    error = content.get("error", content) if isinstance(content, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "")


class ServerAnswerer:
    def __init__(self, server: Server) -> None:
        self._server, self.name = server, f"{server.model} at {server.address}"

    def check_system(self, system: str | None) -> None:
        """Do nothing: the server refuses it with the turn."""

    def answer(
        self, messages: list[dict[str, str]], params: SamplingParams, always: Collection[str]
    ) -> Generator[Chunk]:
        """See `EngineAnswerer`. Raises UserError IDLM-0709 for what the server refuses."""
        body, num_tokens, is_empty = self._server.chat_body(messages, params, always), 0, True
        try:
            with closing(self._server.stream("/chat/completions", body)) as chunks:
                for chunk in chunks:
                    usage = chunk.get("usage") or {}
                    # Chunks of other servers may lack choices or deltas, or have null.
                    deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
                    text = "".join(delta.get("content") or "" for delta in deltas)
                    total = usage.get("completion_tokens")
                    is_empty = is_empty and not text
                    if text or total is not None:
                        yield Chunk(text, None if total is None else total - num_tokens, *draft_counts(usage))
                        num_tokens = num_tokens if total is None else total
        except (RequestFailure, httpx.HTTPError, LookupError, TypeError, AttributeError) as error:
            raise no_answer(error) from error
        if is_empty and num_tokens > 1:
            raise no_answer(LookupError("the answer is reasoning alone: raise max_tokens"))


def run_on_server(server: Server, load: Load, *, on_done: OnDone = lambda _: None) -> list[Record]:
    return asyncio.run(_run_on_server(server, load, on_done))


async def _run_on_server(server: Server, load: Load, on_done: OnDone) -> list[Record]:
    records: dict[int, Record] = {}
    waiting, start = deque(enumerate(load.jobs)), time.perf_counter()

    async def answer(client: httpx.AsyncClient, number: int, job: Job) -> None:
        records[number] = await _answer(server, client, job)
        on_done(len(records))

    async def work() -> None:
        # A client each, because httpx looks at all connections of a client for each request.
        async with server.async_client() as client:
            while waiting:
                await answer(client, *waiting.popleft())

    async def arrive(client: httpx.AsyncClient, number: int, job: Job) -> None:
        await asyncio.sleep(start + load.arrivals[number] - time.perf_counter())
        await answer(client, number, job)

    async with server.async_client() as client, asyncio.TaskGroup() as group:
        if load.concurrency is None:
            for number, job in waiting:
                group.create_task(arrive(client, number, job))
        else:
            for _ in range(min(load.concurrency, len(waiting))):
                group.create_task(work())
    return [records[number] for number in range(len(load.jobs))]


async def _answer(server: Server, client: httpx.AsyncClient, job: Job) -> Record:
    path, body = server.load_body(job)
    record, usage = Record(time.perf_counter()), dict[str, Any]()
    try:
        async with asyncio.timeout(server.timeout):
            async for chunk in stream(client, path, body):
                if any(_has_tokens(choice) for choice in chunk.get("choices") or ()):
                    record.times.append(time.perf_counter())
                usage = chunk.get("usage") or usage
        _count(record, usage)
    except RequestFailure as failure:
        record.error, record.error_code = str(failure), failure.status
    except TimeoutError:
        record.error = f"no whole answer after {server.timeout:g} s"
    except (httpx.HTTPError, LookupError, TypeError, AttributeError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.end = time.perf_counter()
    return record


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether a choice of a chunk has tokens; a chat's first chunk may hold a role alone."""
    delta = choice.get("delta") or {}
    kinds = ("content", "reasoning_content", "reasoning", "tool_calls")
    return "text" in choice or any(map(delta.get, kinds))


def _count(record: Record, usage: dict[str, Any]) -> None:
    """Fill in what the server counted. Raises RequestFailure without it."""
    if not usage.get("completion_tokens"):
        problem = "the stream has no usage, or no tokens: stream_options.include_usage is needed"
        raise RequestFailure(0, problem)
    record.num_input_tokens = usage.get("prompt_tokens") or 0
    record.num_output_tokens = usage["completion_tokens"]
    record.num_forwards, record.num_accepted, record.num_tested = draft_counts(usage)
