"""OpenAI's interface from the side of a client: requests, streams, and what is wrong when there is no answer.

Needs httpx (extra `serve`). Requests carry only what differs from `SamplingParams()`, so that the defaults of
a server hold and servers without our extensions understand them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import AsyncIterator, Collection, Generator
from typing import Any
from urllib.parse import urlsplit

from idlm.contracts import SamplingParams
from idlm.errors import UserError, install_command
from idlm.infer.cli.config import KEY_VARIABLE
from idlm.infer.clients.loads import Job

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
        return chunk

    def check_end(self) -> None:
        """Raise RequestFailure if the stream broke off."""
        if not self._is_done:
            raise RequestFailure(0, "the stream ended without [DONE]")


def sampling_fields(params: SamplingParams, always: Collection[str] = ()) -> dict[str, Any]:
    """The settings that a request names: those that are not the default, and `always`."""
    plain, fields = SamplingParams(), {}
    for name in (each.name for each in dataclasses.fields(SamplingParams) if each.name not in NOT_SENT):
        value = getattr(params, name)
        if value is not None and (value != getattr(plain, name) or name in always):
            fields[name] = value
    return fields


def deltas(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    """What a chunk adds to each of its choices; chunks of other servers may lack choices or have null."""
    return [choice.get("delta") or {} for choice in chunk.get("choices") or ()]


def draft_counts(usage: dict[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Forward passes, accepted and tested drafts of an answer; None where the server does not say."""
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
    """The words of an error in OpenAI's shape."""
    error = content.get("error", content) if isinstance(content, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "")
