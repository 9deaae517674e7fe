"""Long contexts on one GPU: the time of an output block with exact attention, MAGE, Quest and SparseD.

    python -m benchmarks.sparse_attention [cells=131072x1,131072xmax,32768x1,32768xmax] [k=1024] [passes=32]
        [arms=exact,exact_unsplit,mage,quest,sparsed] [parts=gate,blocks] [blocks=1] [rounds=2] [record=true]
    python -m benchmarks.sparse_attention model=llada22_mini cells=124928x1,124928x4 arms=exact,mage

SDAR-8B's shape, or LLaDA2.2-mini's, whose experts are chosen by block, with random weights and random KV
(attention that is nearly flat: times, no fidelity), blocks of 32, in CUDA graphs in every arm, every sequence
at another step of its block. First the gate: at full budget the logits of each accelerator are those of exact
attention. `blocks` times whole blocks, commits included; `tpob_ms` is the time per output block of a
sequence. `exact_unsplit` walks each context with one program per KV head, the kind of baseline of MAGE's
paper (8 programs at one sequence). Cells are contexts and batches, `max` the largest batch whose KV fits;
an arm that fails is left out (exit status 1). It needs a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import models
from benchmarks.engine.block_harness import (
    WARM_UP_PASSES,
    BlockArm,
    BlockMeasured,
    SteadyBlocks,
    logits_of_pass,
    pass_cost,
    relative_error,
)
from benchmarks.engine.decoding.harness import SAMPLING, Load
from benchmarks.engine.decoding.replay import Trace
from benchmarks.models import free_bytes, slot_bytes, weight_bytes
from benchmarks.shared import chosen, defaults, numbers, parse_options, start
from benchmarks.stream import Rates
from idlm.devices import free_cached_memory
from idlm.infer.accelerators.prefix import EVERYTHING
from idlm.infer.models.loader import LoadedModel
from idlm.infer.models.moe import Experts
from idlm.infer.sparse.accelerator import ACCELERATORS

SPARSE = ("mage", "quest", "sparsed")
ARMS = ("exact", "exact_unsplit", *SPARSE)
DEFAULTS = defaults(
    "model=qwen3-8b device=cuda dtype=bfloat16 cells=131072x1,131072xmax,32768x1,32768xmax "
    "k=1024 passes=32 block=32 exact_layers=2 parts=gate,blocks blocks=1 rounds=2 record=true",
    arms=",".join(ARMS),
)
PARTS = ("gate", "blocks")
GATE_CONTEXT = 480
"""Half a block of slots of the kernel is left over: lists are cut in other positions than the context."""
WARM_UP_BLOCKS = 2
RATIOS = (
    ("tpob_speedup_vs_exact", "exact", (*SPARSE,)),
    ("tpob_speedup_vs_unsplit", "exact_unsplit", ("exact", *SPARSE)),
    ("mage_over_quest", "quest", ("mage",)),
    ("mage_over_sparsed", "sparsed", ("mage",)),
)
"""Metric, the arm whose time is divided, and the arms that have the metric."""


@dataclass(slots=True, kw_only=True)
class Bench(models.Bench):
    """What all parts have; `gates`: whether an accelerator's logits are right."""

    gates: dict[str, bool] = field(default_factory=dict)

    def load(self, context: int, batch: str) -> Load:
        num_tokens = (self.number("blocks") + WARM_UP_BLOCKS + 1) * self.number("block")
        size = largest_batch(self.model, context, num_tokens) if batch == "max" else int(batch)
        return Load(concurrency=size, context=context, num_tokens=num_tokens, sampling=SAMPLING["greedy"])

    def add(self, arm: SparseArm, load: Load, metric: str, value: float, unit: str, **more: Any) -> None:
        case = {"arm": arm.name, "batch": load.concurrency, "context": load.context}
        case |= {"k": arm.k, "passes": arm.num_passes}
        if self.options["model"] != DEFAULTS["model"]:
            case["model"] = self.options["model"]
        exactness = "lossy" if arm.accelerators() else "exact"
        gate = self.gates.get(arm.name)
        self.report.add(case, metric, value, unit, gate_passed=gate, exactness=exactness, **more)


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="sparse_attention")
    parts, names, block = (
        chosen(options, "parts", PARTS),
        chosen(options, "arms", ARMS),
        int(options["block"]),
    )
    exact_layers = int(options["exact_layers"])
    arms = [
        SparseArm(name=name, stride=block, k=k, exact_layers=exact_layers, num_passes=num_passes)
        for num_passes, k, name in itertools.product(numbers(options["passes"]), numbers(options["k"]), names)
    ]
    cells = [cell.split("x", 1) for cell in options["cells"].split(",")]
    bench = Bench(**models.opened("sparse_attention", options, block_size=block))
    if "gate" in parts:
        gate(bench, arms, min(GATE_CONTEXT, *(int(context) for context, _ in cells)))
    num_failed = 0
    if "blocks" in parts and all(bench.gates.values()):
        for context, batch in cells:
            num_failed += _cell(bench, arms, bench.load(int(context), batch))
    return int(not all(bench.gates.values()) or num_failed > 0)


