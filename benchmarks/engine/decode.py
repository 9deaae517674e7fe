"""Decoding on one GPU: AR and ISD against the read-only stream, over concurrency, context and stride.

    python -m benchmarks.decode [loads=1x1024,64x1024,32x8192]
        [arms=branch_3/8,cold/4,adaptive/8] [adapters=0,128] [draft_input=mask|uniform]
        [several=3] [penalties=true]
        [sampling=T1|greedy|qwen3] [trace=p0.78,p0.90] [parts=sweep,deterministic] [rounds=2] [tokens=48]
        [least=256] [layers=] [record=true]

One process measures the read-only stream, then runs the whole engine on random weights of the true shape,
every sequence in mid-answer. A load is so many sequences by the tokens of their contexts, an arm
STRATEGY/STRIDE; without `arms` those run that can be best (`ARMS`). `adapters`: ranks of a gated adapter on
MASK rows, 0 for none. `several`: also so many adapters of these ranks in one engine, which requests take in
turn, over one. `penalties`: also arms whose requests have penalties, without an adapter. Traces, the
same in all arms, replace the verdicts on drafts (decoding/replay.py), one after the other in the rounds. A
pass takes as long whatever it accepts; so its tokens are those that the strategy expects at the trace's
acceptance, which `tokens_per_forward` compares with the replayed ones. It needs a GPU."""

from __future__ import annotations

import sys
import timeit
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import models
from benchmarks.engine.decoding import harness
from benchmarks.engine.decoding.harness import SAMPLING, Arm, Load, Measured, SteadyEngine
from benchmarks.engine.decoding.replay import trace_of
from benchmarks.models import free_bytes, weights_of
from benchmarks.shared import chosen, defaults, numbers, parse_options, start
from benchmarks.stream import Timer
from idlm.devices import free_cached_memory
from idlm.infer.decoders.base import max_rows
from idlm.infer.decoders.rejection import strategy_of
from idlm.infer.models.loader import LoadedModel

DEFAULTS = defaults(
    "model=qwen3-8b device=cuda dtype=bfloat16 "
    "loads=1x1024,64x1024,4x1024,16x1024,256x1024,128x1024,32x1024,32x8192,64x8192 arms= adapters=0,128 "
    "several=1 penalties=false parts=sweep,deterministic draft_input=mask sampling=T1 trace=p0.78,p0.90 "
    "rounds=2 tokens=48 least=256 layers= record=true"
)
ARMS = {
    ("branch_3", 8): (1, 4),
    ("branch_3", 16): (1, 1),
    ("branch", 4): (1, 4),
    ("branch_2", 8): (4, 16),
    ("alternate", 8): (1, 128),
    ("alternate", 4): (16, 256),
    ("alternate", 2): (64, 256),
    ("cold", 4): (1, 64),
}
"""Strategies and strides, and between which numbers of sequences they are measured."""


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="decode")
    parts = chosen(options, "parts", PARTS)
    chosen(options, "sampling", SAMPLING)
    for name in options["trace"].split(","):
        trace_of(name, 1)
    fields = models.opened("decode", options)
    if chosen(options, "draft_input", ("mask", "uniform")) == ["uniform"]:
        noise = {"mask_token_id": None, "noise_range": (1, fields["model"].spec.vocab_size)}
        semantics = replace(fields["model"].semantics, **noise)
        fields["model"] = replace(fields["model"], semantics=semantics)
    bench = Bench(**fields)
    for part in parts:
        PARTS[part](bench)
    for problem in bench.problems:
        print(f"FAILED {problem}", file=sys.stderr)
    return int(bool(bench.problems))


