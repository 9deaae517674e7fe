"""`idlm-serve` over an engine that computes nothing: what the processes around it take, on any machine.

    python -m benchmarks.stand_in serve|engine PASS_MS BURST WORDS...

`serve` is the front end; it starts `engine`, the engine process with a stand-in: every `PASS_MS` each request
gets `BURST` tokens. Messages, front end and HTTP are those of the product. `http_overhead.py` measures them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from idlm.cli import command
from idlm.contracts import Completion, SamplingParams
from idlm.infer.cli.config import EngineArguments
from idlm.infer.engine import Engine, StreamEvent
from idlm.infer.request import Turn

MODULE = "benchmarks.stand_in"
TOKEN_IDS, TEXT = (17, 23, 31, 47), " nuts"


def program(pass_ms: float, burst: int, words: Sequence[str]) -> list[str]:
    """The command of the server, for `launched`."""
    return [
        sys.executable,
        "-m",
        MODULE,
        "serve",
        str(pass_ms),
        str(burst),
        *words,
        "port={port}",
    ]


def main() -> int:
    """Console entry point of both processes."""
    role, pass_ms, burst, *words = sys.argv[1:]
    return command.run(_serve if role == "serve" else _run_engine, [pass_ms, burst, *words])


def _serve(arguments: list[str]) -> int:
    from idlm.infer.cli.serve import serve
    from idlm.infer.server import engine_client

    pass_ms, burst, *words = arguments
    engine_client.PROGRAM = ("-P", "-m", MODULE, "engine", pass_ms, burst)  # type: ignore[assignment]
    return serve(words)


def _run_engine(arguments: list[str]) -> int:
    import socket

    from idlm.infer.server.engine_process import run

    pass_ms, burst, descriptor = arguments
    load = EngineArguments.load

    def stand_in(self: EngineArguments) -> StandIn:
        return StandIn(load(self), float(pass_ms) / 1e3, int(burst))

    EngineArguments.load = stand_in  # type: ignore[method-assign,assignment]
    with socket.socket(fileno=int(descriptor)) as connection:
        return run(connection)


class StandIn:
    """An engine whose passes take a fixed time of which no processor knows."""

    def __init__(self, engine: Engine, seconds: float, burst: int) -> None:
        self._engine, self._seconds, self._burst = engine, seconds, burst
        self._left: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._num_prompt_tokens: dict[str, int] = {}
        self._next = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._left)

    def add_request(
        self, request_id: str, prompt: list[int], params: SamplingParams, *, streams: bool, turn: Turn
    ) -> None:
        """Queue a request."""
        self._left[request_id] = self._asked[request_id] = params.max_tokens or 1
        self._num_prompt_tokens[request_id] = len(prompt)

    def abort(self, request_id: str) -> list[Completion]:
        """Forget a request."""
        self._left.pop(request_id, None)
        return []

    def step(self) -> list[StreamEvent]:
        """The events of a pass, when its time has come."""
        now = time.perf_counter()
        self._next = max(self._next + self._seconds, now)
        time.sleep(self._next - now)
        events = []
        for request_id, left in list(self._left.items()):
            num = min(self._burst, left)
            self._left[request_id] -= num
            done = None if num < left else self._finish(request_id)
            token_ids = (TOKEN_IDS * num)[:num]
            events.append(StreamEvent(request_id, 0, token_ids, TEXT * num, done))
        return events

    def _finish(self, request_id: str) -> Completion:
        num_tokens = self._asked.pop(request_id)
        del self._left[request_id]
        return Completion(
            request_id=request_id,
            index=0,
            token_ids=(TOKEN_IDS[0],) * num_tokens,
            text="",
            finish_reason="length",
            num_prompt_tokens=self._num_prompt_tokens.pop(request_id),
            num_forwards=-(-num_tokens // self._burst),
            num_cached_tokens=0,
        )


if __name__ == "__main__":
    sys.exit(main())
