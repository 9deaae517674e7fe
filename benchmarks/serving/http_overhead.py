"""What HTTP and server-sent events cost: one load over `idlm-serve` and on the engine itself, same settings.

    python -m benchmarks.http_overhead [path=CHECKPOINT] [device=cuda] [dtype=bfloat16] [decoder=ar]
        [concurrency=64] [prompt=128] [answer=256] [rounds=4] [record=true]

`concurrency` streams are under way all the time, `rounds` requests one after another on each. The client of
the server is this process; front end and engine have a process each. The first load of each arm warms up and
is not measured. Rows: `output_tokens_per_s` of both, `http_overhead` (the share that is lost),
`ttft_overhead_ms` (median time to the first token of single requests, minus that of the engine).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from idlm.cli import command
from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine

TINY = Path(__file__).resolve().parents[2] / "recipes" / "assets" / "tiny_ar"
DEFAULTS = {
    "path": str(TINY),
    "device": "cuda",
    "dtype": "auto",
    "decoder": "ar",
    "concurrency": "64",
    "prompt": "128",
    "answer": "256",
    "rounds": "4",
    "record": "true",
    "results": str(RESULTS),
}
NUM_SINGLE, READY_SECONDS = 20, 300.0
Measured = tuple[float, float, int]
"""Tokens per second, seconds to the first token of single requests, and tokens of the load."""


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Run both arms; the status is 1 if an answer is not complete."""
    options = parse_options(arguments, DEFAULTS)
    concurrency, answer = int(options["concurrency"]), int(options["answer"])
    loads = _loads(options)
    with _server(options) as port:
        http_rate, http_ttft, num_http = asyncio.run(_over_http(port, loads, concurrency, answer))
    rate, ttft, num_tokens = _on_engine(options, loads, concurrency, answer)
    is_complete = num_http == num_tokens == len(loads[1]) * answer
    case: dict[str, Any] = {name: int(options[name]) for name in ("concurrency", "prompt", "answer")}
    case["decoder"] = options["decoder"]
    rows = [
        _row(case | {"api": "engine"}, "output_tokens_per_s", rate, "tokens/s"),
        _row(case | {"api": "http"}, "output_tokens_per_s", http_rate, "tokens/s", baseline=rate),
        _row(case, "http_overhead", 1 - http_rate / rate, "fraction", gate_passed=is_complete),
        _row(case, "ttft_overhead_ms", 1e3 * (http_ttft - ttft), "ms", gate_passed=is_complete),
    ]
    for row in rows:
        print(f"{row['metric']:24s} {row['value']:10.4g} {row['unit']:9s} {row['case']}")
    if options["record"] == "true":
        append_rows("serve", rows, results=Path(options["results"]))
    return int(not is_complete)


def _row(case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    return result_row(
        "serve", case, metric, value, unit, command="python -m benchmarks.http_overhead", **more
    )


def _loads(options: dict[str, str]) -> list[list[list[int]]]:
    """Prompts of two loads, the first to warm up, and of the single requests; no two are alike."""
    dice, concurrency = random.Random(0), int(options["concurrency"])
    numbers = (concurrency, int(options["rounds"]) * concurrency, NUM_SINGLE)
    # Ids that every checkpoint has.
    return [
        [[dice.randrange(3, 150) for _ in range(int(options["prompt"]))] for _ in range(n)] for n in numbers
    ]


def _on_engine(
    options: dict[str, str], loads: list[list[list[int]]], concurrency: int, answer: int
) -> Measured:
    """The arm without HTTP; its events have text too."""
    settings: dict[str, Any] = {"device": options["device"], "dtype": options["dtype"]}
    engine = Engine.from_pretrained(options["path"], options["decoder"], max_num_seqs=concurrency, **settings)
    for prompts in loads[:2]:
        start_time, num_tokens, waiting = time.perf_counter(), 0, list(enumerate(prompts))[::-1]
        num_active = 0
        while waiting or num_active:
            while waiting and num_active < concurrency:
                number, prompt = waiting.pop()
                params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=number)
                engine.add_request(str(number), prompt, params, streams=True)
                num_active += 1
            for event in engine.step():
                num_tokens += len(event.token_ids)
                num_active -= event.completion is not None
        seconds = time.perf_counter() - start_time
    ttfts = []
    for prompt in loads[2]:
        start_time = time.perf_counter()
        stream = engine.stream(prompt, SamplingParams(max_tokens=2, ignore_eos=True, seed=0))
        next(stream)
        ttfts.append(time.perf_counter() - start_time)
        list(stream)
    engine.close()
    return num_tokens / seconds, statistics.median(ttfts), num_tokens


async def _over_http(port: int, loads: list[list[list[int]]], concurrency: int, answer: int) -> Measured:
    """The arm over HTTP: as many connections as streams, each kept for its requests."""
    for prompts in loads[:2]:
        start_time, waiting = time.perf_counter(), list(enumerate(prompts))[::-1]
        counts = await asyncio.gather(*(_worker(port, waiting, answer) for _ in range(concurrency)))
        num_tokens, seconds = sum(counts), time.perf_counter() - start_time
    ttfts = [(await _stream(port, 0, prompt, 2))[1] for prompt in loads[2]]
    return num_tokens / seconds, statistics.median(ttfts), num_tokens


async def _worker(port: int, waiting: list[tuple[int, list[int]]], answer: int) -> int:
    """Answer requests until none waits; returns the tokens that the server says it sent."""
    num_tokens = 0
    while waiting:
        num_tokens += (await _stream(port, *waiting.pop(), answer))[0]
    return num_tokens


async def _stream(port: int, seed: int, prompt: list[int], answer: int) -> tuple[int, float]:
    """Completion tokens of one streamed request, and seconds to its first chunk."""
    fields = {"prompt": prompt, "max_tokens": answer, "seed": seed, "ignore_eos": True, "stream": True}
    body = json.dumps(fields | {"stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    start_time, first = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    tail = b""
    while data := await reader.read(1 << 16):
        tail = tail[-4096:] + data
        if not first and b"data: " in tail:
            first = time.perf_counter() - start_time
    writer.close()
    usage = tail[tail.rindex(b'"completion_tokens":') :].split(b":")[1].split(b",")[0]
    return int(usage), first


@contextmanager
def _server(options: dict[str, str]) -> Iterator[int]:
    """The port of a server that is ready."""
    words = [f"{name}={options[name]}" for name in ("device", "dtype", "decoder")]
    words += [f"model={options['path']}", "port=0", f"max_num_seqs={options['concurrency']}"]
    program = [sys.executable, "-m", "idlm.infer.server.cli", *words]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = next(line for line in process.stderr if "is served at" in line).split(" at ")[1].split()[0]
        deadline = time.monotonic() + READY_SECONDS
        while not _is_ready(url):
            assert process.poll() is None and time.monotonic() < deadline, "the server is not ready"
            time.sleep(0.1)
        yield int(url.rpartition(":")[2])
    finally:
        process.terminate()
        process.communicate()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
