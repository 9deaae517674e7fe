"""Kernel times of a decoding pass by name and by kind, for AR, ISD and R-ISD.

    python -m benchmarks.decode parts=profile concurrency=1,64 contexts=1024 strides=4      (not recorded)

Times are the kernels' own: where one is launched before the other has ended, they overlap and add up to more
than the pass.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from benchmarks.engine.decoding.bench import Bench
from benchmarks.engine.decoding.harness import Arm, SteadyEngine, adapted
from benchmarks.engine.decoding.replay import replaying
from benchmarks.engine.kernel_profile import KernelTime, kernel_times, lines_of

MAX_PASSES = 20
"""More passes add nothing, and the profiler keeps every kernel of each."""


def print_profiles(bench: Bench, arms: list[Arm], *, adapter_rank: int) -> None:
    """Profile every arm, and the last one with a gated adapter too, at every concurrency and context."""
    cases = [(arm, None) for arm in arms] + [(replace(arms[-1], name=f"gated {arms[-1].name}"), adapter_rank)]
    for context in bench.contexts:
        for concurrency in bench.concurrency:
            for arm, rank in cases:
                with contextlib.nullcontext() if rank is None else adapted(bench.model, rank):
                    times = _profiled(bench, arm, concurrency, context)
                print(f"{arm.name} C={concurrency} {context}", *lines_of(times, {}), sep="\n", flush=True)


def _profiled(bench: Bench, arm: Arm, concurrency: int, context: int) -> list[KernelTime]:
    """Kernel times in steady decoding. The engine is freed when this returns."""
    steady = SteadyEngine(bench.model, arm, bench.load(concurrency, context), bench.trace(arm))
    with steady.toggled(), replaying(steady.replay):
        steady.start_requests()
        steady.run_tokens(steady.warm_up_tokens)
        steady.drain()
        times = kernel_times(steady, min(MAX_PASSES, bench.num_passes))
        steady.abort_all()
    return times
