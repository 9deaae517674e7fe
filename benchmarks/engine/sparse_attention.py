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
an arm that fails is left out (exit status 1). It needs a GPU.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import models
from benchmarks.engine.block_harness import BlockMeasured
from benchmarks.engine.decoding.harness import SAMPLING, Load
from benchmarks.engine.sparse_harness import (
    ARMS,
    GATE_LIMIT,
    SPARSE,
    SparseArm,
    block_floor_ms,
    largest_batch,
    parity_error,
    steady_contexts,
    tpob_ms,
)
from benchmarks.shared import chosen, defaults, numbers, parse_options, start
from idlm.devices import free_cached_memory

DEFAULTS = defaults(
    "model=qwen3-8b device=cuda dtype=bfloat16 cells=131072x1,131072xmax,32768x1,32768xmax "
    "k=1024 passes=32 block=32 exact_layers=2 parts=gate,blocks blocks=1 rounds=2 record=true",
    arms=",".join(ARMS),
)
PARTS = ("gate", "blocks")
GATE_CONTEXT = 480
"""Half a block of slots of the kernel is left over: lists are cut in other places than the context."""
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
    """What all parts have; `gates` says whether an accelerator's logits are right."""

    gates: dict[str, bool] = field(default_factory=dict)

    def load(self, context: int, batch: str) -> Load:
        """The load of a cell, with room for the tokens of a round."""
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


if __name__ == "__main__":
    start(measure, __doc__)
