"""The load generator: puts a load on an engine of this process, or on a server, and records every request.

A request that fails is a record with an error. Over HTTP the latencies include what the client takes; both
ways one process does it all."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from idlm.errors import UserError
from idlm.infer.clients.loads import Job, Load

if TYPE_CHECKING:
    import httpx

    from idlm.infer.clients.http import Server
    from idlm.infer.engine import Engine

OnDone = Callable[[int], None]
"""Called with the number of requests that are finished."""


@dataclass(slots=True)
class Record:
    """One request: when it was sent, when its chunks arrived (seconds of one clock), and its counts.
    `num_output_tokens` and `num_input_tokens` are what the server says. Counts of forward passes and drafts
    are None for servers without them."""

    start: float
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_forwards: int | None = None
    num_accepted: int | None = None
    num_tested: int | None = None
    error: str | None = None
    error_code: int = 0


def run_on_engine(
    engine: Engine, load: Load, *, streams: bool = True, on_done: OnDone = lambda _: None
) -> list[Record]:
    """Records of a load on an engine. `streams`: answers become text as they come, as a server's do."""
    waiting, records = deque(enumerate(load.jobs)), dict[str, Record]()
    num_active = num_done = 0
    start = time.perf_counter()
    while waiting or num_active:
        while waiting and _is_due(load, waiting[0][0], num_active, time.perf_counter() - start):
            number, job = waiting.popleft()
            name = f"load-{number}"
            # In an open loop a request waits from its arrival on, also while a pass is under way.
            begin = start + load.arrivals[number] if load.arrivals else time.perf_counter()
            record = records[name] = Record(begin)
            try:
                engine.add_request(name, job.prompt, job.params, streams=streams)
                num_active += 1
            except UserError as error:
                record.end, record.error = time.perf_counter(), str(error)
                num_done += 1
        if not num_active:
            if waiting:
                time.sleep(max(0.0, start + load.arrivals[waiting[0][0]] - time.perf_counter()))
            continue
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            record = records[event.request_id]
            if event.token_ids:
                record.times.append(now)
            if (done := event.completion) is not None:
                record.end, record.error = now, done.error
                record.num_input_tokens, record.num_output_tokens = (
                    done.num_prompt_tokens,
                    len(done.token_ids),
                )
                record.num_forwards = done.num_forwards
                record.num_accepted = sum(done.accepted_by_position)
                record.num_tested = sum(done.tested_by_position)
                num_active -= 1
                num_done += 1
        on_done(num_done)
    return list(records.values())


def _is_due(load: Load, number: int, num_active: int, seconds: float) -> bool:
    if load.concurrency is not None:
        return num_active < load.concurrency
    return load.arrivals[number] <= seconds


def run_on_server(server: Server, load: Load, *, on_done: OnDone = lambda _: None) -> list[Record]:
    """Records of a load on a server, in the order of the jobs."""
    return asyncio.run(_run_on_server(server, load, on_done))


async def _run_on_server(server: Server, load: Load, on_done: OnDone) -> list[Record]:
    records: dict[int, Record] = {}
    waiting, start = deque(enumerate(load.jobs)), time.perf_counter()

    async def answer(client: httpx.AsyncClient, number: int, job: Job) -> None:
        record = await _answer(server, client, job)
        records[number] = record
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
    import httpx

    from idlm.infer.clients.http import RequestFailure, stream

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
    from idlm.infer.clients.http import RequestFailure, draft_counts

    if not usage.get("completion_tokens"):
        raise RequestFailure(
            0, "the stream has no usage, or no tokens: stream_options.include_usage is needed"
        )
    record.num_input_tokens = usage.get("prompt_tokens") or 0
    record.num_output_tokens = usage["completion_tokens"]
    record.num_forwards, record.num_accepted, record.num_tested = draft_counts(usage)
