"""Long contexts on one GPU: the time of an output block with exact attention, MAGE, Quest and SparseD.

    python -m benchmarks.sparse_attention [cells=131072x1,131072xmax,32768x1,32768xmax] [k=1024] [passes=32]
        [arms=exact,exact_unsplit,mage,quest,sparsed] [parts=gate,blocks] [blocks=1] [rounds=2]
        [record=true] [figures=FOLDER]
    python -m benchmarks.sparse_attention model=llada22_mini cells=124928x1,124928x4 arms=exact,mage
        parts=gate,blocks
    python -m benchmarks.sparse_attention parts= figures=FOLDER

SDAR-8B's shape, or LLaDA2.2-mini's, whose experts are chosen by block, with random weights and random KV
(attention that is nearly flat: times, no fidelity), blocks of 32, in CUDA graphs in every arm, every sequence
at another step of its block. First the gate: at full budget the logits of each accelerator are those of exact
attention. `blocks` times whole blocks, commits included; `tpob_ms` is the time per output block of a
sequence. `exact_unsplit` walks each context with one program per KV head, the kind of baseline of MAGE's
paper (8 programs at one sequence). Cells are contexts and batches, `max` the largest batch whose KV fits;
rows are recorded after each cell, and an arm that fails is left out (exit status 1). `figures` draws what is
recorded (benchmarks/figures.py), and `parts=` measures nothing. It needs a GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.engine.block_harness import BlockMeasured
from benchmarks.engine.decoding.harness import SAMPLING, Load, random_model
from benchmarks.engine.sparse_harness import (
    ARMS,
    GATE_LIMIT,
    SPARSE,
    SparseArm,
    SteadyContexts,
    floor_of,
    largest_batch,
    parity_error,
    steady_contexts,
    tpob_ms,
)
from benchmarks.figures import draw_sparse_attention
from benchmarks.results import result_row
from benchmarks.shared import defaults, parse_options, save, start
from benchmarks.stream import matmul_rate, stream_rate
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.infer.models.loader import DTYPES, LoadedModel

DEFAULTS = defaults(
    "model=qwen3-8b device=cuda dtype=bfloat16 cells=131072x1,131072xmax,32768x1,32768xmax "
    "k=1024 passes=32 block=32 exact_layers=2 parts=gate,blocks blocks=1 rounds=2 "
    "record=true figures=",
    arms=",".join(ARMS),
)
PARTS = ("gate", "blocks")
GATE_CONTEXT = 480
"""Half a block of slots of the kernel is left over: lists are cut in other places than the context."""
WARM_UP_BLOCKS = 2


@dataclass(slots=True, kw_only=True)
class Bench:
    """Model, measured rates and options of all parts; parts append to `rows`."""

    model: LoadedModel
    stream: float
    product: float
    arms: list[SparseArm]
    cells: list[tuple[int, str]]
    num_blocks: int
    rounds: int
    num_failed: int = 0
    gates: dict[str, bool] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def load(self, context: int, batch: str) -> Load:
        """The load of a cell, with room for the tokens of a round."""
        size = self.arms[0].stride
        num_tokens = (self.num_blocks + WARM_UP_BLOCKS + 1) * size
        batch_size = largest_batch(self.model, context, num_tokens) if batch == "max" else int(batch)
        return Load(
            concurrency=batch_size, context=context, num_tokens=num_tokens, sampling=SAMPLING["greedy"]
        )

    def add(self, arm: SparseArm, load: Load, metric: str, value: float, unit: str, **more: Any) -> None:
        """Append one result row and print it as a line."""
        case = {"arm": arm.name, "batch": load.concurrency, "context": load.context}
        case |= {"k": arm.k, "passes": arm.num_passes}
        if str(self.model.directory) != DEFAULTS["model"]:
            case["model"] = str(self.model.directory)
        exactness = "lossy" if arm.accelerators() else "exact"
        gate = self.gates.get(arm.name)
        row = result_row(
            "sparse_attention", case, metric, value, unit, gate_passed=gate, exactness=exactness, **more
        )
        self.rows.append(row)
        detail = " ".join(f"{key} {each:.4g}" for key, each in more.items() if each is not None)
        name = " ".join(f"{key}={each}" for key, each in case.items())
        print(f"{metric:26s} {value:10.4g} {unit:6s} {detail}  {name}", flush=True)


def measure(arguments: list[str]) -> int:
    """Run the parts that the arguments name; returns the exit status, 1 if a gate or an arm fails."""
    is_drawing = "parts=" in arguments
    options = parse_options(arguments, DEFAULTS, needs_gpu="" if is_drawing else "sparse_attention")
    parts, arms = [part for part in options["parts"].split(",") if part], options["arms"].split(",")
    if not set(parts) <= {*PARTS} or not set(arms) <= set(ARMS):
        raise UserError(
            "IDLM-0107",
            f"parts={options['parts']} arms={options['arms']}",
            fix=f"use parts of {', '.join(PARTS)} and arms of {', '.join(ARMS)}",
        )
    is_right = _measure(options, parts) if parts else True
    if options["figures"]:
        for path in draw_sparse_attention(Path(options["results"]), Path(options["figures"])):
            print(f"drawn: {path}")
    return 0 if is_right else 1


def _measure(options: dict[str, str], parts: list[str]) -> bool:
    """Measure and record the parts; returns whether all gates passed and no arm failed."""
    bench = _bench(options)
    if "gate" in parts:
        gate(bench)
    for context, batch in bench.cells if all(bench.gates.values()) else ():
        _cell(bench, bench.load(context, batch), parts)
        _record(bench, options)
    _record(bench, options)
    return all(bench.gates.values()) and not bench.num_failed


def _record(bench: Bench, options: dict[str, str]) -> None:
    """Append the rows that are new, so that a run that ends early leaves what it has measured."""
    save("sparse_attention", bench.rows, options)
    bench.rows.clear()


def _bench(options: dict[str, str]) -> Bench:
    """Measure stream and product, create the model and read the options."""
    device, block = options["device"], int(options["block"])
    stream, product = stream_rate(device=device), matmul_rate(device=device)
    print(f"read-only stream {stream / 1e12:.3f} TB/s, bf16 product {product / 1e12:.1f} TFLOP/s", flush=True)
    start = time.perf_counter()
    model = random_model(options["model"], device=device, dtype=DTYPES[options["dtype"]], block_size=block)
    print(f"random weights of {options['model']} after {time.perf_counter() - start:.1f} s", flush=True)
    arms = [
        SparseArm(
            name=name,
            stride=block,
            k=int(k),
            exact_layers=int(options["exact_layers"]),
            num_passes=int(num_passes),
        )
        for num_passes in options["passes"].split(",")
        for k in options["k"].split(",")
        for name in options["arms"].split(",")
    ]
    return Bench(
        model=model,
        stream=stream,
        product=product,
        arms=arms,
        cells=[(int(cell.split("x")[0]), cell.split("x", 1)[1]) for cell in options["cells"].split(",")],
        num_blocks=int(options["blocks"]),
        rounds=int(options["rounds"]),
    )


def gate(bench: Bench) -> None:
    """Compare logits at full budget with those of exact attention, over a short context."""
    context = min(GATE_CONTEXT, *(context for context, _ in bench.cells))
    load = replace(bench.load(context, "2"), context=context)
    for arm in {arm.name: arm for arm in bench.arms if arm.name in SPARSE}.values():
        error = parity_error(bench.model, arm, load)
        free_cached_memory()
        bench.gates[arm.name] = error < GATE_LIMIT
        bench.add(replace(arm, k=context), load, "full_budget_error", error, "share")


def _cell(bench: Bench, load: Load, parts: list[str]) -> None:
    """All arms of one context and batch."""
    found: dict[SparseArm, BlockMeasured] = {}
    for arm in bench.arms:
        start = time.perf_counter()
        try:
            if "blocks" in parts and not _measured_before(found, arm):
                found[arm] = _blocks(bench, arm, load)
            print(f"    {arm.name} took {time.perf_counter() - start:.1f} s", flush=True)
        except Exception as error:  # Too little memory for it, most likely: the others are measured.
            bench.num_failed += 1
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"    {arm.name} is left out: {detail}", flush=True)
        free_cached_memory()
    _compare(bench, found, load)


def _measured_before(found: dict[SparseArm, BlockMeasured], arm: SparseArm) -> bool:
    """Exact attention has no `k`, so one of them is enough."""
    same = [other for other in found if (other.name, other.num_passes) == (arm.name, arm.num_passes)]
    return bool(same) and not arm.accelerators()


def _blocks(bench: Bench, arm: SparseArm, load: Load) -> BlockMeasured:
    """Time per output block."""
    steady = steady_contexts(bench.model, arm, load, num_blocks=bench.num_blocks)
    measured = BlockMeasured(arm=arm, load=load, width=arm.stride)
    for _ in range(bench.rounds):
        steady.measure(measured)
    _free(bench, steady)
    floor = floor_of(bench.model, arm, load, stream=bench.stream, product=bench.product)
    bench.add(arm, load, "tpob_ms", tpob_ms(measured), "ms", floor=floor.block_ms(arm))
    bench.add(arm, load, "step_ms", measured.step_ms(), "ms")
    print(f"    rows laid out {sorted(measured.rows)}, tokens of each round {measured.tokens}", flush=True)
    return measured


def _free(bench: Bench, steady: SteadyContexts) -> None:
    """Drop the engine before the next one takes the memory."""
    steady.engine._worker.free_cached_memory()
    del steady.engine
    free_cached_memory()


def _compare(bench: Bench, found: dict[SparseArm, BlockMeasured], load: Load) -> None:
    """Ratios within the cell: every arm over exact, MAGE over the others."""
    for arm, measured in found.items():
        of_arm = {
            other.name: each
            for other, each in found.items()
            if other.num_passes == arm.num_passes and (other.k == arm.k or not other.accelerators())
        }
        ms = tpob_ms(measured)
        for metric, name in (
            ("tpob_speedup_vs_exact", "exact"),
            ("tpob_speedup_vs_unsplit", "exact_unsplit"),
        ):
            if name in of_arm and arm.name != name and arm.name != "exact_unsplit":
                bench.add(arm, load, metric, tpob_ms(of_arm[name]) / ms, "x")
        for name in ("quest", "sparsed"):
            if arm.name == "mage" and name in of_arm:
                bench.add(arm, load, f"mage_over_{name}", tpob_ms(of_arm[name]) / ms, "x")


if __name__ == "__main__":
    start(measure, __doc__)
