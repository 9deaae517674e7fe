"""Many streams, of which some are left at a random chunk: what `idlm-serve` holds, and what others read.

    python -m benchmarks.serve_soak [requests=10000] [concurrency=256] [leave=0.3] [answer=16]
        [path=CHECKPOINT] [record=true]

The load is a few requests many times over, so that a quiet run, one stream at a time to its end,
gives the text of each; no choice in them is a near tie, which the rounding of a batch decides. It goes in
rounds; after each, when the server is idle, its engine's process and this one, which serves and sends, are
looked at. Rows: `requests` (the gate: every stream that was not left has the text of the quiet run, and
nothing leaked), `leaked_pages`, `leaked_sockets`, `leaked_tasks` (since before the load), `memory_drift`
(resident memory of both processes after the last round over that after the first)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared import Report, defaults, parse_options, start
from tests.integration.server.servers import TINY, Running, running

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
    """What an idle server holds; `memory`: resident bytes of its engine and of this process, which serves."""

    pages: float
    sockets: int
    tasks: int
    memory: int


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS)
    kinds = clear_kinds(options["path"], int(options["answer"]))
    concurrency = int(options["concurrency"])
    settings = (f"max_num_seqs={concurrency}", "max_length=256", "page_size=16")
    with running(*settings, model=Path(options["path"])) as server:
        port = int(server.url.rpartition(":")[2])
        quiet = asyncio.run(read_streams(port, kinds, concurrency=1))
        before, states, num_wrong, num_left = state_of(server), list[State](), 0, 0
        for number in range(NUM_ROUNDS):
            load = leaving(kinds, int(options["requests"]) // NUM_ROUNDS, float(options["leave"]), number)
            found = asyncio.run(read_streams(port, load, concurrency=concurrency))
            expected = dict(zip(kinds, quiet, strict=True))
            for stream, text in zip(load, found, strict=True):
                num_wrong += text is not None and text != expected[stream._replace(leaves_after=None)]
            num_left += found.count(None)
            states.append(state_of(server))
            print(
                f"round {number + 1}: {len(load)} streams, {found.count(None)} left, {states[-1]}", flush=True
            )
    case: dict[str, Any] = {"leave": options["leave"], "concurrency": concurrency}
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
    rng = random.Random(seed)
    chosen = [rng.choice(kinds) for _ in range(num)]
    return [
        kind._replace(leaves_after=rng.randrange(kind.answer // 3 + 1)) if rng.random() < share else kind
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


def state_of(server: Running) -> State:
    server.wait_until_idle()
    # Connections that were left close within this time.
    time.sleep(1)
    engine = server.client.get("/server_info").json()["engine"]
    processes = (os.getpid(), engine["pid"])
    return State(
        pages=server.metric("vllm:kv_cache_usage_perc") * engine["num_pages"],
        sockets=sum(map(num_sockets, processes)),
        tasks=server.num_tasks,
        memory=sum(map(resident_bytes, processes)),
    )


def num_sockets(pid: int) -> int:
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    start(measure, __doc__)
