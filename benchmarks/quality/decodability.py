"""Which masks FOCUS may leave out on a trained model: thresholds and selections of fixed size.

    python -m benchmarks.decodability model=outputs/tiny_block32 [level=p4] [num=500] [parts=judged,selection]
        [record=true]

It needs a block-diffusion checkpoint (recipes tiny_block32, tiny_deep32). Decoding is greedy on held-out
questions, the same in every arm, in blocks of the model's size. `judged` compares full blocks and FOCUS by
threshold; `selection` keeps the K masks of highest, random and lowest delta (table 3 of FOCUS).
`rows_per_token` (table 5) counts rows behind layer 1, clean blocks that are stored included, prompts left
out. A difference is one of paired answers. Rows are recorded as soon as they are measured. `importance=block`
measures attention as equation 2 does, in all arms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.arms import (
    ArmResult,
    Measured,
    arm_rows,
    binomial_error,
    difference_error,
    engine_of,
    greedy,
)
from benchmarks.results import append_rows
from benchmarks.shared import defaults, parse_options, start
from idlm.devices import free_cached_memory
from idlm.errors import UserError
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
    """Keep K masks of the highest, lowest or random deltas in place of FOCUS's budget (section 5.1). With
    each go its predecessor and the masks to its left without keys and values.
    """
    original = FocusPass._select

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
        kept_BW = torch.where(evicts_B[:, None], context_BW, fed_BW)
        place_W = torch.arange(size, device=kept_BW.device)
        ends_B = torch.where(kept_BW | processed_BW, place_W + 1, 0).amax(dim=1)
        return Selected(kept_BW=kept_BW, ends_B=torch.where(evicts_B, ends_B, size), budget_B=budget_B)

    FocusPass._select = select  # type: ignore[method-assign]
    try:
        yield
    finally:
        FocusPass._select = original  # type: ignore[method-assign]


OPTIONS = defaults(
    "model=outputs/tiny_block32 task=ledger level=p4 num=500 "
    "parts=judged,selection k=2,4,8 "
    "thresholds=0.9,0.8,0.7 importance=masked "
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
        """Its case in result rows."""
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
    """The answers of `arm`, and its rows behind layer 1 for each emitted token."""

    arm: Arm
    rows_per_token: float


@dataclass(slots=True, kw_only=True)
class Bench:
    """Options, questions and what has been measured; an arm is decoded once."""

    options: dict[str, str]
    task: Task
    samples: Sequence[TaskSample]
    results: dict[str, Result] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def model(self) -> str:
        """Its name in cases."""
        return Path(self.options["model"]).name

    def result(self, arm: Arm) -> Result:
        """The answers of an arm, decoded now if they are not yet."""
        key = repr(arm)
        if key not in self.results:
            self.results[key] = self._decoded(arm)
        return self.results[key]

    def full(self, threshold: float = JUDGED) -> Result:
        """Full blocks at a threshold."""
        return self.result(Arm(name=FULL, threshold=threshold))

    def add(self, result: Result, base: Result, *, gate: bool | None = None) -> None:
        """Append the rows of an arm, compared with `base`, and print its line."""
        further: tuple[Measured, ...] = (
            ("standard_error_of_difference", difference_error(result, base), "share", None),
            ("rows_per_token", result.rows_per_token, "rows", base.rows_per_token),
        )
        line = line_of(result, base, gate)
        # Not a gate of the rows: tables leave out rows whose gate failed, and this answer is a finding.
        self.failed += [line] if gate is False else []
        case = result.arm.case() | {"questions": len(self.samples), "model": self.model}
        self.record(arm_rows("decodability", case, result, base, *further))
        print(line, flush=True)

    def record(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows, so that a run that is stopped loses none."""
        if self.options["record"] == "true":
            append_rows("decodability", rows, results=Path(self.options["results"]))

    def _decoded(self, arm: Arm) -> Result:
        chosen = contextlib.nullcontext() if arm.selection is None else selecting(arm.selection, arm.k or 1)
        torch.manual_seed(SEED)
        with chosen:
            engine = self.engine(arm, graphs=self.options["graphs"], prefix_cache=False)
            params = greedy(self.options, {"threshold": arm.threshold})
            evaluation = evaluate(engine, self.task, self.samples, params)
        num_rows = block_rows(engine, self.samples, evaluation)
        engine.close()
        del engine
        free_cached_memory()
        return Result(
            arm=arm,
            evaluation=evaluation,
            marks=tuple(verdict.correct for verdict in evaluation.verdicts),
            rows_per_token=num_rows / max(1, evaluation.num_tokens),
        )

    def engine(self, arm: Arm, **settings: Any) -> Engine:
        """An engine for an arm."""
        chosen = dict(arm.accelerators)
        if "focus" in chosen:
            chosen["focus"] = {"importance": self.options["importance"], **chosen["focus"]}
        return engine_of(self.options, "block", accelerators=chosen, **settings)


