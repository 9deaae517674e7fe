"""FOCUS against full blocks on one GPU, each replaying its own trace of what a pass decides.

    python -m benchmarks.eviction [batch=1,16,32,64,128,256] [context=1024,4096] [block=32]
        [commit=clean,unfrozen] [parts=gate,throughput] [rounds=2] [passes=24] [warmup=auto]

SDAR-8B's shape with random weights and random KV; every sequence is at another step of its block, and blocks
are decided at the same threshold in both arms. All kernels run on real queries and keys; then the deltas and
positions of a drawn trace (eviction_trace.py) replace what they found.
First the gate: with a budget of the whole block the logits are those of full blocks. `throughput` measures
full blocks and FOCUS, each after the warm-up of a server (`warmup`: auto, full or off), and compares with the
limit that follows from the trace's rows and the rates of this run. It needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import models
from benchmarks.engine.decoding.harness import SAMPLING, Load
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
from benchmarks.models import free_bytes, slot_bytes
from benchmarks.shared import chosen, defaults, numbers, parse_options, start
from idlm.devices import free_cached_memory

DEFAULTS = defaults(
    "model=qwen3-8b device=cuda dtype=bfloat16 batch=1,16,32,64,128,256 context=1024,4096 "
    "block=32 commit=clean,unfrozen parts=gate,throughput rounds=2 passes=24 warmup=auto record=true"
)
COMMITS = ("clean", "unfrozen")
TOKENS_A_PASS = 4
"""Room for tokens: more than a pass decides on average."""
SMALL_BATCH, SMALL_FACTOR = 32, 2
RESERVED_BYTES = 9 << 30
"""For graphs, logits and workspaces; weights and KV come on top."""
MAX_LOST = 0.05
"""Share of passes in which sequences may store a block or wait, in addition to those of the trace."""
GATE_CONTEXT = 448


@dataclass(slots=True, kw_only=True)
class Bench(models.Bench):
    """Blocks of the trace's size, over contexts of `context`; `gate`: whether the logits are right."""

    trace: UnmaskTrace
    context: int = 0
    gate: bool | None = None

    @property
    def full(self) -> EvictionArm:
        return EvictionArm(name="full", stride=self.trace.block_size)

    def focus(self, commit: str = "unfrozen") -> EvictionArm:
        return replace(self.full, name="focus", alpha=self.trace.alpha, commit=commit)

    def passes(self, batch: int) -> int:
        """Passes of a round: small batches are fast, and hold fewer blocks of the trace."""
        return self.number("passes") * (SMALL_FACTOR if batch <= SMALL_BATCH else 1)

    def load(self, batch: int) -> Load:
        num_passes = (MAX_WARM_ROUNDS + self.number("rounds")) * self.passes(batch)
        num_tokens = TOKENS_A_PASS * num_passes + 4 * self.trace.block_size
        return Load(concurrency=batch, context=self.context, num_tokens=num_tokens, sampling=SAMPLING["T1"])

    def batches(self) -> list[int]:
        """The batches whose KV fits with graphs and workspaces."""
        found = []
        for batch in numbers(self.options["batch"]):
            load = self.load(batch)
            kv_bytes = load.concurrency * (load.context + load.num_tokens) * slot_bytes(self.model)
            if kv_bytes + RESERVED_BYTES < free_bytes(self.model):
                found.append(batch)
            else:
                print(f"batch {batch} with contexts of {self.context} does not fit", flush=True)
        return found

    def window(self, arm: EvictionArm, batch: int) -> Window:
        steady = SteadyTrace(self.model, arm, self.load(batch), self.trace)
        found = steady.window(self.number("rounds"), self.passes(batch))
        steady.free()
        return found

    def speed(self, arm: EvictionArm, found: Window) -> float:
        return found.tokens_per_second(implied_rows(self.trace, arm).tokens)

    def limit(self, arm: EvictionArm, batch: int) -> float:
        rows, size = implied_rows(self.trace, arm), self.trace.block_size
        decided = rows.tokens * self.number("rounds") * self.passes(batch)
        slots = self.context + WARM_UP_BLOCKS * size + decided / 2 + size
        minimum = limit_ms(self.model, rows, batch=batch, slots=slots, rates=self.rates)
        return 1e3 * batch * rows.tokens / minimum

    def case(self, batch: int, **more: Any) -> dict[str, Any]:
        size = self.trace.block_size
        return {"batch": batch, "block": size, "context": self.context, **more, "trace": self.trace.name}

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> None:
        exactness = "exact" if case.get("arm") == "full" or metric.startswith("full_") else "lossy"
        gate = more.pop("gate_passed", self.gate)
        self.report.add(case, metric, value, unit, gate_passed=gate, exactness=exactness, **more)


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="eviction")
    parts = chosen(options, "parts", PARTS)
    chosen(options, "commit", COMMITS)
    traces = [synthetic_trace(size) for size in numbers(options["block"])]
    fields = models.opened("eviction", options, block_size=traces[0].block_size)
    bench = Bench(**fields, trace=traces[0])
    for trace in traces:
        semantics = replace(bench.model.semantics, block_size=trace.block_size)
        bench.model, bench.trace, bench.gate = replace(bench.model, semantics=semantics), trace, None
        for context in numbers(options["context"]):
            bench.context = context
            for part in parts:
                # The gate is the same for all contexts; nothing is measured after one that fails.
                if bench.gate is None or (bench.gate and part != "gate"):
                    PARTS[part](bench)
    return bench.report.status


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
        speeds: dict[str, float] = {}
        for name in ("full", *bench.options["commit"].split(",")):
            arm = bench.full if name == "full" else bench.focus(name)
            warm: Any = bench.options["warmup"]
            found = bench.window(replace(arm, warmup=warm), batch)
            _add_window(bench, arm, found)
            speeds[name] = bench.speed(arm, found)
            if name == "full":
                flops = linear_flops(bench.model, implied_rows(bench.trace, arm), batch=batch)
                share = flops / (found.step_ms / 1e3) / bench.rates.product
                bench.add(bench.case(batch), "full_block_share_of_matmul", share, "share")
                continue
            limit = bench.limit(arm, batch) / bench.limit(bench.full, batch)
            ratio = speeds[name] / speeds["full"]
            case = bench.case(batch, commit=name)
            bench.add(case, "throughput_over_full_block", ratio, "x", floor=limit)


