"""What the parts of the eviction benchmark share: model, rates, trace, cells, and their rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.engine.decoding.harness import SAMPLING, Load
from benchmarks.engine.sparse_harness import largest_batch
from benchmarks.engine.unmasking.harness import (
    MAX_WARM_ROUNDS,
    WARM_UP_BLOCKS,
    EvictionArm,
    SteadyTrace,
    Window,
    fits,
    implied_rows,
)
from benchmarks.engine.unmasking.limit import limit_ms
from benchmarks.engine.unmasking.trace import UnmaskTrace
from benchmarks.results import result_row
from idlm.devices import free_cached_memory
from idlm.infer.models.loader import LoadedModel

TOKENS_A_PASS = 4
"""Room for tokens: more than a pass decides on average."""
SMALL_BATCH, SMALL_FACTOR = 32, 2


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
