"""A load generator that takes a fifth of the processor time of `idlm-bench`'s, which uses httpx: for loads
that the client must not slow down, of an engine that takes 100 us for a token.

It speaks what `idlm-serve` speaks: HTTP/1.1 with chunked bodies, connections that are kept. Of a stream it
reads when its events arrive, and the usage at its end. Any other answer raises.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from urllib.parse import urlsplit

from idlm.infer.clients.generator import Record
from idlm.infer.clients.http import Server
from idlm.infer.clients.loads import Job, Load

EVENT_END = b"\n\n"


def run_on_server(server: Server, url: str, load: Load) -> list[Record]:
    """Records of a closed loop on the server at `url`, in the order of the jobs."""
    return asyncio.run(_run(server, url, load))


async def _run(server: Server, url: str, load: Load) -> list[Record]:
    # Bodies are made before the clock runs: they are no part of what is measured.
    place, loop = urlsplit(url), asyncio.get_running_loop()
    host, port = place.hostname or "", place.port or 80
    waiting = deque((Record(0.0), _request(server, place.netloc, job)) for job in load.jobs)
    records = [record for record, _ in waiting]

    async def work() -> None:
        transport, answer = await loop.create_connection(Answer, host, port)
        while waiting:
            record, request = waiting.popleft()
            record.start = time.perf_counter()
            done = answer.expect(record)
            transport.write(request)
            await done
        transport.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency or 1):
            group.create_task(work())
    return records


def _request(server: Server, place: str, job: Job) -> bytes:
    path, fields = server.load_body(job)
    body = json.dumps(fields).encode()
    head = f"POST /v1{path} HTTP/1.1\r\nhost: {place}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Answer(asyncio.Protocol):
    """One connection; `expect` begins an answer."""

    def __init__(self) -> None:
        self._record, self._done = Record(0.0), asyncio.get_running_loop().create_future()
        self._data, self._text, self._is_begun = b"", b"", False

    def expect(self, record: Record) -> asyncio.Future[None]:
        """What is done when the whole answer is in `record`."""
        self._record, self._done = record, asyncio.get_running_loop().create_future()
        self._data, self._text, self._is_begun = b"", b"", False
        return self._done

    def data_received(self, data: bytes) -> None:
        """Read the chunks that are whole."""
        self._data += data
        if not self._is_begun:
            head, found, rest = self._data.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200") or b"transfer-encoding: chunked" not in head.lower():
                self._done.set_exception(ConnectionError(self._data.decode(errors="replace")))
                return
            self._is_begun, self._data = True, rest
        while True:
            size, found, rest = self._data.partition(b"\r\n")
            length = int(size, 16) if found else 0
            if not found or len(rest) < length + 2:
                return
            if not length:
                self._record.end = time.perf_counter()
                self._done.set_result(None)
                return
            self._data = rest[length + 2 :]
            self._read(rest[:length])

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that is not whole fails."""
        if not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server has closed the connection"))

    def _read(self, data: bytes) -> None:
        *events, self._text = (self._text + data).split(EVENT_END)
        now = time.perf_counter()
        for event in events:
            if b'"usage":' in event:
                usage = json.loads(event.removeprefix(b"data: "))["usage"]
                self._record.num_input_tokens = usage["prompt_tokens"]
                self._record.num_output_tokens = usage["completion_tokens"]
            elif event.startswith(b'data: {"id"'):
                self._record.times.append(now)
            elif event != b"data: [DONE]":
                raise ConnectionError(event.decode(errors="replace"))
