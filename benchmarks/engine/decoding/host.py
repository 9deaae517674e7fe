"""Cost of the host in a steady run: how long the GPU idles, and how many passes run per wait of the host.

Idle: two one-thread kernels per pass, in its graph, record the GPU's clock before its first and after its
last kernel; the time between passes is idle. Waits: torch's reports of synchronizing calls, and every time
that the host had to wait for results while no further pass was queued. Shapes: S passes.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engine.decoding.harness import SteadyEngine
from benchmarks.engine.decoding.replay import replaying
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.model_runner import Step, StepResult
from idlm.infer.runtime.worker import Emission, InflightStep
from idlm.infer.state.batch import Batch, PromptRows


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """`idle_share` of the time from the first pass to the end of the last; `num_waits` in `num_passes`."""

    idle_share: float
    num_waits: int
    num_passes: int

    @property
    def passes_per_wait(self) -> float:
        """A lower bound: a run without any wait counts as one."""
        return self.num_passes / max(1, self.num_waits)


class _Stamped:
    """A `Step` that records when the device begins and ends it."""

    def __init__(self, step: Step, capacity: int) -> None:
        self.step = step
        self.decoder, self.table, self.runner = step.decoder, step.table, step.runner
        device = step.table.device
        self.times_S2 = torch.zeros(capacity, 2, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, batch: Batch, prompt_rows: PromptRows | None = None) -> StepResult:
        self._stamp(is_end=False)
        result = self.step(batch, prompt_rows)
        self._stamp(is_end=True)
        return result

    def _stamp(self, *, is_end: bool) -> None:
        if self.count.is_cuda:
            from benchmarks.engine.decoding import kernels as decode_kernels

            decode_kernels.stamp(self.times_S2, self.count, is_end=is_end)
            return
        self.times_S2[int(self.count) % len(self.times_S2), int(is_end)] = time.perf_counter_ns()
        self.count += int(is_end)


def host_cost(steady: SteadyEngine, num_passes: int) -> HostCost:
    """Run `num_passes` in steady decoding, for which the load must leave room, and compare the clocks."""
    step = steady.engine._parts.step
    assert isinstance(step, StaticStep), f"{type(step)=}"
    stamped = _Stamped(step._step, 4 * num_passes)
    step._step = stamped  # type: ignore[assignment]
    with steady.toggled(), replaying(steady.replay), _Waits(steady) as waits:
        steady.reach_steady_state(num_passes // 2)
        stamped.count.zero_()
        waits.begin()
        steady.run_passes(num_passes)
        num_waits = waits.end()
        steady.drain()
        num_seen = int(stamped.count)
        steady.abort_all()
    begins, ends = stamped.times_S2[:num_seen].T.tolist()
    busy = sum(ends) - sum(begins)
    return HostCost(idle_share=1 - busy / (ends[-1] - begins[0]), num_waits=num_waits, num_passes=num_passes)


class _Waits:
    """Counts waits of the host between `begin` and `end`."""

    def __init__(self, steady: SteadyEngine) -> None:
        self._engine, self._count, self._original = steady.engine, 0, InflightStep.emissions
        self._warnings: Any = None
        self._has_gpu = steady.engine.table.device.type == "cuda"

    def __enter__(self) -> _Waits:
        original, engine = self._original, self._engine

        def emissions(inflight_step: InflightStep) -> list[Emission]:
            event = inflight_step._event
            self._count += not engine._inflight and event is not None and not event.query()
            return original(inflight_step)

        InflightStep.emissions = emissions  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: object) -> None:
        InflightStep.emissions = self._original  # type: ignore[method-assign]
        self._mode("default")

    def _mode(self, mode: str) -> None:
        if self._has_gpu:
            torch.cuda.set_sync_debug_mode(mode)

    def begin(self) -> None:
        self._count = 0
        self._warnings = warnings.catch_warnings(record=True)
        self._caught = self._warnings.__enter__()
        warnings.simplefilter("always")
        self._mode("warn")

    def end(self) -> int:
        self._mode("default")
        self._warnings.__exit__(None, None, None)
        return self._count + sum("synchroniz" in str(found.message) for found in self._caught)
