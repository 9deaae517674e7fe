"""Many streams, of which some are left at a random chunk: what `idlm-serve` keeps, and what others read.

    python -m benchmarks.serve_soak [requests=10000] [concurrency=256] [leave=0.3] [answer=16]
        [path=CHECKPOINT] [record=true]

The load is a few requests many times over, so that a quiet run, one stream at a time to its end,
gives the text of each; no choice in them is a near tie, which the rounding of a batch decides. It goes in
rounds; behind each, when the server is idle, both of its processes are looked at. Rows: `requests` (the gate:
every stream that was not left has the text of the quiet run, and nothing leaked), `leaked_pages`,
`leaked_sockets`, `leaked_tasks` (since before the load), `memory_drift` (resident memory of both processes
after the last round over that after the first).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared import Report, defaults, parse_options, start

TINY = Path(__file__).resolve().parents[2] / "recipes" / "assets" / "tiny_ar"
DEFAULTS = defaults("requests=10000 concurrency=256 leave=0.3 answer=16 record=true", path=str(TINY))
NUM_ROUNDS, NUM_KINDS, PATIENCE = 5, 64, 600.0
LEAKS = ("pages", "sockets", "tasks")


class Stream(NamedTuple):
    """One request, and the number of chunks after which its client leaves (None: it stays)."""

    prompt: str
    seed: int
    answer: int
    leaves_after: int | None = None


class State(NamedTuple):
    """What an idle server holds."""

    pages: float
    sockets: int
    tasks: int
    front_memory: int
    engine_memory: int

    @property
    def memory(self) -> int:
        return self.front_memory + self.engine_memory


def measure(arguments: list[str]) -> int:
    if arguments[:1] == ["host"]:
        return host(arguments[1:])
    options = parse_options(arguments, DEFAULTS)
    kinds = clear_kinds(options["path"], int(options["answer"]))
    settings = (f"max_num_seqs={options['concurrency']}", "max_length=256", "decoder.stride=3")
    with running_server(options["path"], *settings) as server:
        quiet = asyncio.run(read_streams(server.port, kinds, concurrency=1))
        before, states, num_wrong, num_left = server.state(), list[State](), 0, 0
        for number in range(NUM_ROUNDS):
            load = leaving(kinds, int(options["requests"]) // NUM_ROUNDS, float(options["leave"]), number)
            found = asyncio.run(read_streams(server.port, load, concurrency=int(options["concurrency"])))
            expected = dict(zip(kinds, quiet, strict=True))
            for stream, text in zip(load, found, strict=True):
                num_wrong += text is not None and text != expected[stream._replace(leaves_after=None)]
            num_left += found.count(None)
            states.append(server.state())
            print(
                f"round {number + 1}: {len(load)} streams, {found.count(None)} left, {states[-1]}", flush=True
            )
    case: dict[str, Any] = {"leave": options["leave"], "concurrency": int(options["concurrency"])}
    case |= {"answer": int(options["answer"]), "model": Path(options["path"]).name}
    last, report = states[-1], Report("serve_soak", options)
    leaked = {name: getattr(last, name) - getattr(before, name) for name in LEAKS}
    is_clean = not num_wrong and not any(number > 0 for number in leaked.values())
    print(f"{num_left} streams were left; {num_wrong} of the others have another text than in the quiet run")
    report.add(case, "requests", NUM_ROUNDS * len(load), "requests", gate_passed=is_clean)
    for name in LEAKS:
        report.add(case, f"leaked_{name}", leaked[name], name)
    report.add(case, "memory_drift", last.memory / states[0].memory - 1, "fraction")
    return report.status


def clear_kinds(path: str, answer: int) -> list[Stream]:
    """Requests for a load to repeat, whose answers do not hang on rounding."""
    from idlm.contracts import SamplingParams
    from idlm.infer.engine import Engine
    from idlm.text.tokenizer import encode_prompt
    from tests.contracts.engines import answers_and_margins

    engine = Engine.from_pretrained(
        path, "isd", stride=3, mask_token_id=170, device="cpu", dtype="float32", max_length=256
    )
    kinds = [
        Stream(f"Tom has {number} pens. Tom finds 3.", number, answer) for number in range(2 * NUM_KINDS)
    ]
    prompts = [encode_prompt(engine.tokenizer, kind.prompt, template="none") for kind in kinds]
    params = [SamplingParams(max_tokens=answer, seed=kind.seed) for kind in kinds]
    _, is_clear = answers_and_margins(engine, prompts, params)
    engine.close()
    return [kind for kind, clear in zip(kinds, is_clear, strict=True) if clear][:NUM_KINDS]


def leaving(kinds: Sequence[Stream], num: int, share: float, seed: int) -> list[Stream]:
    """`num` requests in random order, a `share` of which is left somewhere between its begin and its end."""
    dice = random.Random(seed)
    chosen = [dice.choice(kinds) for _ in range(num)]
    return [
        kind._replace(leaves_after=dice.randrange(kind.answer // 3 + 1)) if dice.random() < share else kind
        for kind in chosen
    ]


async def read_streams(
    port: int, streams: Sequence[Stream], *, concurrency: int, api_key: str = ""
) -> list[str | None]:
    """The text of each stream in order, None for one that was left; `concurrency` are under way at a time."""
    found: list[str | None] = [None] * len(streams)
    waiting = list(enumerate(streams))[::-1]

    async def work() -> None:
        while waiting:
            number, stream = waiting.pop()
            found[number] = await _read(port, stream, api_key)

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(work())
    return found


async def _read(port: int, stream: Stream, api_key: str) -> str | None:
    """Read one stream; its end must be [DONE]."""
    fields = {"prompt": stream.prompt, "max_tokens": stream.answer, "seed": stream.seed, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {api_key}\r\n"
    head += "connection: close\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        text, num_chunks = "", 0
        while stream.leaves_after is None or num_chunks < stream.leaves_after:
            line = await reader.readline()
            assert line, f"{stream} ended without [DONE]"
            if line.startswith(b"data: [DONE]"):
                return text
            if line.startswith(b"data: "):
                text, num_chunks = text + json.loads(line[6:])["choices"][0]["text"], num_chunks + 1
        return None
    finally:
        writer.transport.abort()


class Server:
    """A server in a process of its own, which says what it holds when it gets a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self.port = int(self._stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        self._wait(lambda: self._get("/ready") is not None)

    def state(self) -> State:
        """What it holds when all streams have ended."""
        self._wait(self._is_idle)
        # Connections that were left close within this time.
        time.sleep(1)
        self._stdin.write("\n")
        self._stdin.flush()
        here = json.loads(self._stdout.readline())
        engine = self.info()["engine"]
        return State(
            pages=self._gauge("vllm:kv_cache_usage_perc") * engine["num_pages"],
            sockets=here["sockets"] + num_sockets(engine["pid"]),
            tasks=here["tasks"],
            front_memory=here["memory"],
            engine_memory=resident_bytes(engine["pid"]),
        )

    def info(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._get("/server_info") or "")
        return answer

    def _is_idle(self) -> bool:
        waiting = self._gauge("vllm:num_requests_running") + self._gauge("vllm:num_requests_waiting")
        return not waiting and not self.info()["num_open"]

    def _gauge(self, name: str) -> float:
        [line] = [line for line in (self._get("/metrics") or "").splitlines() if line.startswith(f"{name}{{")]
        return float(line.rpartition(" ")[2])

    def _get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as response:
                return str(response.read().decode())
        except OSError:
            return None

    def _wait(self, what: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert self._process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not become ready or idle"
            time.sleep(0.1)


@contextmanager
def running_server(path: str, *settings: str) -> Iterator[Server]:
    """A server on a CPU, ready; it has ended afterwards."""
    words = [f"model={path}", "decoder=isd", "mask_token_id=170", "device=cpu", "dtype=float32", *settings]
    program = [sys.executable, "-m", "benchmarks.serve_soak", "host", *words]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        end = threading.Timer(PATIENCE * (NUM_ROUNDS + 2), process.kill)
        end.start()
        try:
            yield Server(process)
        finally:
            end.cancel()
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


def host(words: list[str]) -> int:
    """Serve, print the port, and print what this process holds for each line that comes in."""
    from idlm.infer.cli.config import read_arguments
    from idlm.infer.server.config import ServeConfig
    from idlm.infer.server.run import FrontEnd, listen

    config, arguments = read_arguments("serve", ServeConfig, words)
    front = FrontEnd(config, arguments, api_key=config.api_key)

    def answer() -> None:
        for _ in sys.stdin:
            num_tasks = len(asyncio.all_tasks(front.loop))
            sockets, memory = num_sockets(os.getpid()), resident_bytes(os.getpid())
            print(json.dumps({"tasks": num_tasks, "sockets": sockets, "memory": memory}), flush=True)

    with listen("127.0.0.1", 0) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=answer, daemon=True).start()
        asyncio.run(front.run_on(listener))
    return 0


def num_sockets(pid: int) -> int:
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    start(measure, __doc__)
