"""The parts of the decode benchmark: which arms run under which loads, and the rows that come of them."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.engine.decoding.harness import (
    SAMPLING,
    Arm,
    Load,
    Measured,
    Seats,
    adapted,
    fits,
    floor_ms,
    linears_ms,
    memory_of,
)
from benchmarks.engine.decoding.host import host_cost
from benchmarks.engine.decoding.profile import print_profiles
from benchmarks.engine.decoding.trace import Trace
from benchmarks.results import result_row
from idlm.acceptance import tokens_per_forward_branch, tokens_per_forward_cold
from idlm.errors import UserError
from idlm.infer.decoders.base import max_rows
from idlm.infer.models.loader import LoadedModel

AR = Arm(name="ar", decoder="ar", strategy="cold", stride=1)
ADAPTER_RANK = 128
ADAPTED = (1, 2, 4, 8, 16, 64)
"""Sequences of which an adapter is measured; its share of a step only shrinks beyond."""
BRANCH_ROWS = 512
"""Beyond so many rows a branch pass is not tried: it is bound by arithmetic long before."""
FORMULAS = {"cold": tokens_per_forward_cold, "branch": tokens_per_forward_branch}
PUBLISHED_STRIDE = 4
OURS = Arm(name="ours", strategy="branch", stride=PUBLISHED_STRIDE)
TOGGLED = (
    OURS,
    replace(OURS, name="cold steps", strategy="cold"),
    replace(OURS, name="host loop", num_inflight_steps=0),
    replace(OURS, name="eager", graphs=False),
    replace(OURS, name="eager, torch attention", graphs=False, attention="torch"),
    replace(OURS, name="eager, unfused verify", graphs=False, is_fused=False),
    replace(OURS, name="published, but graphs and fused verify", strategy="cold", num_inflight_steps=0),
    replace(OURS, name="published, but fused verify", strategy="cold", num_inflight_steps=0, graphs=False),
    replace(OURS, name="published", strategy="cold", num_inflight_steps=0, graphs=False, is_fused=False),
)
"""Ours with one thing taken away, then the authors' configuration with things given back. Verification in
plain torch waits for the host, so it cannot be in a graph: it is compared with eager.
"""


@dataclass(slots=True, kw_only=True)
class Bench:
    """What all parts share; the lists grow."""

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
    least_tokens: int
    num_passes: int
    measured: list[Measured] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    floors: dict[tuple[int, int], float] = field(default_factory=dict)
    linears: dict[int, float] = field(default_factory=dict)

    def load(self, concurrency: int, context: int) -> Load:
        """The load of a round: enough tokens of few sequences that the luck of the trace evens out."""
        return Load(
            concurrency=concurrency,
            context=context,
            num_tokens=max(self.num_tokens, self.least_tokens // concurrency),
            sampling=SAMPLING[self.sampling],
        )

    def trace(self, arm: Arm) -> Trace | None:
        """What the arm's drafts are told."""
        return None if arm.decoder == "ar" else self.traces[arm.stride]

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> None:
        """One row, and a line of it in the output."""
        case = {**case, "sampling": self.sampling}
        self.rows.append(result_row("decode", case, metric, value, unit, **more))
        baseline = more.get("baseline")
        against = "" if baseline is None else f" against {baseline:.4g}"
        name = " ".join(f"{key}={value}" for key, value in case.items())
        self.lines.append(f"{metric:32s} {value:10.4g} {unit}{against}  {name}")


def measure_arms(bench: Bench, arms: list[Arm], load: Load, *, has_rows: bool = True) -> dict[str, Measured]:
    """All arms that fit and run, a round of each in turn as far as they fit beside each other. `has_rows`:
    their step times are results of their own.
    """
    found: dict[str, Measured] = {}
    waiting = [arm for arm in arms if _fits(bench, arm, load)]
    while waiting:
        together, needed, free = [waiting.pop(0)], 0.0, _free(bench)
        while waiting and (needed := needed + memory_of(bench.model, waiting[0], load)) < free / 2:
            together.append(waiting.pop(0))
        found |= _in_turns(bench, together, load)
        # Behind the function that held the engines: their caches would leave the next ones no room.
        forget(bench.model.device)
    for measured in found.values():
        _note(bench, measured, has_rows=has_rows)
    return found