def _add_window(bench: Bench, arm: EvictionArm, found: Window) -> None:
    """The rows of one arm: speed, tokens of a pass, rows a token by part, waits, padding, graphs."""
    implied, evicts = implied_rows(bench.trace, arm), arm.alpha is not None
    case = bench.case(found.batch, arm=arm.name, **({"commit": arm.commit} if evicts else {}))
    limit = bench.limit(arm, found.batch)
    bench.add(case, "tokens_per_second", bench.speed(arm, found), "tokens/s", floor=limit)
    is_whole, traced = found.traced_share > 1 - MAX_LOST, found.num_tokens / found.num_traced
    bench.add(case, "tokens_per_pass", found.tokens_per_pass, "tokens", baseline=traced, gate_passed=is_whole)
    bench.add(case, "step_ms", found.step_ms, "ms")
    rows = found.requested if evicts else found.computed
    for part, num_rows, expected in (
        ("prefix", rows.fed, implied.prefix_per_token),
        ("suffix", rows.retained, implied.suffix_per_token),
        ("head", rows.head, implied.head / implied.tokens),
    ):
        value = num_rows / found.num_tokens
        bench.add(case | {"part": part}, "rows_per_token", value, "rows", baseline=expected)
    if evicts:
        bench.add(case, "waiting_share", found.waiting_share, "share")
        bench.add(case, "padding_share", found.padding_share, "share")
    bench.add(case, "graphs_captured", found.num_captured, "graphs")
    if found.warm_up.num_graphs:
        bench.add(case, "graphs_captured_ahead", found.warm_up.num_graphs, "graphs")
        bench.add(case, "graphs_captured_settling", found.num_settling, "graphs")
        bench.add(case, "warm_up_seconds", found.warm_up.seconds, "s")
        bench.add(case, "warm_up_memory", found.warm_up.num_bytes / 1e9, "GB")


PARTS: dict[str, Callable[[Bench], None]] = {"gate": gate, "throughput": throughput}

if __name__ == "__main__":
    start(measure, __doc__)
