"""What HTTP and server-sent events cost: one load over `idlm-serve` and on the engine itself, same settings.

    python -m benchmarks.http_overhead [path=CHECKPOINT] [device=cuda] [dtype=bfloat16] [decoder=ar]
        [concurrency=64] [prompt=128] [answer=256] [rounds=4] [parts=load,host] [record=true]

`concurrency` streams are under way all the time, `rounds` requests one after another on each. The client of
the server (lean_client.py) is this process; front end and engine have a process each. The first load of each
arm warms up and is not measured. Rows: `output_tokens_per_s` of both, `http_overhead` (the share that is
lost), `ttft_overhead_ms` (median time to the first token of single requests, minus that of the engine).

Part `host` measures processor time with an engine that computes nothing (stand_in.py): every `pass_ms` each
request gets `burst` tokens. Rows: `host_us_per_event` and `host_ms_per_request` of the client, the front end
and the engine process; an event is what a request gets from a pass.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from benchmarks.serving.over_http import stand_in
from benchmarks.serving.over_http.lean_client import run_on_server
from idlm.cli import command
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.clients.arms import launched, serve_program
from idlm.infer.clients.generator import Record, run_on_engine
from idlm.infer.clients.http import Server
from idlm.infer.clients.loads import Load, make_jobs
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
    "parts": "load",
    "pass_ms": "8",
    "burst": "1",
    "record": "true",
    "results": str(RESULTS),
}
NUM_SINGLE, READY_SECONDS = 20, 300.0
IDS = range(3, 90)
"""Token ids that every checkpoint has."""
Measured = tuple[float, float, int]
"""Tokens per second, seconds to the first token of single requests, and tokens of the load."""


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Run the parts; the status is 1 if an answer is not complete."""
    options = parse_options(arguments, DEFAULTS)
    parts = options["parts"].split(",")
    if unknown := sorted({*parts} - {*PARTS}):
        raise UserError("IDLM-0107", f"unknown part {', '.join(unknown)}", fix=f"use some of {[*PARTS]}")
    rows = [row for part in parts for row in PARTS[part](options)]
    for row in rows:
        print(f"{row['metric']:24s} {row['value']:10.4g} {row['unit']:9s} {row['case']}")
    if options["record"] == "true":
        append_rows("serve", rows, results=Path(options["results"]))
    return int(any(row["gate_passed"] is False for row in rows))


def _load_rows(options: dict[str, str]) -> list[dict[str, Any]]:
    """Both arms."""
    loads = make_loads(options)
    settings: dict[str, Any] = {name: options[name] for name in ("device", "dtype", "decoder")}
    settings["warmup"] = "auto"
    settings["max_num_seqs"] = options["concurrency"]
    words = [f"{name}={value}" for name, value in settings.items()]
    with launched(
        serve_program([*words, f"model={options['path']}"]), "/ready", seconds=READY_SECONDS
    ) as url:
        http_rate, http_ttft, num_http = measure_arm(partial(run_on_server, Server(url), url), loads)
    settings["max_num_seqs"] = int(options["concurrency"])
    engine = Engine.from_pretrained(options["path"], **settings)
    rate, ttft, num_tokens = measure_arm(partial(run_on_engine, engine), loads)
    engine.close()
    is_complete = num_http == num_tokens == len(loads[1].jobs) * int(options["answer"])
    case: dict[str, Any] = {name: int(options[name]) for name in ("concurrency", "prompt", "answer")}
    case["decoder"] = options["decoder"]
    return [
        _row(case | {"api": "engine"}, "output_tokens_per_s", rate, "tokens/s"),
        _row(case | {"api": "http"}, "output_tokens_per_s", http_rate, "tokens/s", baseline=rate),
        _row(case, "http_overhead", 1 - http_rate / rate, "fraction", gate_passed=is_complete),
        _row(case, "ttft_overhead_ms", 1e3 * (http_ttft - ttft), "ms", gate_passed=is_complete),
    ]