def gate(bench: Bench, arms: list[SparseArm], context: int) -> None:
    """Compare logits at full budget with those of exact attention, over a short context."""
    load = replace(bench.load(context, "2"), context=context)
    for arm in {arm.name: arm for arm in arms if arm.name in SPARSE}.values():
        error = parity_error(bench.model, arm, load)
        free_cached_memory()
        bench.gates[arm.name] = error < GATE_LIMIT
        bench.add(replace(arm, k=context), load, "full_budget_error", error, "share")


def _cell(bench: Bench, arms: list[SparseArm], load: Load) -> int:
    """All arms of one context and batch; returns how many failed."""
    found: dict[SparseArm, BlockMeasured] = {}
    num_failed = 0
    for arm in arms:
        # Exact attention has no `k`, so one of them is enough.
        if not arm.accelerators() and any(_is_alike(arm, other) for other in found):
            continue
        try:
            found[arm] = _blocks(bench, arm, load)
        except Exception as error:  # Too little memory for it, most likely: the others are measured.
            num_failed += 1
            print(f"    {arm.name} is left out: {type(error).__name__}: {error}".splitlines()[0], flush=True)
        free_cached_memory()
    for arm, measured in found.items():
        of_name = {
            other.name: tpob_ms(each)
            for other, each in found.items()
            if other.num_passes == arm.num_passes and (other.k == arm.k or not other.accelerators())
        }
        for metric, name, of in RATIOS:
            if name in of_name and arm.name in of:
                bench.add(arm, load, metric, of_name[name] / tpob_ms(measured), "x")
    return num_failed


def _is_alike(arm: SparseArm, other: SparseArm) -> bool:
    return (other.name, other.num_passes) == (arm.name, arm.num_passes)


def _blocks(bench: Bench, arm: SparseArm, load: Load) -> BlockMeasured:
    steady = steady_contexts(bench.model, arm, load, num_blocks=bench.number("blocks"))
    measured = BlockMeasured(arm=arm, load=load, width=arm.stride)
    for _ in range(bench.number("rounds")):
        steady.measure(measured)
    steady.free()
    floor = block_floor_ms(bench.model, arm, load, bench.rates)
    bench.add(arm, load, "tpob_ms", tpob_ms(measured), "ms", floor=floor)
    bench.add(arm, load, "step_ms", measured.step_ms(), "ms")
    return measured


NO_SPLITS = 1 << 20
"""Blocks of slots below which a walk is not split: none is."""
RESERVED_BYTES = 7 << 30
"""For graphs, logits, and what accelerators take in addition to KV, when the largest batch is sought."""
SLACK = 1024
"""Slots of a sequence for tokens of passes in progress."""
GATE_PASSES = 2
GATE_LIMIT = 0.02
"""Relative root mean square of the difference between logits at full budget and those of exact attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseArm(BlockArm):
    """One of `ARMS` with `k` slots, in blocks that take `num_passes` passes. `exact_share`: of sparsed."""

    k: int = 1024
    exact_layers: int = 2
    num_passes: int = 32
    exact_share: float = 0.2

    def decoder_options(self) -> dict[str, Any]:
        # Named in full: `slots=True` makes a class anew, for which a bare super() fails.
        return {**BlockArm.decoder_options(self), "steps": self.num_passes}

    def accelerators(self) -> Mapping[str, Any]:
        if self.name not in SPARSE:
            return {}
        kind = ACCELERATORS.get(self.name)
        options = {"exact_share": self.exact_share} if self.name == "sparsed" else {}
        return {self.name: kind.Config(k=self.k, exact_layers=self.exact_layers, **options)}


def trace_of_passes(num_passes: int, size: int) -> Trace:
    """Any `num_passes` passes in a row decide `size` positions."""
    ends = [size * (index + 1) // num_passes for index in range(num_passes)]
    decided = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return Trace(
        name=f"{num_passes} passes", num_drafts=size - 1, accepted=tuple(count - 1 for count in decided)
    )


class SteadyContexts(SteadyBlocks):
    """`SteadyBlocks` whose arm may walk contexts without splits. The first blocks, of which a part is fixed,
    end before a round is timed: then every sequence emits whole blocks, one after another."""

    def start_and_warm_up(self) -> None:
        assert isinstance(self.arm, SparseArm)
        runner: Any = self.engine._parts.runner
        if self.arm.name == "quest":
            # Nothing has stored the context's keys, so nothing has summarised them: ties would be listed.
            for bounds in runner._stack.kv.bounds:
                bounds.largest_CKH.normal_().abs_()
                bounds.min_CKH.normal_().abs_().neg_()
        self.start_requests()
        self.run_passes(self.arm.num_passes + WARM_UP_PASSES)
        self.drain()

    @contextlib.contextmanager
    def toggled(self) -> Iterator[None]:
        """One program per KV head and tile for `exact_unsplit`: the kind of baseline of MAGE's paper."""
        with super().toggled():
            if self.arm.name != "exact_unsplit" or not torch.cuda.is_available():
                yield
                return
            from idlm.kernels.paged_attention import planning

            chosen = planning.choose_launch

            def unsplit(*given: Any, **named: Any) -> Any:
                return replace(chosen(*given, **named), min_blocks=NO_SPLITS)

            with patch.object(planning, "choose_launch", unsplit):
                yield


