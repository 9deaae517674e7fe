"""FOCUS against full blocks on one GPU, each replaying its own trace of what a pass decides.

    python -m benchmarks.eviction [batch=1,16,32,64,128,256] [context=1024,4096] [block=32]
        [commit=clean,unfrozen] [parts=gate,throughput] [rounds=2] [passes=24] [warmup=auto]
    python -m benchmarks.eviction parts=mage context=32768 batch=max k=1024

SDAR-8B's shape with random weights and random KV; every sequence is at another step of its block, and blocks
are decided at the same threshold in both arms. All kernels run on real queries and keys; then the deltas and
places of a drawn trace (eviction_trace.py) replace what they found.
First the gate: with a budget of the whole block the logits are those of full blocks. `throughput` measures
full blocks and FOCUS, each after the warm-up of a server (`warmup`: auto, full or off), and compares with the
limit that follows from the trace's rows and the rates of this run. `mage` compares neither, each alone and
both over long contexts. Every cell prints as it ends; a table is last. It needs a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.engine.decoding.harness import SAMPLING, Load, random_model, slot_bytes
from benchmarks.engine.eviction_harness import (
    GATE_LIMIT,
    MAX_WARM_ROUNDS,
    WARM_UP_BLOCKS,
    EvictionArm,
    SteadyTrace,
    Window,
    implied_rows,
    parity_error,
)
from benchmarks.engine.eviction_trace import UnmaskTrace, limit_ms, linear_flops, synthetic_trace
from benchmarks.engine.sparse_harness import largest_batch
from benchmarks.results import result_row
from benchmarks.shared import defaults, parse_options, save, start
from benchmarks.stream import matmul_rate, stream_rate
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.infer.models.loader import DTYPES, LoadedModel

TOKENS_A_PASS = 4
"""Room for tokens: more than a pass decides on average."""
SMALL_BATCH, SMALL_FACTOR = 32, 2
RESERVED_BYTES = 9 << 30
"""For graphs, logits and workspaces beside weights and KV."""


@dataclass(slots=True, kw_only=True)
class Bench:
    """Model, measured rates and options of all parts; parts append to `rows` and to `table`."""

    model: LoadedModel
    stream: float
    product: float
    options: dict[str, str]
    trace: UnmaskTrace
    context: int = 0
    gate: bool | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    table: list[str] = field(default_factory=list)

    @property
    def full(self) -> EvictionArm:
        """Full blocks."""
        return EvictionArm(name="full", stride=self.trace.block_size)

    def focus(self, commit: str = "unfrozen") -> EvictionArm:
        """FOCUS as it is by default, with these commits."""
        return replace(self.full, name="focus", alpha=self.trace.alpha, commit=commit)

    def passes(self, batch: int) -> int:
        """Passes of a round: small batches are fast, and hold fewer blocks of the trace."""
        return int(self.options["passes"]) * (SMALL_FACTOR if batch <= SMALL_BATCH else 1)

    def load(self, batch: int) -> Load:
        """The load of a cell, with room for the tokens of all rounds."""
        num_passes = (MAX_WARM_ROUNDS + int(self.options["rounds"])) * self.passes(batch)
        num_tokens = TOKENS_A_PASS * num_passes + 4 * self.trace.block_size
        return Load(concurrency=batch, context=self.context, num_tokens=num_tokens, sampling=SAMPLING["T1"])

    def batches(self) -> list[int]:
        """The batches whose KV fits; `max` is the largest."""
        found = []
        for text in self.options["batch"].split(","):
            if text == "max":
                found.append(largest_batch(self.model, self.context, self.load(1).num_tokens))
            elif fits(self.model, self.load(int(text))):
                found.append(int(text))
            else:
                print(f"batch {text} with contexts of {self.context} does not fit", flush=True)
        return found

    def warm(self, arm: EvictionArm) -> EvictionArm:
        """The arm with graphs captured ahead, as the option `warmup` says."""
        return replace(arm, warmup=self.options["warmup"])  # type: ignore[arg-type]

    def window(self, arm: EvictionArm, batch: int) -> Window:
        """Measure an arm."""
        start, load = time.perf_counter(), self.load(batch)
        steady = SteadyTrace(self.model, arm, load, self.trace)
        found = steady.window(int(self.options["rounds"]), self.passes(batch))
        self.free(steady)
        ahead = found.ahead
        print(
            f"    {arm.name} {arm.commit} took {time.perf_counter() - start:.1f} s: step {found.step_ms:.2f} "
            f"ms, {found.num_captured} graphs captured in {sum(found.passes)} passes ({found.num_settling} "
            f"before, {ahead.num_graphs} of {ahead.num_wanted} ahead in {ahead.seconds:.1f} s and "
            f"{ahead.num_bytes / 1e9:.2f} GB), rows asked for {found.asked}, computed {found.computed}",
            flush=True,
        )
        return found

    def speed(self, arm: EvictionArm, found: Window) -> float:
        """Tokens per second."""
        return found.tokens_per_second(implied_rows(self.trace, arm).tokens)

    def limit(self, arm: EvictionArm, batch: int) -> float:
        """Tokens per second at most, from the trace's rows."""
        rows, size = implied_rows(self.trace, arm), self.trace.block_size
        decided = rows.tokens * int(self.options["rounds"]) * self.passes(batch)
        slots = self.context + WARM_UP_BLOCKS * size + decided / 2 + size
        least = limit_ms(self.model, rows, batch=batch, slots=slots, stream=self.stream, product=self.product)
        return 1e3 * batch * rows.tokens / least

    def case(self, batch: int, **more: Any) -> dict[str, Any]:
        """What all rows of a cell have."""
        size = self.trace.block_size
        return {"batch": batch, "block": size, "context": self.context, **more, "trace": self.trace.name}

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> None:
        """Append one result row and print it as a line."""
        exactness = "exact" if case.get("arm") == "full" or metric.startswith("full_") else "lossy"
        gate = more.pop("gate_passed", self.gate)
        row = result_row("eviction", case, metric, value, unit, gate_passed=gate, exactness=exactness, **more)
        self.rows.append(row)
        detail = " ".join(f"{key} {each:.4g}" for key, each in more.items() if each is not None)
        name = " ".join(f"{key}={each}" for key, each in case.items())
        print(f"{metric:26s} {value:10.4g} {unit:8s} {detail}  {name}", flush=True)

    def free(self, steady: SteadyTrace) -> None:
        """Drop the engine before the next one takes the memory."""
        steady.engine._worker.free_cached_memory()
        del steady.engine
        free_cached_memory()


