"""Exact-match, acceptance and tokens per forward of an engine on a verifiable task: the numbers of every
table.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from idlm.contracts import Completion, SamplingParams
from idlm.infer.engine import Engine
from idlm.tasks import Task, TaskSample, Verdict

NUM_SEEDS = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One engine on one set of prompts.

    `tokens_per_forward` counts every pass, prompts included; `decode_tokens_per_forward` leaves each
    request's prompt pass (which emits one token) aside, as the closed forms of idlm.acceptance do.
    `acceptance_by_position[j]`: share of the tested drafts at position j+1 that were accepted. `seconds`
    of wall clock, batch decoding.
    """

    num_prompts: int
    exact_match: float
    final_answer_match: float
    num_tokens: int
    num_forwards: int
    num_prompt_passes: int
    accepted_by_position: tuple[int, ...]
    tested_by_position: tuple[int, ...]
    seconds: float
    exactness: str
    completions: tuple[Completion, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens over passes."""
        return self.num_tokens / self.num_forwards

    @property
    def decode_tokens_per_forward(self) -> float:
        """The same without prompt passes."""
        passes = self.num_forwards - self.num_prompt_passes
        return (self.num_tokens - self.num_prompt_passes) / passes if passes else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over tested drafts, or None (autoregressive decoding)."""
        tested = sum(self.tested_by_position)
        return sum(self.accepted_by_position) / tested if tested else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Conditional on the earlier drafts having passed."""
        pairs = zip(self.accepted_by_position, self.tested_by_position, strict=True)
        return tuple(accepted / tested if tested else 0.0 for accepted, tested in pairs)

    @property
    def tokens_per_second(self) -> float:
        """Over the whole batch."""
        return self.num_tokens / self.seconds


def task_samples(task: Task, split: str, num: int) -> list[TaskSample]:
    """The first `num` samples of a split."""
    return [task.sample(index, split) for index in range(num)]


def evaluate(engine: Engine, task: Task, samples: Sequence[TaskSample], params: SamplingParams) -> Evaluation:
    """Decode all prompts in one go and check every answer. Prompt i uses a given seed + i, modulo 2**63."""
    settings = [
        params if params.seed is None else params.with_seed((params.seed + i) % NUM_SEEDS)
        for i in range(len(samples))
    ]
    start = time.perf_counter()
    completions = engine.generate([sample.prompt for sample in samples], settings)
    seconds = time.perf_counter() - start
    prompts = [sample.prompt for sample in samples for _ in range(params.n)]
    verdicts = [task.check(prompt, done.text) for prompt, done in zip(prompts, completions, strict=True)]
    return Evaluation(
        num_prompts=len(samples),
        exact_match=sum(verdict.correct for verdict in verdicts) / len(verdicts),
        final_answer_match=sum(verdict.final_answer_correct for verdict in verdicts) / len(verdicts),
        num_tokens=sum(len(done.token_ids) for done in completions),
        num_forwards=sum(done.num_forwards for done in completions),
        num_prompt_passes=len(completions),
        accepted_by_position=_sum_columns([done.accepted_by_position for done in completions]),
        tested_by_position=_sum_columns([done.tested_by_position for done in completions]),
        seconds=seconds,
        exactness=completions[0].exactness,
        completions=tuple(completions),
        verdicts=tuple(verdicts),
    )


def _sum_columns(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    width = max((len(row) for row in rows), default=0)
    return tuple(sum(row[j] for row in rows if j < len(row)) for j in range(width))
