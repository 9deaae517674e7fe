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
import timeit
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import models
from benchmarks.engine.decoding.harness import (
    SAMPLING,
    Arm,
    Load,
    Measured,
    SteadyEngine,
    adapted,
    fits,
    floor_ms,
    memory_of,
)
from benchmarks.engine.decoding.replay import Trace, trace_of
from benchmarks.models import free_bytes, weights_of
from benchmarks.shared import Report, chosen, defaults, numbers, parse_options, start
from benchmarks.stream import Timer
from idlm.contracts import Completion, SamplingParams
from idlm.devices import free_cached_memory
from idlm.infer.decoders.base import max_rows
from idlm.infer.decoders.rejection import strategy_of
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import task_samples
from idlm.infer.models.loader import LoadedModel
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
    if options["mismatches"]:
        mismatches(Report("decode", options), options)
        return 0
    [mode] = chosen(options, "mode", MODES)
    options |= {key: value for key, value in MODES[mode].items() if not options[key]}
    parts = chosen(options, "parts", PARTS)
    chosen(options, "sampling", SAMPLING)
    traces = {stride: trace_of(options["trace"], stride) for stride in numbers(options["strides"])}
    bench = Bench(**models.opened("decode", options), traces=traces)
    for part in parts:
        PARTS[part](bench)
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