DEFAULTS = defaults(
    "model=qwen3-8b device=cuda dtype=bfloat16 batch=1,16,32,64,128,256 context=1024,4096 "
    "block=32 commit=clean,unfrozen k=1024 exact_layers=2 parts=gate,throughput rounds=2 "
    "passes=24 warmup=auto record=true"
)
COMMITS = ("clean", "unfrozen")
MAX_LOST = 0.05
"""Share of passes in which sequences may store a block or wait, beside those of the trace."""
GATE_CONTEXT = 448


def measure(arguments: list[str]) -> int:
    """Run the parts that the arguments name; returns the exit status, 1 if the gate fails."""
    options = parse_options(arguments, DEFAULTS, needs_gpu="eviction")
    parts, commits = options["parts"].split(","), options["commit"].split(",")
    if not set(parts) <= set(PARTS) or not set(commits) <= set(COMMITS):
        raise UserError(
            "IDLM-0107",
            f"parts={options['parts']} commit={options['commit']}",
            fix=f"use parts of {', '.join(PARTS)} and commits of {', '.join(COMMITS)}",
        )
    sizes = [int(size) for size in options["block"].split(",")]
    traces = {size: synthetic_trace(size) for size in sizes}
    bench = _bench(options, traces[sizes[0]])
    for size in sizes:
        semantics = replace(bench.model.semantics, block_size=size)
        bench.model, bench.trace = replace(bench.model, semantics=semantics), traces[size]
        bench.gate = None
        describe(bench)
        for context in map(int, options["context"].split(",")):
            bench.context = context
            for part in parts:
                # The gate is the same for all contexts; nothing is measured after one that fails.
                if bench.gate is None or (bench.gate and part != "gate"):
                    PARTS[part](bench)
    print("\n".join(bench.table))
    save("eviction", bench.rows, options)
    return int(any(row["gate_passed"] is False for row in bench.rows))


