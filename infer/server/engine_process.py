"""The engine process of `idlm-serve`: builds an engine, and runs a forward pass after another while it has
work. It ends when the front end is gone.

The front end starts it with the number of an open socket (`engine_client.py`). It reads messages between two
passes, so an abort frees its pages before the next one."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import select
import socket
import sys
import time

from idlm.cli import command
from idlm.contracts import Constraint, SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments
from idlm.infer.engine import Engine, StreamEvent
from idlm.infer.request import QueueOrder
from idlm.infer.server import messages
from idlm.infer.server.messages import EngineInfo, Message
from idlm.infer.structured.grammar import Compiling
from idlm.log import get_logger

LOG = get_logger(__name__)
RESERVE = 32
"""One lane in so many is reserved for clients that have none."""
SECONDS_PER_EVENT = 8e-5
"""About what an event costs the front end and the reader of a stream. Events wait so long after the last
ones, and those of a sample become one meanwhile: 256 fast streams have some tokens a chunk."""
LOOK_MILLISECONDS = 5
"""How often an engine without other work looks whether a grammar is compiled."""


def main() -> int:
    """Run on the socket whose number is the only argument."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        return command.run(lambda _: run(connection))


def run(connection: socket.socket) -> int:
    """Build the engine that the first message describes, and serve it; returns the exit status."""
    inbox, received = Inbox(connection), list[Message]()
    while inbox.is_open and not received:
        received = inbox.take(None)
    if not received:
        return 0
    [start] = received
    try:
        del start["type"]
        engine = EngineArguments(**start).load()
    except UserError as error:
        with contextlib.suppress(ConnectionError):
            connection.sendall(messages.pack({"type": "failed", **messages.error_message(error)}))
        return command.USER_ERROR_STATUS
    # The first constraint reads the vocabulary, which holds the interpreter's lock for a second or more.
    engine.begin_grammar(SamplingParams(constraint=Constraint(kind="json_object")))
    # What is loaded lives as long as the process: garbage collection need not look at it in every pass.
    gc.collect()
    gc.freeze()
    with contextlib.closing(engine), contextlib.suppress(ConnectionError):
        connection.sendall(messages.pack({"type": "ready", **dataclasses.asdict(engine_info(engine))}))
        EngineLoop(engine, inbox, connection).run()
    return 0


def engine_info(engine: Engine) -> EngineInfo:
    return EngineInfo(
        directory=str(engine.model.directory),
        decoder=engine.decoder.name,
        stride=max(mode.stride for mode in engine.decoder.modes),
        decoder_options=dataclasses.asdict(engine.decoder.config),
        settings=engine.settings.options(),
        exactness=engine.exactness,
        max_length=engine.table.max_length,
        vocab_size=engine.model.spec.vocab_size,
        num_pages=engine.pool.num_pages,
        page_size=engine.pool.page_size,
        pid=os.getpid(),
    )


class Inbox:
    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._unpacker = connection, messages.unpacker()
        # Not `select`, which refuses the descriptor that a front end with 1,000 clients hands on.
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self.is_open = True

    def take(self, milliseconds: int | None) -> list[Message]:
        """The messages that are here; waits up to `milliseconds` (None: for ever) for one, or for the end."""
        if self._poll.poll(milliseconds):
            try:
                data = self._connection.recv(messages.RECEIVE_BYTES)
            except ConnectionError:
                data = b""
            self.is_open = bool(data)
            self._unpacker.feed(data)
        return list(self._unpacker)


class EngineLoop:
    def __init__(self, engine: Engine, inbox: Inbox, connection: socket.socket) -> None:
        self._engine, self._inbox, self._connection = engine, inbox, connection
        self._compiling: dict[str, tuple[Compiling, Message]] = {}
        self._next_report = 0.0

    def run(self) -> None:
        self._engine.scheduler.num_reserved_lanes = self._engine.settings.max_sequences // RESERVE
        while self._inbox.is_open:
            is_busy = self._engine.has_work or (not self._compiling and self._engine.capture_missed())
            wait = 0 if is_busy else LOOK_MILLISECONDS if self._compiling else None
            for message in self._inbox.take(wait):
                self._handle(message)
            for request_id, (grammar, message) in list(self._compiling.items()):
                if self._engine.may_add(grammar):
                    del self._compiling[request_id]
                    self._add(message)
                    self._report([])
            if self._engine.has_work and self._inbox.is_open:
                self._engine.run_step()
                if time.monotonic() >= self._next_report or not self._engine.is_running:
                    events = self._engine.take_events()
                    self._next_report = time.monotonic() + SECONDS_PER_EVENT * len(events)
                    self._report(events)

    def _handle(self, message: Message) -> None:
        if message["type"] == "add":
            self._add(message)
            return
        request_id = message["id"]
        compiling, _ = self._compiling.pop(request_id, (None, None))
        others = [grammar for grammar, _ in self._compiling.values()]
        if compiling is not None and compiling not in others:
            compiling.cancel()
        aborted = self._engine.abort(request_id)
        self._report([StreamEvent(done.request_id, done.index, (), "", done) for done in aborted])

    def _add(self, message: Message) -> None:
        """Queue a request, or hold it while its grammar is compiled or others are on trial."""
        request_id = message["id"]
        try:
            params, prompt_ids = SamplingParams(**message["params"]), message["prompt_ids"]
            if params.constraint is not None:
                self._engine.check_request(request_id, prompt_ids, params, compiles=False)
            grammar = self._engine.begin_grammar(params)
            if grammar is not None and not self._engine.may_add(grammar):
                self._compiling[request_id] = grammar, message
                self._report([])
                return
            turn = QueueOrder(*message["turn"])
            has_passes = message.get("passes", False)
            self._engine.add_request(
                request_id, prompt_ids, params, streams=True, turn=turn, has_passes=has_passes
            )
        except UserError as error:
            self._send({"type": "refused", "id": request_id, **messages.error_message(error)})
        except Exception:
            # A mistake of ours, found before anything is queued: other requests do not suffer from it.
            LOG.exception("a request could not be queued")
            hidden = {"code": messages.FAULT, "message": "", "fix": ""}
            self._send({"type": "refused", "id": request_id, **hidden})
        else:
            compiled = None if grammar is None else grammar.result()
            notes = () if compiled is None or isinstance(compiled, UserError) else compiled.notes
            self._send({"type": "added", "id": request_id, "notes": list(notes)})

    def _report(self, events: list[StreamEvent]) -> None:
        stats = messages.engine_stats(self._engine)
        num_compiling = sum(message["params"].get("n", 1) for _, message in self._compiling.values())
        stats = stats._replace(num_waiting=stats.num_waiting + num_compiling)
        self._send({"type": "step", "events": list(map(messages.event_message, events)), "stats": stats})

    def _send(self, message: Message) -> None:
        self._connection.sendall(messages.pack(message))


if __name__ == "__main__":
    sys.exit(main())