def _in_turns(bench: Bench, arms: list[Arm], load: Load) -> dict[str, Measured]:
    """The rounds of arms whose engines stand beside each other."""
    seats = _seats(bench, arms, load)
    for _ in range(bench.rounds):
        for admit, measured in list(seats):
            if not _attempt(bench, admit, measured):
                seats.remove((admit, measured))
    return {measured.arm.name: measured for _, measured in seats if measured.passes}


def _seats(bench: Bench, arms: list[Arm], load: Load) -> list[tuple[Seats, Measured]]:
    made = []
    for arm in arms:
        try:
            seats = Seats(bench.model, arm, load, bench.trace(arm))
        except RuntimeError:
            _fail(bench, arm, load)
            continue
        width = max_rows(seats.engine.decoder, seats.engine.table.max_length)
        made.append((seats, Measured(arm=arm, load=load, width=width)))
    return made


def _attempt(bench: Bench, seats: Seats, measured: Measured) -> bool:
    """One round; False, and a problem noted, when the arm cannot run."""
    try:
        seats.measure(measured)
    except RuntimeError:
        _fail(bench, seats.arm, seats.load)
        return False
    return True


def _fail(bench: Bench, arm: Arm, load: Load) -> None:
    where = f"{arm.name} at concurrency {load.concurrency}, context {load.context}"
    bench.problems.append(where)
    print(f"FAILED {where}\n{traceback.format_exc()}", flush=True)


def _fits(bench: Bench, arm: Arm, load: Load) -> bool:
    if fits(bench.model, arm, load):
        return True
    bench.lines.append(f"does not fit: {arm.name}, concurrency {load.concurrency}, context {load.context}")
    return False


def _free(bench: Bench) -> float:
    return torch.cuda.mem_get_info()[0] if bench.model.device.type == "cuda" else 1e9


def forget(device: torch.device) -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _case(measured: Measured) -> dict[str, Any]:
    arm, load = measured.arm, measured.load
    return {
        "decoder": arm.decoder,
        "strategy": "adaptive" if arm.adaptive else arm.strategy,
        "stride": arm.stride,
        "batch": load.concurrency,
        "context": load.context,
    }


def _note(bench: Bench, measured: Measured, *, has_rows: bool) -> None:
    """Keep, print, and enter the step's time over the stream and over stock linears."""
    load = measured.load
    num_rows = load.concurrency * measured.width
    if num_rows not in bench.linears:
        bench.linears[num_rows] = linears_ms(bench.model, num_rows, rounds=bench.rounds)
    floor = floor_ms(bench.model, load, bench.stream)
    bench.floors[load.concurrency, load.context] = floor
    bench.measured.append(measured)
    arm = measured.arm
    step, linears = measured.step_ms(), bench.linears[num_rows]
    print(
        f"{arm.name:24s} C={load.concurrency:<4d} {load.context:>6d} {step:8.3f} ms/step "
        f"{floor / step:6.1%} of stream, linears {linears:.3f} ms, "
        f"{measured.tokens_per_second():9.1f} tok/s, TPF {measured.tokens_per_forward():.3f}",
        flush=True,
    )
    if has_rows:
        bench.add(_case(measured), "step_ms", step, "ms", baseline=linears, floor=floor)


def _published_stride(bench: Bench) -> int:
    """The largest up to the authors'; UserError IDLM-0107."""
    served = [stride for stride in bench.strides if stride <= PUBLISHED_STRIDE]
    if not served:
        raise UserError(
            "IDLM-0107",
            f"strides={','.join(map(str, bench.strides))}, but this part takes one up to {PUBLISHED_STRIDE}",
            fix=f"name strides={PUBLISHED_STRIDE} as well",
        )
    return max(served)


def sweep(bench: Bench) -> None:
    """AR and every stride and strategy at every concurrency and context."""
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
        "strategy": "adaptive" if arm.adaptive else arm.strategy,
        "stride": arm.stride,
        "trace": bench.traces[arm.stride].name,
    }
    ratio = measured.tokens_per_second() / ar.tokens_per_second()
    bench.add(case, "isd_over_ar", ratio, "x")
    bench.add(case, "isd_step_over_ar_step", measured.step_ms() / ar.step_ms(), "x")


def _over_formula(bench: Bench, measured: Measured) -> None:
    """Tokens per forward against eq. 3, or 1 + p + .. for `branch`, at the trace's own acceptance."""
    arm = measured.arm
    if arm.adaptive or arm.strategy not in FORMULAS:
        return
    predicted = FORMULAS[arm.strategy](bench.traces[arm.stride].acceptance())
    case = {"strategy": arm.strategy, "stride": arm.stride, "concurrency": measured.load.concurrency}
    bench.add(case, "tokens_per_forward", measured.tokens_per_forward(), "tokens", baseline=predicted)