def fits(model: LoadedModel, load: Load) -> bool:
    """Whether the KV of a load fits beside graphs and workspaces."""
    if model.device.type != "cuda":
        return True
    num_slots = load.concurrency * (load.context + load.num_tokens)
    return num_slots * slot_bytes(model) + RESERVED_BYTES < torch.cuda.mem_get_info(model.device)[0]


def _bench(options: dict[str, str], trace: UnmaskTrace) -> Bench:
    """Measure stream and product and create the model."""
    device = options["device"]
    stream, product = stream_rate(device=device), matmul_rate(device=device)
    print(f"read-only stream {stream / 1e12:.3f} TB/s, bf16 product {product / 1e12:.1f} TFLOP/s", flush=True)
    start, dtype = time.perf_counter(), DTYPES[options["dtype"]]
    model = random_model(options["model"], device=device, dtype=dtype, block_size=trace.block_size)
    print(f"random weights of {options['model']} after {time.perf_counter() - start:.1f} s", flush=True)
    return Bench(model=model, stream=stream, product=product, options=options, trace=trace)


def describe(bench: Bench) -> None:
    """Print what the trace implies."""
    trace = bench.trace
    print(f"trace {trace.name}, blocks of {trace.block_size}: {trace.source}, threshold {trace.threshold}")
    for arm in (bench.full, *(bench.focus(commit) for commit in COMMITS)):
        rows = implied_rows(trace, arm)
        print(
            f"    {arm.name} {arm.commit}: {rows.tokens:.3f} tokens a pass; rows a token "
            f"{rows.prefix_per_token:.2f} in layers 0-1, {rows.suffix_per_token:.2f} behind, head "
            f"{rows.head / rows.tokens:.2f}",
            flush=True,
        )


def gate(bench: Bench) -> None:
    """Compare logits at a budget of the whole block with those of full blocks, over a short context."""
    context, bench.context = bench.context, min(GATE_CONTEXT, bench.context)
    load = replace(bench.load(2), sampling=SAMPLING["greedy"])
    error = parity_error(bench.model, bench.full, load, bench.trace)
    free_cached_memory()
    bench.gate = error < GATE_LIMIT
    bench.add(bench.case(2), "full_budget_error", error, "share")
    bench.context = context


def throughput(bench: Bench) -> None:
    """Full blocks, and FOCUS with each kind of commit, for every batch."""
    for batch in bench.batches():
        full = bench.window(bench.warm(bench.full), batch)
        _notes(bench, bench.full, full)
        base, base_limit = bench.speed(bench.full, full), bench.limit(bench.full, batch)
        rows = implied_rows(bench.trace, bench.full)
        share = linear_flops(bench.model, rows, batch=batch) / (full.step_ms / 1e3) / bench.product
        bench.add(bench.case(batch), "full_block_share_of_matmul", share, "share")
        for commit in bench.options["commit"].split(","):
            arm = bench.focus(commit)
            found = bench.window(bench.warm(arm), batch)
            _notes(bench, arm, found)
            ratio, limit = bench.speed(arm, found) / base, bench.limit(arm, batch) / base_limit
            case = bench.case(batch, commit=commit)
            bench.add(case, "throughput_over_full_block", ratio, "x", floor=limit)
            bench.table.append(
                f"block {bench.trace.block_size:3d} context {bench.context:5d} batch {batch:4d} {commit:8s} "
                f"{full.step_ms:8.2f} -> {found.step_ms:7.2f} ms  {ratio:5.2f}x of {limit:5.2f}x "
                f"({ratio / limit:4.2f})  full at {share:4.2f} of matmul  waits "
                f"{100 * found.waiting_share:4.2f} %  padding {100 * found.padding_share:5.1f} %"
            )