@dataclass(slots=True, kw_only=True)
class Bench(models.Bench):
    """What all parts have; parts append to `problems` and `linears`."""

    traces: dict[int, Trace]
    problems: list[str] = field(default_factory=list)
    linears: dict[int, float] = field(default_factory=dict)

    def numbers(self, name: str) -> list[int]:
        return numbers(self.options[name])

    def load(self, concurrency: int, context: int) -> Load:
        """The load of a round; few sequences emit more tokens each, so that the trace averages out."""
        return Load(
            concurrency=concurrency,
            context=context,
            num_tokens=max(self.number("tokens"), self.number("least") // concurrency),
            sampling=SAMPLING[self.options["sampling"]],
        )

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> None:
        self.report.add({**case, "sampling": self.options["sampling"]}, metric, value, unit, **more)


def linears_ms(model: LoadedModel, num_rows: int, *, rounds: int, num_head_rows: int | None = None) -> float:
    """Time of all linears of a pass by `F.linear`, replayed as one graph. `num_head_rows`: rows that need
    logits, None for all.
    """
    *weights, head = weights_of(model)
    inputs_RD = {
        width: torch.randn(num_rows, width, device=model.device, dtype=model.dtype)
        for width in {weight.shape[1] for weight in (*weights, head)}
    }

    def library() -> None:
        for weight in weights:
            F.linear(inputs_RD[weight.shape[1]], weight)
        F.linear(inputs_RD[head.shape[1]][:num_head_rows], head)

    if model.device.type == "cuda":
        return Timer(rounds=rounds, bytes_per_us=0.0).us_per_call([library]) / 1e3
    return 1e3 * timeit.timeit(library, number=1)


AR = Arm(name="ar", decoder="ar", strategy="cold", stride=1)
ADAPTER_RANK = 128
ADAPTED = (1, 2, 4, 8, 16, 64)
"""Numbers of sequences at which an adapter is measured; its share of a step shrinks beyond these."""
BRANCH_ROWS = 512
"""Branch passes of more rows are not measured: they are bound by arithmetic long before."""
PUBLISHED_STRIDE = 4


def measure_arms(bench: Bench, arms: list[Arm], load: Load, *, has_rows: bool = True) -> dict[str, Measured]:
    """Measure all arms that fit and run, with rounds in turn for arms that fit in memory together.
    `has_rows`: record their step times as result rows.
    """
    found: dict[str, Measured] = {}
    waiting = [arm for arm in arms if fits(bench.model, arm, load)]
    while waiting:
        together, needed, free = [waiting.pop(0)], 0.0, free_bytes(bench.model)
        while waiting and (needed := needed + memory_of(bench.model, waiting[0], load)) < free / 2:
            together.append(waiting.pop(0))
        found |= _in_turns(bench, together, load)
        # After the function that held the engines: their caches would leave the next ones no memory.
        free_cached_memory()
    for measured in found.values():
        _note(bench, measured, has_rows=has_rows)
    return found


def _in_turns(bench: Bench, arms: list[Arm], load: Load) -> dict[str, Measured]:
    """Run rounds of all arms in turn, with all their engines in memory. Arms that fail are left out."""
    engines: list[tuple[SteadyEngine, Measured]] = []
    for arm in arms:
        try:
            steady = SteadyEngine(bench.model, arm, load, bench.traces.get(arm.stride))
        except RuntimeError:
            _fail(bench, arm, load)
            continue
        width = max_rows(steady.engine.decoder, steady.engine.table.max_length)
        engines.append((steady, Measured(arm=arm, load=load, width=width)))
    for _ in range(bench.number("rounds")):
        for steady, measured in list(engines):
            try:
                steady.measure(measured)
            except RuntimeError:
                _fail(bench, steady.arm, load)
                engines.remove((steady, measured))
    return {measured.arm.name: measured for _, measured in engines if measured.passes}


def _fail(bench: Bench, arm: Arm, load: Load) -> None:
    where = f"{arm.name} at concurrency {load.concurrency}, context {load.context}"
    bench.problems.append(where)
    print(f"FAILED {where}\n{traceback.format_exc()}", flush=True)


def _note(bench: Bench, measured: Measured, *, has_rows: bool) -> None:
    """Print the measurement; `has_rows`: record the step time with its floors."""
    arm, load, step = measured.arm, measured.load, measured.step_ms()
    print(
        f"{arm.name:24s} C={load.concurrency:<4d} {load.context:>6d} {step:8.3f} ms/step, "
        f"{measured.tokens_per_second():9.1f} tok/s, TPF {measured.tokens_per_forward():.3f}",
        flush=True,
    )
    if not has_rows:
        return
    num_rows = load.concurrency * measured.width
    if num_rows not in bench.linears:
        bench.linears[num_rows] = linears_ms(bench.model, num_rows, rounds=bench.number("rounds"))
    case = {"decoder": arm.decoder, "strategy": arm.shown_strategy, "stride": arm.stride}
    case |= {"batch": load.concurrency, "context": load.context}
    floor = floor_ms(bench.model, load, bench.rates.stream)
    bench.add(case, "step_ms", step, "ms", baseline=bench.linears[num_rows], floor=floor)


def sweep(bench: Bench) -> None:
    """Measure AR and every stride and strategy at every concurrency and context."""
    for context in bench.numbers("contexts"):
        for concurrency in bench.numbers("concurrency"):
            load = bench.load(concurrency, context)
            found = measure_arms(bench, [AR, *_isd_arms(bench, concurrency)], load)
            ar = found.pop("ar", None)
            for measured in found.values():
                if ar is not None:
                    _over_ar(bench, measured, ar)
                _over_formula(bench, measured)
            for stride in bench.numbers("strides"):
                cold, branch = (found.get(f"{name} {stride}") for name in ("cold", "branch"))
                if cold and branch:
                    case = {"concurrency": concurrency, "context": context, "stride": stride}
                    ratio = branch.tokens_per_second() / cold.tokens_per_second()
                    bench.add(case, "branch_over_cold", ratio, "x")
                    bench.add(case, "branch_step_over_cold_step", branch.step_ms() / cold.step_ms(), "x")


def _isd_arms(bench: Bench, concurrency: int) -> list[Arm]:
    arms = []
    for strategy in bench.options["strategies"].split(","):
        if strategy == "adaptive":
            stride = max(bench.numbers("strides"))
            arms.append(Arm(name="adaptive", strategy="cold", stride=stride, adaptive=True))
            continue
        for stride in bench.numbers("strides"):
            if strategy != "branch" or concurrency * stride * stride <= BRANCH_ROWS:
                arms.append(Arm(name=f"{strategy} {stride}", strategy=strategy, stride=stride))
    return arms


def _over_ar(bench: Bench, measured: Measured, ar: Measured) -> None:
    arm, load = measured.arm, measured.load
    case = {
        "concurrency": load.concurrency,
        "context": load.context,
        "strategy": arm.shown_strategy,
        "stride": arm.stride,
        "trace": bench.traces[arm.stride].name,
    }
    ratio = measured.tokens_per_second() / ar.tokens_per_second()
    bench.add(case, "isd_over_ar", ratio, "x")
    bench.add(case, "isd_step_over_ar_step", measured.step_ms() / ar.step_ms(), "x")


def _over_formula(bench: Bench, measured: Measured) -> None:
    """Compare tokens per forward with what the strategy expects at the trace's acceptance."""
    arm = measured.arm
    if arm.adaptive:
        return
    predicted = strategy_of(arm.strategy).tokens_per_forward(bench.traces[arm.stride].acceptance())
    case = {"strategy": arm.strategy, "stride": arm.stride, "concurrency": measured.load.concurrency}
    bench.add(case, "tokens_per_forward", measured.tokens_per_forward(), "tokens", baseline=predicted)


def _published(bench: Bench) -> Arm:
    stride = max(stride for stride in bench.numbers("strides") if stride <= PUBLISHED_STRIDE)
    return Arm(name=f"cold {stride}", strategy="cold", stride=stride)


def adapter(bench: Bench) -> None:
    """Compare the step of R-ISD (a gated adapter on MASK rows) with that of ISD."""
    arm = _published(bench)
    few = set(ADAPTED) & set(bench.numbers("concurrency"))
    for concurrency in sorted({min(bench.numbers("concurrency")), *few}):
        load = bench.load(concurrency, bench.numbers("contexts")[0])
        plain = _step_ms(bench, arm, load)
        with adapted(bench.model, ADAPTER_RANK):
            gated = _step_ms(bench, replace(arm, name=f"gated {arm.name}"), load)
        if plain and gated:
            case = {"concurrency": concurrency, "context": load.context, "stride": arm.stride}
            bench.add(case | {"rank": ADAPTER_RANK}, "risd_over_isd_step", gated / plain, "x")


def deterministic(bench: Bench) -> None:
    """Compare steps of deterministic mode (a row's bits do not depend on its batch) with normal ones."""
    listed = bench.numbers("concurrency")
    for concurrency in sorted({listed[0], *({64} & set(listed))}):
        load = bench.load(concurrency, bench.numbers("contexts")[0])
        for arm in (AR, _published(bench)):
            # One after the other: both share a trunk, which is switched to deterministic mode in between.
            plain = _step_ms(bench, arm, load)
            fixed = _step_ms(bench, replace(arm, name=f"deterministic {arm.name}", deterministic=True), load)
            if plain and fixed:
                case = {"decoder": arm.decoder, "stride": arm.stride, "concurrency": concurrency}
                bench.add(case, "deterministic_over_plain_step", fixed / plain, "x")


def _step_ms(bench: Bench, arm: Arm, load: Load) -> float | None:
    """Step time of one arm alone; None if it does not fit or fails."""
    found = measure_arms(bench, [arm], load, has_rows=False)
    return found[arm.name].step_ms() if found else None


PARTS = {"sweep": sweep, "adapter": adapter, "deterministic": deterministic}


if __name__ == "__main__":
    start(measure, __doc__)
