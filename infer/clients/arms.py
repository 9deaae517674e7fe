"""What `idlm-bench` compares: an engine of this process, servers that run, and servers that it starts."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments
from idlm.infer.clients.loads import Job, Load, OnDone, Record, run_on_engine
from idlm.text.tokenizer import encode_messages

if TYPE_CHECKING:
    from idlm.infer.clients.http import Server
    from idlm.infer.engine import Engine

READY_SECONDS, STOP_SECONDS, POLL_SECONDS = 1800.0, 60.0, 0.1
TAIL_CHARS = 2000
ROUNDING = {"float32": 1e-3}
ROUNDING_OF_16_BITS = 0.25
"""Two steps of a 16-bit logit between 16 and 32: closer tokens may change places in another batch."""


class Greedy(NamedTuple):
    """A greedy answer, and by how much each token's log-probability exceeds the next one's."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


class EngineArm:
    """An engine of this process. `case`: an arm in result rows."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self._engine = name, engine
        self.case = {"api": "engine", "decoder": engine.decoder.name, "exactness": engine.exactness}
        self.rounding = ROUNDING.get(str(engine.model.dtype).removeprefix("torch."), ROUNDING_OF_16_BITS)

    def run(self, load: Load, *, on_done: OnDone = lambda _: None) -> list[Record]:
        return run_on_engine(self._engine, load._replace(jobs=self._encoded(load.jobs)), on_done=on_done)

    def close(self) -> None:
        """Free the engine's memory, so that the engine of the next arm can size its own."""
        from idlm.devices import free_cached_memory

        self._engine.close()
        del self._engine
        free_cached_memory()

    def greedy(self, jobs: Sequence[Job]) -> list[Greedy]:
        prompts = [job.prompt for job in self._encoded(jobs)]
        return list(map(to_greedy, self._engine.generate(prompts, [job.params for job in jobs])))

    def _encoded(self, jobs: Sequence[Job]) -> list[Job]:
        encode = functools.partial(encode_messages, self._engine.tokenizer)
        return [job._replace(prompt=encode(job.turns)) if job.turns else job for job in jobs]


def to_greedy(done: Completion) -> Greedy:
    """Token ids of a completion with `logprobs=2`, and the margin of each over the second likeliest."""
    assert done.logprobs is not None
    return Greedy(done.token_ids, tuple(_margin(token.top.values()) for token in done.logprobs))


def _margin(logprobs: Collection[float]) -> float:
    """By how much the first exceeds the second; 0 if two tokens of one text have become one."""
    first, second, *_ = *sorted(logprobs, reverse=True), max(logprobs)
    return first - second


class ServerArm:
    def __init__(self, name: str, server: Server) -> None:
        self.name, self._server = name, server
        info = server.info
        self.case = {"api": "http", "server": server.owner, "model": server.model}
        self.case |= {key: info[key] for key in ("decoder", "exactness") if key in info}
        self.rounding = ROUNDING_OF_16_BITS

    def run(self, load: Load, *, on_done: OnDone = lambda _: None) -> list[Record]:
        from idlm.infer.clients.http import run_on_server

        return run_on_server(self._server, load, on_done=on_done)

    def greedy(self, jobs: Sequence[Job]) -> list[Greedy]:
        """See `EngineArm`. The server is one of ours: others have no token ids, or other arithmetic."""
        answers = []
        for job in jobs:
            path, body = self._server.load_body(job)
            fields = {"logprobs": True, "top_logprobs": 2} if "messages" in body else {"logprobs": 2}
            body |= fields | {"stream": False, "stream_options": None, "return_token_ids": True}
            [choice] = self._server.post(path, body)["choices"]
            logprobs = choice["logprobs"]
            tops = logprobs.get("top_logprobs") or [
                {each["token"]: each["logprob"] for each in token["top_logprobs"]}
                for token in logprobs["content"]
            ]
            answers.append(Greedy(tuple(choice["token_ids"]), tuple(_margin(top.values()) for top in tops)))
        return answers


Arm = EngineArm | ServerArm


def check_parity(first: Sequence[Greedy], second: Sequence[Greedy], *, rounding: float) -> int:
    """Number of tokens that were compared: up to a choice that rounding decides. UserError IDLM-0711 for
    others."""
    num_compared = 0
    for number, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids))
        shorter = min(len(ours.token_ids), len(theirs.token_ids))
        index = next((at for at, (a, b) in pairs if a != b), shorter)
        is_whole = index == len(ours.token_ids) == len(theirs.token_ids)
        if not is_whole and (index >= len(ours.margins) or ours.margins[index] > rounding):
            raise UserError(
                "IDLM-0711",
                f"greedy answers differ from those of the first arm: prompt {number}, token {index}",
                fix="this is a bug of idlm: report it with the command; its speed would mean nothing",
            )
        num_compared += index
    return num_compared


def engine_arm(name: str, arguments: EngineArguments) -> contextlib.closing[EngineArm]:
    return contextlib.closing(EngineArm(name, arguments.load()))


@contextlib.contextmanager
def served_arm(name: str, program: Sequence[str], ready: str, **options: Any) -> Iterator[Arm]:
    """A server that is started for it. `options` are those of `Server`."""
    from idlm.infer.clients.http import Server

    with launched(program, ready) as url:
        yield ServerArm(name, Server(url, **options))


@contextlib.contextmanager
def launched(program: Sequence[str], ready: str, *, seconds: float = READY_SECONDS) -> Iterator[str]:
    """Start a server, wait until its route `ready` answers, and yield its address; `{port}` in a word of
    `program` stands for a free port. UserError IDLM-0712 with its output if it is not ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        # A session of its own, so that its children end with it, and Ctrl-C is ours to handle.
        process = subprocess.Popen(
            [word.replace("{port}", str(port)) for word in program],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + seconds
            while not _is_ready(f"{url}{ready}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_CHARS))
                    output = log.read().decode(errors="replace").strip()
                    raise UserError(
                        "IDLM-0712",
                        f"{Path(program[0]).name} is not ready (status {process.poll()}); output: {output}",
                        fix="correct what it names",
                    )
                time.sleep(POLL_SECONDS)
            yield url
        finally:
            _end(process)


def _is_ready(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate it; what is left of its session after a while is killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve_program(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "idlm.infer.cli.serve", *words, "port={port}"]


def greedy_jobs(jobs: Sequence[Job], *, num: int, num_prompt_tokens: int, num_tokens: int) -> list[Job]:
    """The first jobs with the ends of their prompts backwards, so that no prefix cache holds a prompt of the
    load."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
    return [job.backwards(params, num_prompt_tokens) for job in jobs[:num]]
