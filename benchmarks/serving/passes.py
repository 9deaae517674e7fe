"""Counts what an engine's passes cost: what Triton compiled, and times on host and device with and without
CUDA graphs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any
from unittest import mock

from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.worker import InflightStep, Worker

Row = tuple[str, float, str]
NUM_SHOWN = 4


@dataclass
class Passes:
    """Since the last `take`: seconds of launches on the `host` and of passes on the `device`, by whether the
    pass was eager; how often each mode ran; kernels that Triton compiled, by seconds, and how many it
    `loaded` from its cache.
    """

    host: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    device: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    modes: Counter[int] = field(default_factory=Counter)
    compiled: list[tuple[float, str]] = field(default_factory=list)
    loaded: int = 0
    start_time: float = field(default_factory=time.perf_counter)
    is_eager: bool = True
    eager_schedules: set[int] = field(default_factory=set)

    def take(self) -> list[Row]:
        """Metrics since the last call: name, value, unit."""
        seconds = time.perf_counter() - self.start_time
        slowest = sorted(self.compiled, reverse=True)[:NUM_SHOWN]
        print("  slowest to compile:", *(f"{name} {taken:.1f} s" for taken, name in slowest))
        print("  passes by mode:", dict(self.modes.most_common(NUM_SHOWN)))
        rows: list[Row] = [
            ("kernels_compiled", len(self.compiled), "kernels"),
            ("compile_s", sum(taken for taken, _ in self.compiled), "s"),
            ("kernels_loaded", self.loaded, "kernels"),
        ]
        for is_eager, name in ((False, "graph"), (True, "eager")):
            host, device = self.host[is_eager], self.device[is_eager]
            rows.append((f"{name}_passes", len(host), "passes"))
            if host and device:
                rows.append((f"{name}_host_ms", 1e3 * fmean(host), "ms"))
                rows.append((f"{name}_device_ms", 1e3 * fmean(device), "ms"))
        busy = sum(sum(values) for values in self.device.values())
        rows.append(("device_busy", busy / max(seconds, 1e-9), "fraction"))
        self.__dict__.update(Passes().__dict__)
        return rows


@contextmanager
def watching() -> Iterator[Passes]:
    """Within this context, engines of this process count their passes."""
    passes = Passes()
    graph_of, launch, emissions = StaticStep._graph, Worker.launch, InflightStep.emissions

    def noting_graph(self: StaticStep, *arguments: Any) -> Any:
        found = graph_of(self, *arguments)
        passes.is_eager = found is None
        return found

    def timing_launch(self: Worker, schedule: Any) -> Any:
        passes.is_eager, start_time = True, time.perf_counter()
        result = launch(self, schedule)
        passes.host[passes.is_eager].append(time.perf_counter() - start_time)
        passes.modes[schedule.mode] += 1
        (passes.eager_schedules.add if passes.is_eager else passes.eager_schedules.discard)(id(schedule))
        return result

    def timing_device(self: InflightStep) -> Any:
        found = emissions(self)
        passes.device[id(self.schedule) in passes.eager_schedules].append(self.seconds())
        return found

    with (
        mock.patch.object(StaticStep, "_graph", noting_graph),
        mock.patch.object(Worker, "launch", timing_launch),
        mock.patch.object(InflightStep, "emissions", timing_device),
        _hearing_compiler(passes),
    ):
        yield passes


@contextmanager
def _hearing_compiler(passes: Passes) -> Iterator[None]:
    """Triton tells of each kernel that it compiles or loads."""
    try:
        from triton import knobs
    except ImportError:
        yield
        return

    def heard(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            passes.loaded += 1
        else:
            passes.compiled.append((times.total / 1e6, src.name))

    before, knobs.compilation.listener = knobs.compilation.listener, heard
    try:
        yield
    finally:
        knobs.compilation.listener = before
