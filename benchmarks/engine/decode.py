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
from dataclasses import replace
from typing import Any

from benchmarks.engine.decoding import arms as decode_arms
from benchmarks.engine.decoding.arms import Bench
from benchmarks.engine.decoding.harness import SAMPLING
from benchmarks.engine.decoding.trace import trace_of
from benchmarks.models import model_of
from benchmarks.shared import Report, chosen, defaults, numbers, parse_options, start
from benchmarks.stream import measure_rates
from idlm.contracts import Completion, SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import task_samples
from idlm.tasks import TASKS

CONCURRENCY = (1, 7, 64)
TOKENS = 512
STRATEGY, STRIDE = "branch", 4
DEFAULTS = defaults(
    "mode=full model=qwen3-8b device=cuda dtype=bfloat16 contexts= concurrency= strides= "
    "strategies= parts= sampling=T1 trace=p0.90 rounds= tokens= least= record=true "
    "num=200 mismatches= base="
)
MODES = {
    "full": defaults(
        "contexts=1024,8192,32768 concurrency=1,2,4,8,16,32,64,128,256 strides=2,3,4,8 "
        "strategies=cold,branch,adaptive parts=sweep,adapter,deterministic rounds=3 tokens=192 least=1024"
    ),
    "quick": defaults(
        "contexts=1024 concurrency=1,16,64 strides=2,4 strategies=cold,branch parts=sweep rounds=2 "
        "tokens=128 least=512"
    ),
}


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="decode")
    report = Report("decode", options)
    if options["mismatches"]:
        mismatches(report, options)
        return 0
    [mode] = chosen(options, "mode", MODES)
    options |= {key: value for key, value in MODES[mode].items() if not options[key]}
    parts = chosen(options, "parts", decode_arms.PARTS)
    [sampling] = chosen(options, "sampling", SAMPLING)
    strides = numbers(options["strides"])
    traces = {stride: trace_of(options["trace"], stride) for stride in strides}
    stream = measure_rates(options["device"]).stream
    bench = Bench(
        model=model_of(options),
        stream=stream,
        contexts=numbers(options["contexts"]),
        concurrency=numbers(options["concurrency"]),
        strides=strides,
        strategies=options["strategies"].split(","),
        sampling=sampling,
        traces=traces,
        rounds=int(options["rounds"]),
        num_tokens=int(options["tokens"]),
        min_tokens=int(options["least"]),
        report=report,
    )
    for part in parts:
        decode_arms.PARTS[part](bench)
    for problem in bench.problems:
        print(f"FAILED {problem}", file=sys.stderr)
    return int(bool(bench.problems))


def mismatches(report: Report, options: dict[str, str]) -> None:
    """Mismatched tokens of the adapter `options["mismatches"]` at each concurrency, against AR alone."""
    num, length = int(options["num"]), int(options["tokens"] or TOKENS)
    prompts = [sample.prompt for sample in task_samples(TASKS.get("ledger")(level="tiny"), "test", num)]
    expected = _answers(options, "ar", prompts, length, max_num_seqs=CONCURRENCY[-1])
    for concurrency in CONCURRENCY:
        choices = {"stride": STRIDE, "rejection_strategy": STRATEGY, "max_num_seqs": concurrency}
        answers = _answers(options, "isd", prompts, length, **choices)
        wrong = sum(_differing(a, b) for a, b in zip(answers, expected, strict=True))
        case = {"concurrency": concurrency, "prompts": num, "tokens": length, "dtype": options["dtype"]}
        report.add(case, "deterministic_mismatches", wrong, "tokens", gate_passed=wrong == 0)


def _answers(
    options: dict[str, str], decoder: str, prompts: list[str], length: int, **settings: Any
) -> list[Completion]:
    if options["base"]:
        settings["base"] = options["base"]
    settings |= {"device": options["device"], "dtype": options["dtype"], "deterministic": True}
    engine = Engine.from_pretrained(options["mismatches"], decoder, **settings)
    limit = engine.settings.max_length
    assert limit is not None
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    longest = max(map(len, engine.encode(prompts)))
    return engine.generate(prompts, [replace(params, max_tokens=min(length, limit - longest))] * len(prompts))


def _differing(ours: Completion, theirs: Completion) -> int:
    lengths = (len(ours.token_ids), len(theirs.token_ids))
    pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=False))
    return max(lengths) - next((index for index, (a, b) in pairs if a != b), min(lengths))


if __name__ == "__main__":
    start(measure, __doc__)