@dataclass(slots=True, kw_only=True)
class Bench(models.Bench):
    """What all parts have; parts append to `problems`."""

    problems: list[str] = field(default_factory=list)

    @property
    def traces(self) -> list[str]:
        return self.options["trace"].split(",")

    def numbers(self, name: str) -> list[int]:
        return numbers(self.options[name])

    def loads(self) -> Iterator[Load]:
        """The load of a round; few sequences emit more tokens each, so that the trace averages out."""
        for word in self.options["loads"].split(","):
            concurrency, context = numbers(word.replace("x", ","))
            num_tokens = max(self.number("tokens"), self.number("least") // concurrency)
            yield Load(concurrency, context, num_tokens, SAMPLING[self.options["sampling"]])

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> None:
        layers = {"layers": self.number("layers")} if self.options["layers"] else {}
        self.report.add({**case, **layers, "sampling": self.options["sampling"]}, metric, value, unit, **more)


def linears_ms(model: LoadedModel, num_rows: int, *, rounds: int, num_head_rows: int | None = None) -> float:
    """Time of all linears of a pass by `F.linear`, replayed as one graph. `num_head_rows`: rows that need
    logits, None for all."""
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
PUBLISHED = tuple(Arm(name=f"cold/{stride}", strategy="cold", stride=stride) for stride in (4, 8))
SHARE_TOGETHER = 0.7
"""Of the free memory: what engines that run in turn may take."""


def measure_arms(bench: Bench, arms: list[Arm], load: Load, reference: Arm | None = None) -> list[Measured]:
    """Measure all arms that fit and run, with rounds in turn for those that fit in memory together, and
    with the `reference`, which each of them then names."""
    found: list[Measured] = []
    waiting = [arm for arm in arms if harness.fits(bench.model, arm, load)]
    if len(waiting) < len(arms):
        print(f"{len(arms) - len(waiting)} arms do not fit at {load.concurrency}x{load.context}", flush=True)
    others, first = [] if reference is None else [reference], None
    if waiting and others and not _fit_together(bench, [waiting[0], *others], load):
        first, others = next(iter(measure_arms(bench, others, load)), None), []
    while waiting:
        together = [*others, waiting.pop(0)]
        while waiting and _fit_together(bench, [*together, waiting[0]], load):
            together.append(waiting.pop(0))
        group = _in_turns(bench, together, load)
        # After the function that held the engines: their caches would leave the next ones no memory.
        free_cached_memory()
        if others:
            first = group.pop(0) if group and group[0].arm is reference else None
        for measured in group:
            measured.ar = first
        found += group
    for measured in found:
        print(f"{measured.arm.name:24s} {measured.step_ms():8.3f} ms a pass", flush=True)
    return found


def _fit_together(bench: Bench, arms: list[Arm], load: Load) -> bool:
    needed = sum(harness.memory_of(bench.model, arm, load) for arm in arms)
    return needed < SHARE_TOGETHER * free_bytes(bench.model)


def _in_turns(bench: Bench, arms: list[Arm], load: Load) -> list[Measured]:
    """Run rounds of all arms in turn, with all their engines in memory. Arms that fail are left out."""
    engines: list[tuple[SteadyEngine, Measured]] = []
    for arm in arms:
        traces = [trace_of(name, arm.stride) for name in bench.traces]
        try:
            steady = SteadyEngine(bench.model, arm, load, *traces)
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
    return [measured for _, measured in engines if measured.passes]


def _fail(bench: Bench, arm: Arm, load: Load) -> None:
    where = f"{arm.name} at concurrency {load.concurrency}, context {load.context}"
    bench.problems.append(where)
    print(f"FAILED {where}\n{traceback.format_exc()}", flush=True)


def sweep(bench: Bench) -> None:
    """Measure AR and the arms, plain and with adapters, at every load."""
    for load in bench.loads():
        found = measure_arms(bench, _isd_arms(bench, load.concurrency), load, AR)
        references = [measured.ar for measured in found if measured.ar is not None]
        for measured in [*references[:1], *(one for one in found if one.arm.num_adapters == 1)]:
            _note(bench, measured)
        by_name = {measured.arm.name: measured for measured in found}
        for measured in found:
            arm, case = measured.arm, _case(bench, measured)
            name = arm.name.partition(" ")[0]
            if arm.num_adapters > 1:
                # Passes of both emit as many tokens.
                one = by_name.get(arm.name.rpartition(" ")[0])
                if one is not None:
                    bench.add(case, "adapters_over_one", one.step_ms() / measured.step_ms(), "x")
            elif name != arm.name and name in by_name:
                ratio = measured.step_ms() / by_name[name].step_ms()
                kind = "penalties" if arm.penalised else "adapter"
                bench.add(case, f"{kind}_over_plain_step", ratio, "x")


def _isd_arms(bench: Bench, concurrency: int) -> list[Arm]:
    words = (word.split("/") for word in bench.options["arms"].split(",") if word)
    given = [(strategy, int(stride)) for strategy, stride in words]
    known = [key for key, (low, high) in ARMS.items() if low <= concurrency <= high]
    arms = []
    for strategy, stride in given or known:
        name, adaptive = f"{strategy}/{stride}", strategy == "adaptive"
        arm = Arm(name=name, strategy="cold" if adaptive else strategy, stride=stride, adaptive=adaptive)
        for rank in bench.numbers("adapters"):
            arms.append(replace(arm, name=f"{name} rank {rank}", adapter=rank) if rank else arm)
            num_adapters = bench.number("several")
            if rank and num_adapters > 1:
                together = f"{arms[-1].name} x{num_adapters}"
                arms.append(replace(arms[-1], name=together, num_adapters=num_adapters))
        if bench.options["penalties"] == "true":
            arms.append(replace(arm, name=f"{name} penalised", penalised=True))
    return arms


def _case(bench: Bench, measured: Measured) -> dict[str, Any]:
    arm, load = measured.arm, measured.load
    case: dict[str, Any] = {"concurrency": load.concurrency, "context": load.context}
    case |= {"strategy": arm.shown_strategy, "stride": arm.stride}
    case |= {"adapter": arm.adapter, "draft_input": bench.model.semantics.draft_input}
    case |= {"num_adapters": arm.num_adapters} if arm.num_adapters > 1 else {}
    return case | ({"penalties": True} if arm.penalised else {})


def _note(bench: Bench, measured: Measured) -> None:
    """Record the step, with its floor, and what it is over AR's with the tokens of every trace."""
    arm, load, ar, case = measured.arm, measured.load, measured.ar, _case(bench, measured)
    floor = harness.floor_ms(bench.model, load, bench.rates.stream)
    bench.add({"decoder": arm.decoder, **case}, "step_ms", measured.step_ms(), "ms", floor=floor)
    if ar is None:
        return
    ratio = measured.step_ms() / ar.step_ms()
    bench.add(case, "isd_step_over_ar_step", ratio, "x")
    for index, name in enumerate(bench.traces):
        emitted = measured.tokens_per_forward(slice(index, None, len(bench.traces)))
        if not arm.adaptive:
            chances = [trace_of(name, arm.stride).probability] * (arm.stride - 1)
            replayed, emitted = emitted, strategy_of(arm.strategy).tokens_per_forward(chances)
            bench.add(case | {"trace": name}, "tokens_per_forward", replayed, "tokens", baseline=emitted)
        bench.add(case | {"trace": name}, "isd_over_ar", emitted / ratio, "x")


def deterministic(bench: Bench) -> None:
    """Compare steps of deterministic mode (a row's bits do not depend on its batch) with normal ones."""
    for load in bench.loads():
        for arm in (AR, *PUBLISHED):
            # One after the other: both share a trunk, which is switched to deterministic mode in between.
            modes = (arm, replace(arm, name=f"deterministic {arm.name}", deterministic=True))
            found = [measured for mode in modes for measured in measure_arms(bench, [mode], load)]
            if len(found) == len(modes):
                plain, fixed = (measured.step_ms() for measured in found)
                case = {"decoder": arm.decoder, "stride": arm.stride, "concurrency": load.concurrency}
                case |= {"context": load.context}
                bench.add(case, "deterministic_over_plain_step", fixed / plain, "x")


PARTS = {"sweep": sweep, "deterministic": deterministic}


if __name__ == "__main__":
    start(measure, __doc__)
