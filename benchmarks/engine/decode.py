"""Decoding on one GPU: AR and ISD against the read-only stream, over concurrency, context and stride.

    python -m benchmarks.decode [mode=quick|full] [contexts=1024,8192,32768] [concurrency=1,2,..,256]
        [strides=2,3,4,8] [strategies=cold,branch,adaptive] [sampling=T1|greedy|qwen3] [trace=p0.90]
        [parts=sweep,host,adapter,deterministic] [rounds=3] [tokens=192] [least=1024] [passes=240]
        [record=true]
    python -m benchmarks.decode mismatches=ADAPTER        (R-ISD against its base's AR, bit for bit)

One process measures the read-only stream and stock linears, then runs the whole engine on random weights of
the true shape, every sequence in mid-answer. One trace, the same in all arms, replaces the verdicts on drafts
(decoding/replay.py). It needs a GPU.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.engine.decoding import arms as decode_arms
from benchmarks.engine.decoding import mismatches as decode_mismatches
from benchmarks.engine.decoding import report as decode_report
from benchmarks.engine.decoding.bench import Bench
from benchmarks.engine.decoding.harness import SAMPLING, random_model
from benchmarks.engine.decoding.trace import trace_of
from benchmarks.shared import defaults, parse_options, save, start
from benchmarks.stream import stream_rate
from idlm.errors import UserError
from idlm.infer.models.loader import DTYPES

DEFAULTS = defaults(
    "mode=full model=qwen3-8b device=cuda dtype=bfloat16 contexts= concurrency= strides= "
    "strategies= parts= sampling=T1 trace=p0.90 rounds= tokens= least= passes=240 record=true "
    "num=200 mismatches= base="
)
MODES = {
    "full": {
        "contexts": "1024,8192,32768",
        "concurrency": "1,2,4,8,16,32,64,128,256",
        "strides": "2,3,4,8",
        "strategies": "cold,branch,adaptive",
        "parts": "sweep,host,adapter,deterministic",
        "rounds": "3",
        "tokens": "192",
        "least": "1024",
    },
    "quick": {
        "contexts": "1024",
        "concurrency": "1,16,64",
        "strides": "2,4",
        "strategies": "cold,branch",
        "parts": "sweep",
        "rounds": "2",
        "tokens": "128",
        "least": "512",
    },
}


def measure(arguments: list[str]) -> int:
    """Run the parts that the arguments name; returns the exit status, 1 when an arm failed."""
    options = parse_options(arguments, DEFAULTS, needs_gpu="decode")
    if options["mismatches"]:
        return _finish(options, decode_mismatches.rows(options))
    chosen = _mode(options["mode"])
    options |= {key: value for key, value in chosen.items() if not options[key]}
    bench = _bench(options)
    parts = options["parts"].split(",")
    for part in parts:
        decode_arms.PARTS[part](bench)
    print(decode_report.table(bench.measured, bench.floors))
    for line in bench.lines:
        print(line)
    status = _finish(options, bench.rows)
    for problem in bench.problems:
        print(f"FAILED {problem}", file=sys.stderr)
    return 1 if bench.problems else status


def _mode(name: str) -> dict[str, str]:
    if name not in MODES:
        raise UserError("IDLM-0107", f"mode={name!r} is unknown", fix=f"use one of {sorted(MODES)}")
    return MODES[name]


def _bench(options: dict[str, str]) -> Bench:
    """Measure the stream, create the model and read the options."""
    unknown = [part for part in options["parts"].split(",") if part not in decode_arms.PARTS]
    if unknown or options["sampling"] not in SAMPLING:
        raise UserError(
            "IDLM-0107",
            f"parts={options['parts']} sampling={options['sampling']}",
            fix=f"use parts of {sorted(decode_arms.PARTS)} and sampling of {sorted(SAMPLING)}",
        )
    rate = stream_rate(device=options["device"])
    print(f"read-only stream {rate / 1e12:.3f} TB/s", flush=True)
    start = time.perf_counter()
    model = random_model(options["model"], device=options["device"], dtype=DTYPES[options["dtype"]])
    print(f"random weights of {options['model']} after {time.perf_counter() - start:.1f} s", flush=True)
    strides = _numbers(options["strides"])
    traces = {stride: trace_of(options["trace"], stride) for stride in strides}
    for stride, trace in traces.items():
        print(
            f"acceptance replayed from trace {trace.name} at stride {stride}: {_shares(trace.acceptance())}"
        )
    return Bench(
        model=model,
        stream=rate,
        contexts=_numbers(options["contexts"]),
        concurrency=_numbers(options["concurrency"]),
        strides=strides,
        strategies=options["strategies"].split(","),
        sampling=options["sampling"],
        traces=traces,
        rounds=int(options["rounds"]),
        num_tokens=int(options["tokens"]),
        least_tokens=int(options["least"]),
        num_passes=int(options["passes"]),
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shares(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _finish(options: dict[str, str], rows: list[dict[str, Any]]) -> int:
    save("decode", rows, options)
    return 0


if __name__ == "__main__":
    start(measure, __doc__)