def _notes(bench: Bench, arm: EvictionArm, found: Window) -> None:
    """The rows of one arm: speed, tokens of a pass, rows a token by part, waits, padding, graphs."""
    implied, evicts = implied_rows(bench.trace, arm), arm.alpha is not None
    more = {"arm": arm.name} | ({"commit": arm.commit} if evicts else {})
    case = bench.case(found.batch, **more)
    bench.add(
        case, "tokens_per_second", bench.speed(arm, found), "tokens/s", floor=bench.limit(arm, found.batch)
    )
    is_whole = found.traced_share > 1 - MAX_LOST
    traced = found.num_tokens / found.num_traced
    bench.add(case, "tokens_per_pass", found.tokens_per_pass, "tokens", baseline=traced, gate_passed=is_whole)
    bench.add(case, "step_ms", found.step_ms, "ms")
    rows = found.asked if evicts else found.computed
    parts = {
        "prefix": (rows.fed, implied.prefix_per_token),
        "suffix": (rows.kept, implied.suffix_per_token),
        "head": (rows.head, implied.head / implied.tokens),
    }
    for part, (num_rows, expected) in parts.items():
        value = num_rows / found.num_tokens
        bench.add(case | {"part": part}, "rows_per_token", value, "rows", baseline=expected)
    if evicts:
        bench.add(case, "waiting_share", found.waiting_share, "share")
        bench.add(case, "padding_share", found.padding_share, "share")
    bench.add(case, "graphs_captured", found.num_captured, "graphs")
    if found.ahead.num_graphs:
        bench.add(case, "graphs_captured_ahead", found.ahead.num_graphs, "graphs")
        bench.add(case, "graphs_captured_settling", found.num_settling, "graphs")
        bench.add(case, "warm_up_seconds", found.ahead.seconds, "s")
        bench.add(case, "warm_up_memory", found.ahead.num_bytes / 1e9, "GB")


def mage(bench: Bench) -> None:
    """Neither, FOCUS, MAGE, and both."""
    k, exact_layers = int(bench.options["k"]), int(bench.options["exact_layers"])
    for batch in bench.batches():
        speeds = {}
        for name, base in (("neither", bench.full), ("focus", bench.focus())):
            for mage_k in (None, k):
                label = name if mage_k is None else f"{name}+mage"
                arm = replace(base, name=label, mage_k=mage_k, exact_layers=exact_layers)
                speeds[label] = bench.speed(arm, bench.window(arm, batch))
                case = bench.case(batch, k=k, arm=label)
                bench.add(case, "tokens_per_second", speeds[label], "tokens/s")
        both, better = speeds["focus+mage"], max(speeds["focus"], speeds["neither+mage"])
        case = bench.case(batch, k=k)
        bench.add(case, "focus_mage_over_better", both / better, "x")
        bench.add(case, "focus_mage_over_neither", both / speeds["neither"], "x")
        bench.table.append(
            f"context {bench.context} batch {batch}: both over the better {both / better:.2f}x, over neither "
            f"{both / speeds['neither']:.2f}x"
        )


PARTS: dict[str, Callable[[Bench], None]] = {
    "gate": gate,
    "throughput": throughput,
    "mage": mage,
}

if __name__ == "__main__":
    start(measure, __doc__)