def _host_rows(options: dict[str, str]) -> list[dict[str, Any]]:
    """Processor time of each process: long answers minus short ones, so that requests cancel."""
    names = ("concurrency", "prompt", "answer", "burst")
    concurrency, prompt, answer, burst = (int(options[name]) for name in names)
    num, dice, pass_ms = int(options["rounds"]) * concurrency, random.Random(0), float(options["pass_ms"])
    lengths = (burst, burst, answer * burst)
    params = SamplingParams(ignore_eos=True)
    loads = [
        Load("fixed", make_jobs([(prompt, longest)] * num, params, ids=IDS, dice=dice), concurrency)
        for longest in lengths
    ]
    words = [f"model={TINY}", "device=cpu", f"max_num_seqs={concurrency}", "num_pages=64"]
    with launched(stand_in.program(pass_ms, burst, words), "/ready", seconds=READY_SECONDS) as url:
        server, taken, num_tokens = Server(url), [], 0
        pids = _processes(url)
        for load in loads:
            before = _seconds(pids)
            num_tokens += sum(record.num_output_tokens for record in run_on_server(server, url, load))
            taken.append({name: now - before[name] for name, now in _seconds(pids).items()})
    case = {name: int(options[name]) for name in names}
    rows, is_complete = [], num_tokens == num * sum(lengths)
    for process in pids:
        short, long = taken[1][process], taken[2][process]
        event = (long - short) / (num * (answer - 1))
        own = case | {"process": process}
        rows.append(_row(own, "host_us_per_event", 1e6 * event, "us", gate_passed=is_complete))
        request = 1e3 * (short / num - event)
        rows.append(_row(own, "host_ms_per_request", request, "ms", gate_passed=is_complete))
    return rows


PARTS = {"load": _load_rows, "host": _host_rows}


def _processes(url: str) -> dict[str, int]:
    """Process ids; the front end is the engine's parent."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/server_info", timeout=10) as response:
        engine = json.load(response)["engine"]["pid"]
    stat = Path(f"/proc/{engine}/stat").read_text()
    return {"client": os.getpid(), "front end": int(stat.rpartition(")")[2].split()[1]), "engine": engine}


def _seconds(pids: dict[str, int]) -> dict[str, float]:
    """Processor time of each so far, with all its threads."""
    # clock_getcpuclockid(3), which Python has for threads only.
    return {name: time.clock_gettime(~pid << 3 | 2) for name, pid in pids.items()}


def _row(case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    return result_row(
        "serve", case, metric, value, unit, command="python -m benchmarks.http_overhead", **more
    )


def make_loads(options: dict[str, str]) -> list[Load]:
    """One load to warm up, the one that is measured, and single requests; no two prompts are alike."""
    dice, concurrency = random.Random(0), int(options["concurrency"])
    prompt, answer = int(options["prompt"]), int(options["answer"])
    shapes = (
        (concurrency, answer, concurrency),
        (int(options["rounds"]) * concurrency, answer, concurrency),
        (NUM_SINGLE, 2, 1),
    )
    params = SamplingParams(ignore_eos=True)
    return [
        Load("fixed", make_jobs([(prompt, longest)] * num, params, ids=IDS, dice=dice), at_once)
        for num, longest, at_once in shapes
    ]


def measure_arm(run: Callable[[Load], list[Record]], loads: list[Load]) -> Measured:
    """Run all loads; their figures."""
    # As the server's processes do, so that garbage collection costs both arms alike.
    gc.collect()
    gc.freeze()
    run(loads[0])
    records, singles = run(loads[1]), run(loads[2])
    num_tokens = sum(record.num_output_tokens for record in records)
    seconds = max(record.end for record in records) - min(record.start for record in records)
    first = statistics.median(record.times[0] - record.start for record in singles)
    return num_tokens / seconds, first, num_tokens


if __name__ == "__main__":
    sys.exit(main())