def steady_contexts(model: LoadedModel, arm: SparseArm, load: Load, *, num_blocks: int) -> SteadyContexts:
    """An engine whose rounds take `num_blocks` blocks of every sequence."""
    trace = trace_of_passes(arm.num_passes, arm.stride)
    return SteadyContexts(model, arm, load, trace, num_blocks * arm.num_passes)


def tpob_ms(measured: BlockMeasured) -> float:
    """Time per output block of a sequence, over the fastest round."""
    num_blocks = [tokens / measured.width / measured.load.concurrency for tokens in measured.tokens]
    assert min(num_blocks) > 0, f"{measured.tokens=}: no block became clean in a round"
    return min(1e3 * seconds / num for seconds, num in zip(measured.seconds, num_blocks, strict=True))


def largest_batch(model: LoadedModel, context: int, num_tokens: int) -> int:
    if model.device.type != "cuda":
        return 2
    free = int(free_bytes(model)) - RESERVED_BYTES
    return max(1, free // ((context + num_tokens + SLACK) * slot_bytes(model)))


def block_floor_ms(model: LoadedModel, arm: SparseArm, load: Load, rates: Rates) -> float | None:
    """Lower bound of a block by bytes and products at the measured rates; None where none is given. With MAGE
    a first pass sees everything and reads the keys of sparse layers once more, the others see lists."""
    if arm.accelerators() and arm.name != "mage":
        return None
    batch, rows = load.concurrency, load.concurrency * arm.stride
    flops = pass_cost(model, num_sequences=batch, rows=rows, slots=0).linears(rows, rows)
    linears = max(weight_bytes(model) / rates.stream, flops / rates.product)

    def attention(slots: float) -> float:
        cost = pass_cost(model, num_sequences=batch, rows=rows, slots=slots)
        return max(cost.kv_bytes / rates.stream, cost.attention_flops / rates.product)

    everything = attention(load.context + arm.stride)
    if not arm.accelerators():
        return 1e3 * arm.num_passes * (linears + everything)
    sparse_share = 1 - arm.exact_layers / model.spec.num_layers
    listed = attention(min(arm.k, load.context) + arm.stride)
    ranking = batch * load.context * slot_bytes(model) / 2 * sparse_share / rates.stream
    sparse = linears + sparse_share * listed + (1 - sparse_share) * everything
    return 1e3 * (linears + everything + ranking + (arm.num_passes - 1) * sparse)


def parity_error(model: LoadedModel, arm: SparseArm, load: Load) -> float:
    """How far the logits of a block's second pass, over lists of all slots, are from those of exact
    attention: root mean square of the difference over that of the logits. 1 if that pass has no lists. Rows
    go to the experts that they chose with exact attention: rounding would choose others, and what those
    compute is no measure of lists."""
    full = replace(arm, k=EVERYTHING, graphs=False, num_inflight_steps=0, exact_share=1 / arm.num_passes)
    routes: list[tuple[torch.Tensor, torch.Tensor]] = []
    with routing(routes, replays=False):
        expected, _ = _second_logits(model, replace(full, name="exact"), load)
    with routing(routes, replays=True):
        found, is_listed = _second_logits(model, full, load)
    return relative_error(found, expected) if is_listed else 1.0


@contextlib.contextmanager
def routing(routes: list[tuple[torch.Tensor, torch.Tensor]], *, replays: bool) -> Iterator[None]:
    """Note the experts of all rows and their weights, layer by layer; or take them from there, in order."""
    original = Experts.route

    def recorded(self: Experts, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        routes.append(original(self, *given))
        return routes[-1]

    def replayed(self: Experts, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return routes.pop(0)

    with patch.object(Experts, "route", replayed if replays else recorded):
        yield


def _second_logits(model: LoadedModel, arm: SparseArm, load: Load) -> tuple[torch.Tensor, bool]:
    """Logits of the second pass over the first blocks, and whether all sequences see lists in it. The first
    pass of all arms is the same."""
    torch.manual_seed(0)
    steady = steady_contexts(model, arm, load, num_blocks=1)
    runner: Any = steady.engine._parts.runner
    make_plan, is_listed = runner._plan_attention, False

    def watched_plan(table: Any, plan: Any, listed_B: Any = None, num_listed: int = 0) -> Any:
        nonlocal is_listed
        is_listed = listed_B is not None and bool(listed_B.all())
        return make_plan(table, plan, listed_B, num_listed)

    runner._plan_attention = watched_plan
    return logits_of_pass(steady, GATE_PASSES), is_listed


if __name__ == "__main__":
    start(measure, __doc__)
