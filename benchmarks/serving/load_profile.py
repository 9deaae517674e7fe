"""Kernel times of what mixed traffic consists of: passes of prompts, of decoding, of both (not recorded)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.engine.kernel_profile import kernel_times, lines_of
from benchmarks.serving.bench import STEADY_PROMPT, Bench
from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine

NUM_PASSES, PROMPT_PASSES, SETTLING_PASSES = 8, 3, 10
ARRIVAL = 512
"""Prompt tokens of the request that joins each mixed pass."""


@dataclass(slots=True)
class _Traffic:
    """An engine under load (`kernel_profile.Profiled`). `arrivals`: requests that still come, one before
    each pass.
    """

    engine: Engine
    arrivals: list[list[int]]
    num_added: int = 0

    def add(self, prompt: list[int]) -> None:
        """Queue a request that answers for ever."""
        params = SamplingParams(max_tokens=1 << 20, ignore_eos=True, seed=0)
        self.engine.add_request(f"profile-{self.num_added}", prompt, params)
        self.num_added += 1

    def run_passes(self, num_passes: int) -> None:
        """Launch passes."""
        for _ in range(num_passes):
            if self.arrivals:
                self.add(self.arrivals.pop())
            self.engine.step()

    def drain(self) -> None:
        """Wait for all passes."""
        self.engine._collect(max_inflight=0)


def print_profile(bench: Bench, engine: Engine, concurrency: int) -> None:
    """Print where the time of each sort of pass goes."""
    dice, length = random.Random(4), STEADY_PROMPT // bench.scale
    traffic = _Traffic(engine, [])

    def prompt(length: int) -> list[int]:
        return [dice.choice(bench.ids) for _ in range(length)]

    def show(name: str, num_passes: int) -> None:
        traffic.drain()
        times = kernel_times(traffic, num_passes)
        print(f"{name}, C={concurrency}", *lines_of(times, {}), sep="\n", flush=True)

    for _ in range(max(1, concurrency - NUM_PASSES)):
        traffic.add(prompt(length))
    show("prompts", PROMPT_PASSES)
    while engine.scheduler.waiting or any(not request.token_ids for request in engine.scheduler.running):
        engine.step()
    traffic.run_passes(SETTLING_PASSES)
    show("decoding", NUM_PASSES)
    traffic.arrivals = [prompt(max(2, ARRIVAL // bench.scale)) for _ in range(NUM_PASSES)]
    show(f"decoding and {ARRIVAL} prompt rows", NUM_PASSES)
    for number in range(traffic.num_added):
        engine.abort(f"profile-{number}")
    traffic.drain()