def published(bench: Bench) -> None:
    """Ours against the rebuilt configuration of the authors, and every single toggle, at one sequence."""
    load = bench.load(bench.concurrency[0], bench.contexts[0])
    found = measure_arms(bench, list(TOGGLED), load, has_rows=False)
    ours = found.get("ours")
    if ours is None:
        return
    for name, measured in found.items():
        if name == "ours":
            continue
        is_whole = name == "published"
        metric = "isd_over_published_configuration" if is_whole else "isd_over_toggle"
        case = {"concurrency": load.concurrency, "context": load.context, "without": name}
        ratio = ours.tokens_per_second() / measured.tokens_per_second()
        bench.add(case, metric, ratio, "x")


def host(bench: Bench) -> None:
    """Idle share of the GPU and passes per wait of the host, in steady decoding."""
    stride = _published_stride(bench)
    for concurrency in sorted({bench.concurrency[0], *(c for c in bench.concurrency if c == 64)}):
        for arm in (AR, Arm(name=f"cold {stride}", strategy="cold", stride=stride)):
            num_tokens = arm.stride * bench.num_passes
            load = replace(bench.load(concurrency, bench.contexts[0]), num_tokens=num_tokens)
            if not _fits(bench, arm, load):
                continue
            cost = host_cost(Seats(bench.model, arm, load, bench.trace(arm)), bench.num_passes)
            case = {"decoder": arm.decoder, "stride": arm.stride, "concurrency": concurrency}
            bench.add(case, "gpu_idle_share", cost.idle_share, "share")
            bench.add(case, "steps_per_host_sync", cost.passes_per_wait, "steps")
            forget(bench.model.device)


def adapter(bench: Bench) -> None:
    """The step of R-ISD, base weights and a gated adapter on MASK rows, over that of ISD."""
    stride = _published_stride(bench)
    arm = Arm(name=f"cold {stride}", strategy="cold", stride=stride)
    for concurrency in sorted({min(bench.concurrency), *(c for c in bench.concurrency if c in ADAPTED)}):
        load = bench.load(concurrency, bench.contexts[0])
        plain = measure_arms(bench, [arm], load, has_rows=False).get(arm.name)
        with adapted(bench.model, ADAPTER_RANK):
            gated = measure_arms(bench, [replace(arm, name=f"gated {arm.name}")], load, has_rows=False)
        if plain is None or not gated:
            continue
        [measured] = gated.values()
        case = {"concurrency": concurrency, "context": load.context, "stride": stride, "rank": ADAPTER_RANK}
        bench.add(case, "risd_over_isd_step", measured.step_ms() / plain.step_ms(), "x")


def deterministic(bench: Bench) -> None:
    """What it costs that a row's bits depend on nobody else: the step over that of the same decoder."""
    stride = _published_stride(bench)
    for concurrency in sorted({bench.concurrency[0], *(c for c in bench.concurrency if c == 64)}):
        load = bench.load(concurrency, bench.contexts[0])
        for arm in (AR, Arm(name=f"cold {stride}", strategy="cold", stride=stride)):
            fixed = replace(arm, name=f"deterministic {arm.name}", deterministic=True)
            # One after the other: the trunk that they share is told which of the two it is to be.
            found = [
                measured
                for one in (arm, fixed)
                for measured in measure_arms(bench, [one], load, has_rows=False).values()
            ]
            if len(found) == 2:
                case = {"decoder": arm.decoder, "stride": arm.stride, "concurrency": concurrency}
                ratio = found[1].step_ms() / found[0].step_ms()
                bench.add(case, "deterministic_over_plain_step", ratio, "x")


def profile(bench: Bench) -> None:
    """Kernels of AR, ISD and R-ISD, printed."""
    stride = _published_stride(bench)
    arms = [AR, Arm(name=f"cold {stride}", strategy="cold", stride=stride)]
    print_profiles(bench, arms, adapter_rank=ADAPTER_RANK)
    forget(bench.model.device)


PARTS: dict[str, Callable[[Bench], None]] = {
    "sweep": sweep,
    "published": published,
    "host": host,
    "adapter": adapter,
    "deterministic": deterministic,
    "profile": profile,
}
