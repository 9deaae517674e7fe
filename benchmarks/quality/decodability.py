"""Which masks FOCUS may leave out on a trained model: thresholds and selections of fixed size.

    python -m benchmarks.decodability model=outputs/tiny_block32 [level=p4] [num=500] [parts=judged,selection]
        [record=true]

It needs a block-diffusion checkpoint (recipes tiny_block32, tiny_deep32). Decoding is greedy on held-out
questions, the same in every arm, in blocks of the model's size. `judged` compares full blocks and FOCUS by
threshold; `selection` retains the K masks of highest, random and lowest delta (table 3 of FOCUS).
`rows_per_token` (table 5) counts rows after layer 1, clean blocks that are stored included, prompts left
out. A difference is one of paired answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.quality.arms import (
    ArmResult,
    Measured,
    add_arm,
    difference_error,
    engine_of,
    greedy,
    result_of,
)
from benchmarks.shared import Report, chosen, defaults, parse_options, start
from idlm.infer.accelerators.focus import FocusConfig, FocusPass
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import Evaluation, evaluate, task_samples
from idlm.kernels.block_eviction import Selected
from idlm.kernels.block_eviction.plain import best, with_context
from idlm.tasks import TASKS, Task, TaskSample
from idlm.text.tokenizer import encode_prompt

TOP, RANDOM, BOTTOM = "top", "random", "bottom"
SELECTIONS = (TOP, RANDOM, BOTTOM)


@contextlib.contextmanager
def selecting(name: str, k: int) -> Iterator[None]:
    """Retain K masks of the highest, lowest or random deltas in place of FOCUS's budget (section 5.1). With
    each go its predecessor and the masks to its left without keys and values.
    """

    def select(self: FocusPass, first_BPW: torch.Tensor, second_BPW: torch.Tensor) -> Selected:
        view, size = self.view, first_BPW.shape[2]
        deltas_BW = second_BPW.sum(dim=1) - first_BPW.sum(dim=1)
        if name != TOP:
            deltas_BW = -deltas_BW if name == BOTTOM else torch.rand_like(deltas_BW)
        is_mask_BW, fed_BW = view.is_mask_BW, view.rows_BW >= 0
        processed_BW = self._memory.processed_ZW[view.plan.lanes_B]
        budget_B = torch.full_like(view.plan.lanes_B, k)
        chosen_BW = best(deltas_BW, view.active.is_maskable_BW & is_mask_BW, budget_B)
        evicts_B = self._started.mine_B & (is_mask_BW.sum(dim=1) > k)
        context_BW = with_context(chosen_BW, is_mask_BW, fed_BW, processed_BW)
        left_BW = torch.where(evicts_B[:, None], context_BW, fed_BW)
        index_W = torch.arange(size, device=left_BW.device)
        ends_B = torch.where(left_BW | processed_BW, index_W + 1, 0).amax(dim=1)
        return Selected(retained_BW=left_BW, ends_B=torch.where(evicts_B, ends_B, size), budget_B=budget_B)

    with patch.object(FocusPass, "_select", select):
        yield


OPTIONS = defaults(
    "model=outputs/tiny_block32 task=ledger level=p4 num=500 "
    "parts=judged,selection k=2,4,8 "
    "thresholds=0.9,0.8,0.7 "
    "max_tokens=288 batch=500 device=auto dtype=auto graphs=off record=false"
)
FULL, FOCUS = "full", "focus"
JUDGED, ALLOWED_LOSS, ERRORS_APART = 0.9, 0.02, 2.0
ALPHA = FocusConfig().alpha
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to decode: accelerator options by name, the threshold, and K masks by which delta."""

    name: str
    threshold: float = JUDGED
    accelerators: dict[str, dict[str, Any]] = field(default_factory=dict)
    selection: str | None = None
    k: int | None = None

    def case(self) -> dict[str, Any]:
        focus = self.accelerators.get("focus")
        evicts = focus is not None and self.selection is None
        return {
            "arm": self.name,
            "k": self.k if self.k is not None else "-",
            "threshold": self.threshold,
            "alpha": ALPHA if evicts else "-",
            "commit": "-" if focus is None else focus.get("commit", "clean"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(ArmResult):
    """The answers of `arm`, and its rows after layer 1 for each emitted token."""

    rows_per_token: float


@dataclass(slots=True, kw_only=True)
class Bench:
    """Options, questions and what has been measured; an arm is decoded once."""

    options: dict[str, str]
    report: Report
    task: Task
    samples: Sequence[TaskSample]
    results: dict[str, Result] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def result(self, arm: Arm) -> Result:
        key = repr(arm)
        if key not in self.results:
            self.results[key] = self._decoded(arm)
        return self.results[key]

    def full(self, threshold: float = JUDGED) -> Result:
        return self.result(Arm(name=FULL, threshold=threshold))

    def add(self, result: Result, base: Result, *, gate: bool | None = None) -> None:
        further: tuple[Measured, ...] = (
            ("standard_error_of_difference", difference_error(result, base), "share", None),
            ("rows_per_token", result.rows_per_token, "rows", base.rows_per_token),
        )
        case = result.arm.case() | {"questions": len(self.samples)}
        case["model"] = Path(self.options["model"]).name
        # Not a gate of the rows: tables leave out rows whose gate failed, and this answer is a finding.
        self.failed += [f"FAILED {case}"] if gate is False else []
        add_arm(self.report, case, result, base, *further)

    def _decoded(self, arm: Arm) -> Result:
        settings: dict[str, Any] = {"graphs": self.options["graphs"], "prefix_cache": False}
        choosing = contextlib.nullcontext() if arm.selection is None else selecting(arm.selection, arm.k or 1)
        torch.manual_seed(SEED)
        with choosing, engine_of(self.options, "block", accelerators=arm.accelerators, **settings) as engine:
            params = greedy(self.options, {"threshold": arm.threshold})
            evaluation = evaluate(engine, self.task, self.samples, params)
            num_rows = block_rows(engine, self.samples, evaluation)
            del engine
        rows_per_token = num_rows / max(1, evaluation.num_tokens)
        marks = result_of(arm, evaluation).marks
        return Result(arm=arm, evaluation=evaluation, marks=marks, rows_per_token=rows_per_token)


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, OPTIONS)
    parts, task = chosen(options, "parts", PARTS), TASKS.get(options["task"])(level=options["level"])
    samples = task_samples(task, "test", int(options["num"]))
    bench = Bench(options=options, report=Report("decodability", options), task=task, samples=samples)
    for part in parts:
        PARTS[part](bench)
    print(*bench.failed, sep="\n")
    return int(bool(bench.failed))


def selection(bench: Bench) -> None:
    """Table 3. Judged: more than two standard errors between each selection and the next worse one."""
    for k in map(int, bench.options["k"].split(",")):
        worse: Result | None = None
        for name in reversed(SELECTIONS):
            found = bench.result(Arm(name=name, accelerators={"focus": {}}, selection=name, k=k))
            is_better = None if worse is None else is_above(found, worse)
            bench.add(found, worse or bench.full(), gate=is_better)
            worse = found


def judged(bench: Bench) -> None:
    for threshold in map(float, bench.options["thresholds"].split(",")):
        base = bench.full(threshold)
        bench.add(base, base)
        found = bench.result(Arm(name=FOCUS, threshold=threshold, accelerators={"focus": {}}))
        bench.add(found, base, gate=preserves_quality(found, base))


PARTS: dict[str, Callable[[Bench], None]] = {"judged": judged, "selection": selection}


def preserves_quality(found: Result, base: Result) -> bool | None:
    """Whether FOCUS as it is by default loses no more than two points; None for what is not judged."""
    arm = found.arm
    if arm.threshold != JUDGED or arm.case()["alpha"] != ALPHA:
        return None
    return found.share >= base.share - ALLOWED_LOSS


def is_above(found: Result, worse: Result) -> bool:
    """Whether it answers more than two standard errors more."""
    return found.share - worse.share > ERRORS_APART * difference_error(found, worse)


def block_rows(engine: Engine, samples: Sequence[TaskSample], evaluation: Evaluation) -> int:
    """Rows after layer 1 of all blocks that were decided, and of those that were stored when they were clean
    (all but the last of each answer). Without an accelerator that drops rows, every pass computes a block.
    """
    size = engine.semantics.block_size
    assert engine.tokenizer is not None and size is not None
    prompts = [len(encode_prompt(engine.tokenizer, sample.prompt)) for sample in samples]
    if engine.row_counts.requested.retained:
        return engine.row_counts.requested.retained - sum(length // size * size for length in prompts)
    answers = [len(done.token_ids) for done in evaluation.completions]
    ends = zip(prompts, answers, strict=True)
    num_blocks = sum(-(-(prompt + answer) // size) - prompt // size for prompt, answer in ends)
    return size * (engine.row_counts.num_pairs + num_blocks - len(prompts))


if __name__ == "__main__":
    start(measure, __doc__)
