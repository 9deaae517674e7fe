"""The parts of the decode benchmark: which arms run under which loads, and their result rows.

Shapes: R rows of a pass, D input width of a projection.
"""

from __future__ import annotations

import timeit
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

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
from benchmarks.engine.decoding.trace import Trace
from benchmarks.models import free_bytes, weights_of
from benchmarks.shared import Report
from benchmarks.stream import Timer
from idlm.devices import free_cached_memory
from idlm.infer.decoders.base import max_rows
from idlm.infer.decoders.rejection import strategy_of
from idlm.infer.models.loader import LoadedModel


@dataclass(slots=True, kw_only=True)
class Bench:
    """Model, measured rates and options of all parts; parts append to the lists."""

    model: LoadedModel
    stream: float
    contexts: list[int]
    concurrency: list[int]
    strides: list[int]
    strategies: list[str]
    sampling: str
    traces: dict[int, Trace]
    rounds: int
    num_tokens: int
    min_tokens: int
    report: Report
    problems: list[str] = field(default_factory=list)
    linears: dict[int, float] = field(default_factory=dict)

    def load(self, concurrency: int, context: int) -> Load:
        """The load of a round; few sequences emit more tokens each, so that the trace averages out."""
        return Load(
            concurrency=concurrency,
            context=context,
            num_tokens=max(self.num_tokens, self.min_tokens // concurrency),
            sampling=SAMPLING[self.sampling],
        )

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> None:
        self.report.add({**case, "sampling": self.sampling}, metric, value, unit, **more)


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
    for _ in range(bench.rounds):
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
        bench.linears[num_rows] = linears_ms(bench.model, num_rows, rounds=bench.rounds)
    case = {"decoder": arm.decoder, "strategy": arm.shown_strategy, "stride": arm.stride}
    case |= {"batch": load.concurrency, "context": load.context}
    floor = floor_ms(bench.model, load, bench.stream)
    bench.add(case, "step_ms", step, "ms", baseline=bench.linears[num_rows], floor=floor)


def sweep(bench: Bench) -> None:
    """Measure AR and every stride and strategy at every concurrency and context."""
    for context in bench.contexts:
        for concurrency in bench.concurrency:
            load = bench.load(concurrency, context)
            found = measure_arms(bench, [AR, *_isd_arms(bench, concurrency)], load)
            ar = found.pop("ar", None)
            for measured in found.values():
                if ar is not None:
                    _over_ar(bench, measured, ar)
                _over_formula(bench, measured)
            for stride in bench.strides:
                cold, branch = (found.get(f"{name} {stride}") for name in ("cold", "branch"))
                if cold and branch:
                    case = {"concurrency": concurrency, "context": context, "stride": stride}
                    ratio = branch.tokens_per_second() / cold.tokens_per_second()
                    bench.add(case, "branch_over_cold", ratio, "x")
                    bench.add(case, "branch_step_over_cold_step", branch.step_ms() / cold.step_ms(), "x")


def _isd_arms(bench: Bench, concurrency: int) -> list[Arm]:
    arms = []
    for strategy in bench.strategies:
        if strategy == "adaptive":
            stride = max(bench.strides)
            arms.append(Arm(name="adaptive", strategy="cold", stride=stride, adaptive=True))
            continue
        for stride in bench.strides:
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
    """The arm with the largest stride up to the authors'."""
    stride = max(stride for stride in bench.strides if stride <= PUBLISHED_STRIDE)
    return Arm(name=f"cold {stride}", strategy="cold", stride=stride)


def adapter(bench: Bench) -> None:
    """Compare the step of R-ISD (a gated adapter on MASK rows) with that of ISD."""
    arm = _published(bench)
    for concurrency in sorted({min(bench.concurrency), *(c for c in bench.concurrency if c in ADAPTED)}):
        load = bench.load(concurrency, bench.contexts[0])
        plain = _step_ms(bench, arm, load)
        with adapted(bench.model, ADAPTER_RANK):
            gated = _step_ms(bench, replace(arm, name=f"gated {arm.name}"), load)
        if plain and gated:
            case = {"concurrency": concurrency, "context": load.context, "stride": arm.stride}
            bench.add(case | {"rank": ADAPTER_RANK}, "risd_over_isd_step", gated / plain, "x")


def deterministic(bench: Bench) -> None:
    """Compare steps of deterministic mode (a row's bits do not depend on its batch) with normal ones."""
    for concurrency in sorted({bench.concurrency[0], *(c for c in bench.concurrency if c == 64)}):
        load = bench.load(concurrency, bench.contexts[0])
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


PARTS: dict[str, Callable[[Bench], None]] = {
    "sweep": sweep,
    "adapter": adapter,
    "deterministic": deterministic,
}
