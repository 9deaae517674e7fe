"""Which masks FOCUS may leave out on a trained model: signal, selection, thresholds, caches, rows a token.

    python -m benchmarks.decodability model=outputs/tiny_block32 [level=p4] [num=500] [record=true]
        [parts=signal,judged,selection,left,cache,commit,mage,rule,alphas] [figures=FOLDER]
        [trace=benchmarks/traces/tiny.jsonl] [traced=24]

Decoding is greedy on held-out questions, the same in every arm, in blocks of the model's size. `signal`
records full blocks at threshold `JUDGED` pass by pass: which share of the masks at each percentile of
importance is decided (figures 4, 12, 13); with `trace=` it also records FOCUS and writes what
`benchmarks.eviction` replays, of the first `traced` questions. `judged` compares full blocks and FOCUS by
threshold, `alphas` FOCUS of other alphas (table 4). `selection` keeps the K masks of highest, random and
lowest delta (table 3), `left` the K leftmost ones: what eviction costs where the choice is good, whatever the
signal. `cache` compares the delayed caches dc and dc+ without eviction (table 6), `commit` FOCUS that stores
only unfrozen rows of clean blocks, `rule` the rules of the published code, `mage` MAGE alone and with FOCUS.
`rows_per_token` (table 5) counts rows behind layer 1, clean blocks that are stored included, prompts left
out. A difference is one of paired answers. Parts run in this order, the important ones first, and rows are
recorded as soon as they are measured. `importance=block` measures attention as equation 2 does, in all arms.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.unmasking.figures import draw_decodability
from benchmarks.engine.unmasking.record import EAGER, NO_EVICTION, Recorder, recording
from benchmarks.engine.unmasking.rows import RowRules, consistent
from benchmarks.engine.unmasking.trace import FOCUS, FULL, UnmaskTrace, write_trace
from benchmarks.options import parse_options
from benchmarks.quality.arms import (
    ArmResult,
    Measured,
    arm_rows,
    binomial_error,
    difference_error,
    engine_of,
    greedy,
)
from benchmarks.quality.decodability_selection import LEFT, SELECTIONS, selecting
from benchmarks.quality.decodability_signal import SIGNALS, bins_of, concentration
from benchmarks.results import RESULTS, append_rows, result_row
from idlm.cli import command
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.infer.accelerators.focus import FocusConfig
from idlm.infer.cli.evaluate import Evaluation, evaluate, task_samples
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from idlm.tasks import TASKS, Task, TaskSample
from idlm.text.tokenizer import encode_prompt

OPTIONS = {
    "model": "outputs/tiny_block32",
    "task": "ledger",
    "level": "p4",
    "num": "500",
    "parts": "signal,judged,selection,left,cache,commit,mage,rule,alphas",
    "k": "2,4,8",
    "thresholds": "0.9,0.8,0.7",
    "alphas": "1.2,1.8",
    "importance": "masked",
    "mage_k": "32",
    "trace": "",
    "traced": "24",
    "max_tokens": "288",
    "batch": "500",
    "device": "auto",
    "dtype": "auto",
    "graphs": "off",
    "figures": "",
    "record": "false",
    "results": str(RESULTS),
}
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
        evicts = focus is not None and self.selection is None and "alpha" not in focus
        alpha = ALPHA if evicts else (focus or {}).get("alpha")
        return {
            "arm": self.name,
            "k": self.k if self.k is not None else "-",
            "threshold": self.threshold,
            "alpha": "-" if alpha is None or alpha == NO_EVICTION["alpha"] else alpha,
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


def main() -> int:
    """Console entry point."""
    return command.run(measure)


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
    if options["figures"]:
        print(*draw_decodability(Path(options["results"]), Path(options["figures"])), sep="\n")
    print(*bench.failed, sep="\n")
    return int(bool(bench.failed))


def signal(bench: Bench) -> None:
    """Figures 4, 12 and 13, and the trace."""
    full = _recorded(bench, Arm(name=FULL, accelerators={"focus": NO_EVICTION}))
    passes = [record for block in full.blocks.values() for record in block]
    for name in SIGNALS:
        bins = bins_of(passes, name)
        for each, concentrated in zip(bins, concentration(bins), strict=True):
            case = {"percentile": each.percentile, "signal": name, "model": bench.model}
            print(
                f"{name:5s} {each.percentile:>7s}  {each.num_masks:6d} masks, decided "
                f"{100 * each.decoded_share:5.1f} %, of all decided {100 * concentrated:5.1f} %"
            )
            shares = (("decoded_share", each.decoded_share), ("share_of_decoded", concentrated))
            bench.record([result_row("decodability", case, *share, "share") for share in shares])
    if bench.options["trace"]:
        _write_trace(bench, full, _recorded(bench, Arm(name=FOCUS, accelerators={"focus": {}})))


def _recorded(bench: Bench, arm: Arm) -> Recorder:
    """All passes of an arm, eager."""
    engine = bench.engine(arm, **EAGER)
    with recording(engine) as recorder:
        evaluate(engine, bench.task, bench.samples, greedy(bench.options, {"threshold": arm.threshold}))
    engine.close()
    free_cached_memory()
    return recorder


def _write_trace(bench: Bench, full: Recorder, focus: Recorder) -> None:
    options, path = bench.options, Path(bench.options["trace"])
    size = Semantics.load(Path(options["model"])).block_size
    assert size is not None, f"{options['model']} has no blocks"
    num = int(options["traced"])
    blocks = {
        FULL: full.traced(size, num),
        FOCUS: consistent(focus.traced(size, num), size, RowRules(alpha=ALPHA)),
    }
    trace = UnmaskTrace(
        name=path.stem,
        block_size=size,
        threshold=JUDGED,
        alpha=ALPHA,
        source=f"{bench.model}, {num} test questions of {options['task']} {options['level']}, greedy",
        blocks=blocks,
    )
    write_trace(trace, path)
    counts = {arm: f"{len(trace.whole(arm))} whole blocks" for arm in (FULL, FOCUS)}
    print(f"wrote {path}: {counts}", flush=True)


def selection(bench: Bench) -> None:
    """Table 3. Judged: more than two standard errors between each selection and the next worse one."""
    for k in _numbers(bench.options["k"]):
        worse: Result | None = None
        for name in reversed(SELECTIONS):
            found = bench.result(Arm(name=name, accelerators={"focus": {}}, selection=name, k=int(k)))
            is_better = None if worse is None else is_above(found, worse)
            bench.add(found, worse or bench.full(), gate=is_better)
            worse = found


def left(bench: Bench) -> None:
    """The leftmost masks."""
    for k in _numbers(bench.options["k"]):
        arm = Arm(name=LEFT, accelerators={"focus": {}}, selection=LEFT, k=int(k))
        bench.add(bench.result(arm), bench.full())


def judged(bench: Bench) -> None:
    """Tables 4 and 5 at the default alpha. Judged: threshold 0.9."""
    for threshold in _numbers(bench.options["thresholds"]):
        base = bench.full(threshold)
        bench.add(base, base)
        found = bench.result(Arm(name=FOCUS, threshold=threshold, accelerators={"focus": {}}))
        bench.add(found, base, gate=keeps_quality(found, base))


def alphas(bench: Bench) -> None:
    """Table 4, other alphas."""
    for threshold in _numbers(bench.options["thresholds"]):
        for alpha in _numbers(bench.options["alphas"]):
            arm = Arm(name=FOCUS, threshold=threshold, accelerators={"focus": {"alpha": alpha}})
            bench.add(bench.result(arm), bench.full(threshold))


def cache(bench: Bench) -> None:
    """Table 6: tokens frozen once they are decided, or once their right neighbours are; no eviction."""
    for name, stability in (("dc", "plain"), ("dc+", "neighbour")):
        options = {"focus": NO_EVICTION | {"stability": stability}}
        bench.add(bench.result(Arm(name=name, accelerators=options)), bench.full())


def commit(bench: Bench) -> None:
    """FOCUS that stores only unfrozen rows of clean blocks."""
    options = {"focus": {"commit": "unfrozen"}}
    bench.add(bench.result(Arm(name=FOCUS, accelerators=options)), bench.full())


def rule(bench: Bench) -> None:
    """FOCUS by the rules of the published code."""
    arm = Arm(name="focus_published", accelerators={"focus": {"rule": "published"}})
    bench.add(bench.result(arm), bench.full())


def mage(bench: Bench) -> None:
    """MAGE alone, and with FOCUS."""
    k = int(bench.options["mage_k"])
    options: dict[str, dict[str, Any]] = {"mage": {"k": k}}
    for name, chosen in (("mage", options), ("focus+mage", {**options, "focus": {}})):
        bench.add(bench.result(Arm(name=name, accelerators=chosen, k=k)), bench.full())


PARTS: dict[str, Callable[[Bench], None]] = {
    "signal": signal,
    "judged": judged,
    "selection": selection,
    "left": left,
    "cache": cache,
    "commit": commit,
    "mage": mage,
    "rule": rule,
    "alphas": alphas,
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
    sys.exit(main())
