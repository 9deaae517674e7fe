"""Stages of increasing stride in one run (arXiv 2604.11035, appendix H.1, whose authors run one job per
stage), and the learning rate over them.

The stage of a step or data item is a pure function of its index: a resumed run and a run with other
accumulation see the same stages at the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

AUTO_BALANCED = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`num_steps` optimizer steps at one stride; `clean_weight` is s, None for s = L_mask / L_clean."""

    index: int
    stride: int
    num_steps: int
    clean_weight: float | None

    @property
    def name(self) -> str:
        weight = AUTO_BALANCED if self.clean_weight is None else f"{self.clean_weight:g}"
        return f"stride {self.stride}, clean weight {weight}, {self.num_steps} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """The stages of a run in order; one optimizer step consumes `global_batch` packed rows over all ranks."""

    stages: tuple[Stage, ...]
    global_batch: int

    @property
    def num_steps(self) -> int:
        return sum(stage.num_steps for stage in self.stages)

    @property
    def num_items(self) -> int:
        return self.num_steps * self.global_batch

    @property
    def max_stride(self) -> int:
        return max(stage.stride for stage in self.stages)

    def stage_of_step(self, step: int) -> Stage:
        """Return the stage of the 0-based optimizer step."""
        assert 0 <= step < self.num_steps, f"{step=} {self.num_steps=}"
        for stage in self.stages:
            if step < stage.num_steps:
                return stage
            step -= stage.num_steps
        raise AssertionError("unreachable: the stages add up to num_steps")

    def ends_stage(self, step: int) -> bool:
        """Return whether the 1-based optimizer step is the last one of a stage."""
        stage = self.stage_of_step(step - 1)
        return step == self.num_steps or self.stage_of_step(step).index != stage.index


def rate_factor(step: int, *, curriculum: Curriculum, schedule: str, warmup: float, decay: float) -> float:
    """Return the learning rate of the 0-based optimizer step as a share of its peak.

    `cosine`: a linear rise to the peak over the share `warmup` of the steps, then half a cosine to zero at
    the end of the run. `cosine_per_stage`: the same in every stage, as if each were a job of its own. `wsd`
    (warm-up, stable, decay): the peak after the rise, then a line to zero over the last share `decay` of the
    steps. Both zeros lie outside, before the first step and after the last: every step trains, in a stage of
    any length."""
    start, num_steps = 0, curriculum.num_steps
    if schedule == "cosine_per_stage" and step < num_steps:
        stage = curriculum.stage_of_step(step)
        start = sum(one.num_steps for one in curriculum.stages[: stage.index])
        num_steps = stage.num_steps
    step, num_rising = step - start, math.ceil(num_steps * warmup)
    if step < num_rising:
        return (step + 1) / num_rising
    if schedule == "wsd":
        return min(1.0, max(0, num_steps - step) / max(1, math.ceil(num_steps * decay)))
    # After the rise the results are those of transformers' `get_cosine_schedule_with_warmup`, bit for bit.
    # Its own rise begins with a step at rate 0, which changes no weight.
    progress = (step - num_rising) / max(1, num_steps - num_rising)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))


def split_steps(total: int, fractions: Sequence[float]) -> list[int]:
    """Return integer steps per stage that add up to `total`, each at least 1, by largest remainder."""
    assert total >= len(fractions) > 0, f"{total=} {fractions=}"
    exact = [total * fraction / sum(fractions) for fraction in fractions]
    steps = [max(1, int(value)) for value in exact]
    by_remainder = sorted(range(len(steps)), key=lambda i: exact[i] - steps[i], reverse=True)
    turn = 0
    while sum(steps) < total:
        steps[by_remainder[turn % len(steps)]] += 1
        turn += 1
    while sum(steps) > total:
        steps[max(range(len(steps)), key=lambda i: steps[i])] -= 1
    return steps
