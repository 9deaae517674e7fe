"""Exact-match, acceptance and tokens per forward of an engine on a verifiable task: the numbers of every
table.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from idlm.contracts import Completion, SamplingParams
from idlm.infer.cli.progress import AnswerProgress
from idlm.infer.engine import Engine
from idlm.tasks import Task, TaskSample, Verdict

NUM_SEEDS = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One engine on one set of prompts. An answer that failed (memory, logits) is wrong, whatever its text.

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
    def num_failed(self) -> int:
        """Answers that ended with an error."""
        return sum(done.error is not None for done in self.completions)

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens over passes."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0

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


def evaluate(
    engine: Engine,
    task: Task,
    samples: Sequence[TaskSample],
    params: SamplingParams,
    *,
    progress: AnswerProgress | None = None,
) -> Evaluation:
    """Decode all prompts in one go and check every answer. Prompt i uses a given seed + i, modulo 2**63.

    Warns of answers that failed. UserError for what the engine cannot answer at all, before anything is
    decoded.
    """
    settings = [
        params if params.seed is None else params.with_seed((params.seed + i) % NUM_SEEDS)
        for i in range(len(samples))
    ]
    start = time.perf_counter()
    completions = _answers(engine, samples, settings, progress)
    seconds = time.perf_counter() - start
    prompts = [sample.prompt for sample in samples for _ in range(params.n)]
    verdicts = [_verdict(task, prompt, done) for prompt, done in zip(prompts, completions, strict=True)]
    errors = [done.error for done in completions if done.error is not None]
    if errors:
        failed = f"{len(errors)} of {len(completions)} answers failed and count as wrong"
        warnings.warn(f"decoder {engine.decoder.name}: {failed}; the first: {errors[0]}", stacklevel=2)
    return Evaluation(
        num_prompts=len(samples),
        exact_match=sum(verdict.correct for verdict in verdicts) / len(verdicts),
        final_answer_match=sum(verdict.final_answer_correct for verdict in verdicts) / len(verdicts),
        num_tokens=sum(len(done.token_ids) for done in completions),
        num_forwards=sum(done.num_forwards for done in completions),
        num_prompt_passes=sum(bool(done.token_ids) for done in completions),
        accepted_by_position=_sum_columns([done.accepted_by_position for done in completions]),
        tested_by_position=_sum_columns([done.tested_by_position for done in completions]),
        seconds=seconds,
        exactness=completions[0].exactness,
        completions=tuple(completions),
        verdicts=tuple(verdicts),
    )


def _answers(
    engine: Engine,
    samples: Sequence[TaskSample],
    settings: Sequence[SamplingParams],
    progress: AnswerProgress | None,
) -> list[Completion]:
    """In order, and with what there is of those that failed."""
    keys = [(f"e{i}", k) for i, params in enumerate(settings) for k in range(params.n)]
    done: dict[tuple[str, int], Completion] = {}
    try:
        for i, (sample, params) in enumerate(zip(samples, settings, strict=True)):
            engine.add_request(f"e{i}", sample.prompt, params)
        while len(done) < len(keys):
            events = engine.step()
            for event in events:
                if event.completion is not None:
                    done[event.request_id, event.index] = event.completion
            if progress is not None:
                progress.see(events)
    except BaseException:
        for request_id, _ in keys:
            engine.abort(request_id)
        raise
    return [done[key] for key in keys]


def _verdict(task: Task, prompt: str, done: Completion) -> Verdict:
    verdict = task.check(prompt, done.text)
    if done.error is None:
        return verdict
    return replace(verdict, correct=False, final_answer_correct=False, reason=done.error)


def _sum_columns(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    width = max((len(row) for row in rows), default=0)
    return tuple(sum(row[j] for row in rows if j < len(row)) for j in range(width))