def measure(arguments: list[str]) -> int:
    """Run the parts that the arguments name and record rows; returns 1 if a judged comparison fails."""
    options = parse_options(arguments, OPTIONS)
    parts = options["parts"].split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise UserError("IDLM-0107", f"unknown parts {unknown}", fix=f"use parts of {', '.join(PARTS)}")
    task = TASKS.get(options["task"])(level=options["level"])
    bench = Bench(options=options, task=task, samples=task_samples(task, "test", int(options["num"])))
    print(f"{options['num']} held-out questions of {options['task']} {options['level']}; +- standard error")
    for part in parts:
        print(f"-- {part}", flush=True)
        PARTS[part](bench)
    print(*bench.failed, sep="\n")
    return int(bool(bench.failed))


def selection(bench: Bench) -> None:
    """Table 3. Judged: more than two standard errors between each selection and the next worse one."""
    for k in _numbers(bench.options["k"]):
        worse: Result | None = None
        for name in reversed(SELECTIONS):
            found = bench.result(Arm(name=name, accelerators={"focus": {}}, selection=name, k=int(k)))
            is_better = None if worse is None else is_above(found, worse)
            bench.add(found, worse or bench.full(), gate=is_better)
            worse = found


def judged(bench: Bench) -> None:
    """Tables 4 and 5 at the default alpha. Judged: threshold 0.9."""
    for threshold in _numbers(bench.options["thresholds"]):
        base = bench.full(threshold)
        bench.add(base, base)
        found = bench.result(Arm(name=FOCUS, threshold=threshold, accelerators={"focus": {}}))
        bench.add(found, base, gate=keeps_quality(found, base))


PARTS: dict[str, Callable[[Bench], None]] = {
    "judged": judged,
    "selection": selection,
}


def keeps_quality(found: Result, base: Result) -> bool | None:
    """Whether FOCUS as it is by default loses no more than two points; None for what is not judged."""
    arm = found.arm
    if arm.threshold != JUDGED or arm.case()["alpha"] != ALPHA:
        return None
    return found.share >= base.share - ALLOWED_LOSS


def is_above(found: Result, worse: Result) -> bool:
    """Whether it answers more than two standard errors more."""
    return found.share - worse.share > ERRORS_APART * difference_error(found, worse)


def line_of(result: Result, base: Result, gate: bool | None) -> str:
    """Plain text of an arm."""
    num, case = result.evaluation.num_prompts, result.arm.case()
    verdict = {None: "", True: "  passed", False: "  FAILED"}[gate]
    name = " ".join(f"{key}={value}" for key, value in case.items())
    return (
        f"{name:<62s} {100 * result.share:5.1f} +- {100 * binomial_error(result.share, num):3.1f}  against "
        f"{base.arm.name} {100 * (result.share - base.share):+5.1f} +- "
        f"{100 * difference_error(result, base):3.1f}  rows a token {result.rows_per_token:5.2f}  TPF "
        f"{result.evaluation.tokens_per_forward:4.2f}{verdict}"
    )


def block_rows(engine: Engine, samples: Sequence[TaskSample], evaluation: Evaluation) -> int:
    """Rows behind layer 1 of all blocks that were decided, and of those that were stored when they were clean
    (all but the last of each answer). Without an accelerator that drops rows, every pass computes a block.
    """
    size = engine.semantics.block_size
    assert engine.tokenizer is not None and size is not None
    prompts = [len(encode_prompt(engine.tokenizer, sample.prompt)) for sample in samples]
    if engine.row_counts.asked.kept:
        return engine.row_counts.asked.kept - sum(length // size * size for length in prompts)
    answers = [len(done.token_ids) for done in evaluation.completions]
    ends = zip(prompts, answers, strict=True)
    num_blocks = sum(-(-(prompt + answer) // size) - prompt // size for prompt, answer in ends)
    return size * (engine.row_counts.num_pairs + num_blocks - len(prompts))


def _numbers(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError as error:
        raise UserError("IDLM-0107", f"{text!r} is not a list of numbers", fix="for example 2,4,8") from error


if __name__ == "__main__":
    start(measure, __doc__)
