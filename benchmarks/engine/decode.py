"""Decoding on one GPU: AR and ISD against the read-only stream, over concurrency, context and stride.

    python -m benchmarks.decode [mode=quick|full] [contexts=1024,8192,32768] [concurrency=1,2,..,256]
        [strides=2,3,4,8] [strategies=cold,branch,adaptive] [sampling=T1|greedy|qwen3] [trace=p0.90]
        [parts=sweep,adapter,deterministic] [rounds=3] [tokens=192] [least=1024] [record=true]
    python -m benchmarks.decode mismatches=ADAPTER        (R-ISD against its base's AR, bit for bit)

One process measures the read-only stream and stock linears, then runs the whole engine on random weights of
the true shape, every sequence in mid-answer. One trace, the same in all arms, replaces the verdicts on drafts
(decoding/replay.py). It needs a GPU.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.engine.decoding import arms as decode_arms
from benchmarks.engine.decoding.arms import Bench
from benchmarks.engine.decoding.harness import SAMPLING, Measured, random_model
from benchmarks.engine.decoding.trace import trace_of
from benchmarks.results import result_row
from benchmarks.shared import defaults, parse_options, save, start
from benchmarks.stream import stream_rate
from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import task_samples
from idlm.infer.models.loader import DTYPES
from idlm.tasks import TASKS

CONCURRENCY = (1, 7, 64)
TOKENS = 512
STRATEGY, STRIDE = "branch", 4


def mismatches(options: dict[str, str]) -> list[dict[str, Any]]:
    """Mismatched tokens of the adapter `options["mismatches"]` at each concurrency, against AR alone."""
    device, num = options["device"], int(options["num"])
    length = int(options["tokens"] or TOKENS)
    prompts = [sample.prompt for sample in task_samples(TASKS.get("ledger")(level="tiny"), "test", num)]
    settings: dict[str, Any] = {"device": device, "dtype": options["dtype"], "deterministic": True}
    if options["base"]:
        settings["base"] = options["base"]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)] * len(prompts)
    expected = _answers(options, "ar", {**settings, "max_num_seqs": CONCURRENCY[-1]}, prompts, params)
    found = []
    for concurrency in CONCURRENCY:
        choices = {"stride": STRIDE, "rejection_strategy": STRATEGY, "max_num_seqs": concurrency}
        answers = _answers(options, "isd", {**settings, **choices}, prompts, params)
        wrong = sum(_differing(a, b) for a, b in zip(answers, expected, strict=True))
        case = {"concurrency": concurrency, "prompts": num, "tokens": length, "dtype": options["dtype"]}
        print(f"concurrency {concurrency}: {wrong} of {num * length} tokens differ", flush=True)
        found.append(
            result_row("decode", case, "deterministic_mismatches", wrong, "tokens", gate_passed=wrong == 0)
        )
    return found


def _answers(
    options: dict[str, str],
    decoder: str,
    settings: dict[str, Any],
    prompts: list[str],
    params: list[SamplingParams],
) -> list[Completion]:
    engine = Engine.from_pretrained(options["mismatches"], decoder, **settings)
    room = engine.settings.max_length
    assert room is not None
    longest = max(map(len, engine.encode(prompts)))
    shortened = [replace(one, max_tokens=min(one.max_tokens or room, room - longest)) for one in params]
    return engine.generate(prompts, shortened)


def _differing(ours: Completion, theirs: Completion) -> int:
    """Tokens from the first difference on."""
    length = max(len(ours.token_ids), len(theirs.token_ids))
    pairs = enumerate(zip(ours.token_ids, theirs.token_ids))
    return length - next(
        (place for place, (a, b) in pairs if a != b), min(map(len, (ours.token_ids, theirs.token_ids)))
    )


HEAD = ("context", "C", "arm", "ms/step", "of stream", "TPF", "tok/s", "tok/s/user", "over AR")


def table(measured: list[Measured], floors: dict[tuple[int, int], float]) -> str:
    """One line per arm and load, in Markdown, which is readable in a terminal too."""
    ar = {_load(one): one.tokens_per_second() for one in measured if one.arm.decoder == "ar"}
    lines = [HEAD, *(_line(one, floors, ar) for one in measured)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    text = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths)) + " |" for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join(["", text[0], rule, *text[1:], ""])


def _load(one: Measured) -> tuple[int, int]:
    return one.load.concurrency, one.load.context


def _line(
    one: Measured, floors: dict[tuple[int, int], float], ar: dict[tuple[int, int], float]
) -> tuple[str, ...]:
    rate, load = one.tokens_per_second(), _load(one)
    return (
        str(one.load.context),
        str(one.load.concurrency),
        one.arm.name,
        f"{one.step_ms():.3f}",
        f"{floors[load] / one.step_ms():.1%}",
        f"{one.tokens_per_forward():.3f}",
        f"{rate:.0f}",
        f"{rate / one.load.concurrency:.1f}",
        f"{rate / ar[load]:.2f}x" if load in ar else "-",
    )


DEFAULTS = defaults(
    "mode=full model=qwen3-8b device=cuda dtype=bfloat16 contexts= concurrency= strides= "
    "strategies= parts= sampling=T1 trace=p0.90 rounds= tokens= least= record=true "
    "num=200 mismatches= base="
)
MODES = {
    "full": {
        "contexts": "1024,8192,32768",
        "concurrency": "1,2,4,8,16,32,64,128,256",
        "strides": "2,3,4,8",
        "strategies": "cold,branch,adaptive",
        "parts": "sweep,adapter,deterministic",
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
        return _finish(options, mismatches(options))
    chosen = _mode(options["mode"])
    options |= {key: value for key, value in chosen.items() if not options[key]}
    bench = _bench(options)
    parts = options["parts"].split(",")
    for part in parts:
        decode_arms.PARTS[part](bench)
    print(table(bench.measured, bench.floors))
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
