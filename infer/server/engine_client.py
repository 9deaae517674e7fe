"""The engine process in the front end: started, called, and started again when it dies. All of it runs
in one event loop.

A request fails when the process that works on it ends: its client may have read a part of the answer. A
process that owes an answer and is silent for `engine_timeout` seconds is ended; one that loads is not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments
from idlm.infer.request import ANONYMOUS, QueueOrder
from idlm.infer.server import messages
from idlm.infer.server.errors import ApiError, engine_unavailable, from_user_error, internal_error
from idlm.infer.server.messages import AnswerEvent, EngineInfo, Message, Stats
from idlm.infer.server.metrics import Metrics
from idlm.log import get_logger

PROGRAM = ("-P", "-m", "idlm.infer.server.engine_process")
"""-P: a module of the working directory must never take the place of a library."""
STOP_SECONDS = 10.0
LOOKS_PER_TIMEOUT = 8
"""Looks at an engine that hangs: counted, not timed, since the front end may have been stopped itself."""
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
STATUS = {"IDLM-0448": 503, "IDLM-0478": 400}
"""Status of errors that end a request in the engine, if it is not 500."""
State = Literal["loading", "ready", "restarting", "stopped"]
LOG = get_logger(__name__)


class EngineClient:
    def __init__(self, arguments: EngineArguments, metrics: Metrics, *, timeout: float = 600.0) -> None:
        self._arguments, self._metrics, self.timeout = arguments, metrics, timeout
        self._numbers = itertools.count()
        self._open: dict[str, Generation] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._closing = asyncio.Event()
        self._owes_answer = False
        self.state: State = "loading"
        self.info: EngineInfo | None = None
        self.num_restarts = 0

    @property
    def num_open(self) -> int:
        """Samples that are not finished."""
        return sum(generation.left[request_id] for request_id, generation in self._open.items())

    def num_open_of(self, client: str) -> int:
        """Samples of a client that are not finished."""
        return sum(each.num_open for each in set(self._open.values()) if each.turn.client == client)

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    async def run(self) -> None:
        """Run an engine process until `close`, again if it dies. UserError if the first cannot be built."""
        pause = FIRST_PAUSE
        while not self._closing.is_set():
            start = time.monotonic()
            failure = await self._run_process()
            if self._closing.is_set():
                break
            if self.info is None:
                raise failure
            LOG.error("%s; it is restarted in %.1f s", failure.message, pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause)
            pause = FIRST_PAUSE if time.monotonic() - start > MAX_PAUSE else min(2 * pause, MAX_PAUSE)
        self.state = "stopped"

    async def close(self) -> None:
        """End the process; requests that are not finished fail."""
        self._closing.set()
        self._disconnect()
        self._fail_all(engine_unavailable("the server is shutting down"))

    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        turn: QueueOrder = ANONYMOUS,
        *,
        has_passes: bool = False,
    ) -> Generation:
        """Queue prompts, and wait until the engine has taken them; `has_passes`: events have `passes`. Raises
        UserError for a refusal, ApiError 503."""
        number = next(self._numbers)
        request_ids = [f"{number}-{index}" for index in range(len(prompts))]
        generation = Generation(self, self._metrics, dict(zip(request_ids, prompts, strict=True)), params)
        generation.turn = turn._replace(call=str(number))
        self._open |= dict.fromkeys(request_ids, generation)
        try:
            for request_id, prompt in zip(request_ids, prompts, strict=True):
                message = {"id": request_id, "prompt_ids": prompt, "params": messages.params_message(params)}
                await self._send({"type": "add", "turn": generation.turn, "passes": has_passes, **message})
            for prompt in prompts:
                await generation.wait_until_added()
                self._metrics.prompt_tokens.inc(len(prompt))
        except BaseException:
            generation.close()
            raise
        return generation

    def abort(self, request_id: str) -> None:
        """Stop a request; the engine frees its pages before the next pass."""
        if self._open.pop(request_id, None) is not None and self._writer is not None:
            self._write(self._writer, {"type": "abort", "id": request_id})

    def _write(self, writer: asyncio.StreamWriter, message: Message) -> None:
        writer.write(messages.pack(message))
        self._owes_answer = True

    def _disconnect(self) -> None:
        if self._writer is not None:
            # Not `close`, which waits for an engine that hangs to read what it was sent.
            self._writer.transport.abort()
            self._writer = None

    async def _send(self, message: Message) -> None:
        writer = self._writer
        if self.state != "ready" or writer is None:
            raise engine_unavailable(f"the engine is {self.state}")
        self._write(writer, message)
        try:
            await writer.drain()
        except ConnectionError as error:
            raise engine_unavailable("the engine process has ended") from error

    async def _run_process(self) -> UserError:
        """Run one engine process to its end; returns why it ended."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *PROGRAM, str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                return _lost(f"the engine process cannot be started: {error}")
            raise
        failure: UserError | None = None
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            # `close` ends a connection; it cannot end one that was not there yet.
            if not self._closing.is_set():
                self._writer.write(messages.pack({"type": "start", **dataclasses.asdict(self._arguments)}))
                failure = await self._read(reader)
        finally:
            status = await self._end(process, hangs=failure is not None)
        return failure or _lost(f"the engine process ended with status {status}")

    async def _end(self, process: asyncio.subprocess.Process, *, hangs: bool) -> int | None:
        """Close the connection, which the process ends at; returns its status, None if not even SIGKILL ends
        it."""
        # A process that is still loading does not read its end of the connection.
        patience = STOP_SECONDS if self.state == "ready" and not hangs else 0
        if not self._closing.is_set() and self.state == "ready":
            self.num_restarts += 1
            self._metrics.engine_lost()
        self.state = "stopped" if self._closing.is_set() else "restarting" if self.info else "loading"
        self._disconnect()
        self._fail_all(
            ApiError(503, "the engine process ended while it worked on this request", code="engine_lost")
        )
        for seconds in (patience, STOP_SECONDS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    return await process.wait()
            # It may have ended by itself, before its status is read.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return None

    async def _read(self, reader: asyncio.StreamReader) -> UserError | None:
        """Handle messages until the process ends; returns the error that it reports, or that it hangs."""
        inbox, num_silent = messages.unpacker(), 0
        while num_silent <= LOOKS_PER_TIMEOUT:
            try:
                async with asyncio.timeout(self.timeout / LOOKS_PER_TIMEOUT):
                    data = await reader.read(messages.RECEIVE_BYTES)
            except TimeoutError:
                is_owed = self.state == "ready" and (self._owes_answer or bool(self._open))
                num_silent = num_silent + 1 if is_owed else 0
                continue
            except ConnectionError:
                data = b""
            if not data:
                return None
            num_silent, self._owes_answer = 0, False
            inbox.feed(data)
            for message in inbox:
                if message["type"] == "failed":
                    return UserError(message["code"], message["message"], fix=message["fix"])
                self._handle(message)
        return UserError(
            "IDLM-0715",
            f"the engine has answered nothing for {self.timeout:g} s, although it has work",
            fix="read its messages above; raise engine_timeout= if a pass may take that long",
        )

    def _handle(self, message: Message) -> None:
        match message["type"]:
            case "step":
                self._metrics.step(Stats(*message["stats"]))
                events = list(map(messages.read_event, message["events"]))
                self._metrics.generation_tokens.inc(sum(len(event.token_ids) for event in events))
                for event in events:
                    self._deliver(event)
            case "added" | "refused":
                generation = self._open.get(message["id"])
                if generation is not None:
                    generation.put_answer(message)
            case "ready":
                self.info = EngineInfo(**{key: value for key, value in message.items() if key != "type"})
                self.state = "ready"
                self._metrics.engine_ready(self.info)

    def _deliver(self, event: AnswerEvent) -> None:
        if event.figures is not None:
            self._metrics.finished(event.figures)
        # An event of an aborted request has no reader.
        generation = self._open.get(event.request_id)
        if generation is not None:
            generation.put(event)
            if not generation.left[event.request_id]:
                self._open.pop(event.request_id, None)

    def _fail_all(self, error: ApiError) -> None:
        for generation in set(self._open.values()):
            generation.fail(error)
        self._open.clear()


def _lost(message: str) -> UserError:
    fix = "read its messages above; a status of -9 is often a shortage of memory"
    return UserError("IDLM-0701", message, fix=fix)


class Generation:
    """The prompts of one HTTP request in the engine, with `n` samples each; iterating yields events."""

    def __init__(
        self, client: EngineClient, metrics: Metrics, prompts: dict[str, list[int]], params: SamplingParams
    ) -> None:
        self._client, self._metrics, self.turn = client, metrics, ANONYMOUS
        self.prompts, self.params, self.num_samples = list(prompts.values()), params, params.n
        self._positions = {request_id: index for index, request_id in enumerate(prompts)}
        self.left = dict.fromkeys(prompts, params.n)
        self._answers: asyncio.Queue[Message | ApiError] = asyncio.Queue()
        self._unread: dict[int, AnswerEvent] = {}
        # Not set only while the reader waits, so that nothing is unread.
        self._has_news = asyncio.Event()
        self._has_news.set()
        self._error: Exception | None = None
        self.notes: list[str] = []
        """What of the request does not hold: parts of its constraint, or its `max_tokens`."""
        self.sink: Callable[[int, AnswerEvent], bool] | None = None
        """Takes an event at once, or returns False. First and last events of samples are the reader's."""
        self._start = time.perf_counter()
        self._emitted_at: dict[int, float] = {}

    @property
    def num_open(self) -> int:
        return sum(self.left.values())

    async def wait_until_added(self) -> None:
        """Wait for the engine's answer to a prompt. Raises UserError if it refuses, ApiError if it fails."""
        answer = await self._answers.get()
        if isinstance(answer, ApiError):
            raise answer
        if answer["type"] == "refused":
            if answer["code"] == messages.FAULT:
                raise internal_error()
            raise UserError(answer["code"], answer["message"], fix=answer["fix"])
        self.notes = answer["notes"]

    async def __aiter__(self) -> AsyncIterator[tuple[int, AnswerEvent]]:
        """Each event, after the number of its sample in the HTTP request; those of a sample that a slow
        reader has not read become one. Raises ApiError if the engine is lost, or fails a sample."""
        try:
            while self._unread or self.num_open or self._error:
                while self._unread:
                    choice = next(iter(self._unread))
                    yield choice, self._unread.pop(choice)
                if self._error is not None:
                    raise self._error
                if self.num_open:
                    self._has_news.clear()
                    await self._has_news.wait()
            self._metrics.whole_request.observe(time.perf_counter() - self._start)
        finally:
            self.close()

    def close(self) -> None:
        for request_id, left in self.left.items():
            if left:
                self._client.abort(request_id)
        self.left, self.sink = dict.fromkeys(self.left, 0), None

    def put_answer(self, answer: Message) -> None:
        self._answers.put_nowait(answer)

    def put(self, event: AnswerEvent) -> None:
        choice = self._positions[event.request_id] * self.num_samples + event.sample
        if event.figures is not None:
            self.left[event.request_id] -= 1
        if event.error is not None:
            code, message, fix = event.error
            status = STATUS.get(code, 500)
            if status == 400:
                self._error = from_user_error(UserError(code, message, fix=fix), prompt_field="prompt")
            else:
                self._error = ApiError(status, f"{message} ({fix})", code=code)
        else:
            is_first = choice not in self._emitted_at
            self._observe(choice, len(event.token_ids))
            if not is_first and event.figures is None and self._sinks(choice, event):
                return
            unread = self._unread.get(choice)
            self._unread[choice] = event if unread is None else messages.joined(unread, event)
        self._has_news.set()

    def _sinks(self, choice: int, event: AnswerEvent) -> bool:
        if self.sink is None or self._has_news.is_set():
            return False
        try:
            return self.sink(choice, event)
        except Exception as error:
            # A mistake of ours ends this request, as if its reader had made it, and no other one.
            self._error = error
            return False

    def fail(self, error: ApiError) -> None:
        self.left = dict.fromkeys(self.left, 0)
        self._answers.put_nowait(error)
        self._error = error
        self._has_news.set()

    def _observe(self, choice: int, num_tokens: int) -> None:
        now = time.perf_counter()
        if choice in self._emitted_at and num_tokens:
            self._metrics.between_tokens.observe((now - self._emitted_at[choice]) / num_tokens)
        elif not self._emitted_at:
            self._metrics.first_token.observe(now - self._start)
        self._emitted_at[choice] = now
