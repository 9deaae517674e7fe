"""How faithful sparse attention is on a model that was trained for long contexts, not on random weights.

    idlm-train recipe=tiny_recall_base; idlm-train recipe=tiny_recall_block
    python -m benchmarks.sparse_fidelity [contexts=2048,4096,8192,12288] [records=64] [record=true]

Sets: with exact attention in every pass, how much of each pass's per-block oracle set an arm's set has
(`oracle_recall`; of MAGE along the passes, also in the AR base of the model), and of each row's own set
(`estimation_accuracy`). Answers: of the engine, with `steps` passes a block in every arm: share of the asked
keys with the right value (`needle_accuracy`), and of answers that are those of exact attention, token by
token (`agreement_with_exact`). Budgets k are parts of the context. `records` (keys in a context, of which the
level's `asked` are asked) and `contexts` set the difficulty: exact answers should be 70 to 98 % right, so
that there is room for mistakes. Exact attention answers at all contexts first; then come the sets, at budgets
of `sets_parts`; then the arms answer, budget by budget, at the contexts that leave room (the two longest), or
where none does at the one that is nearest to it. Rows are recorded as soon as they are measured.

The base passes over the same blocks, under the same mask, with the mask token that training began with. As in
SparseD's plug-in every block gets a fresh pattern, and this task's answers have one block: that is
SparseD at its best.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.arms import engine_of, greedy
from benchmarks.quality.sparse_sets import ARMS, Fidelity, Probe, denoise, fidelity, num_exact_passes
from benchmarks.results import append_rows, result_row
from benchmarks.shared import defaults, parse_options, start
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.infer.build import resolve_device
from idlm.infer.evaluation.evaluate import Evaluation, evaluate, task_samples
from idlm.semantics import Semantics
from idlm.tasks import TASKS, Task, TaskSample
from idlm.tasks.recall_check import asked_pairs
from idlm.text.tokenizer import encode_prompt, load_tokenizer

OPTIONS = defaults(
    "model=outputs/tiny_recall_block base=outputs/tiny_recall_base level=long "
    "contexts=2048,4096,8192,12288 records=64 parts=4,8 steps=16 exact_layers=2 num=100 "
    "sets_parts=8 sets_num=12 sets_context=8192 max_tokens=64 batch=50 device=auto dtype=auto "
    "record=false"
)
EXACT = "exact"
STRATEGY = "low_confidence_static"
PAPER_RECALL = {"trained": 0.852, "base": 0.808}
"""SDAR-8B-Chat and Qwen3-8B on LongBench at k = 512 (MAGE, table 2)."""
PAPER_NEEDLES = {EXACT: 1.0, "mage": 1.0, "quest": 1.0, "sparsed": 1.0}
"""SDAR-8B-Chat at 8K and k = 1024, an eighth of the context (MAGE, table 3)."""
ROOM = (0.7, 0.98)
"""Shares of exact answers that leave room for mistakes, and are not mistakes themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers among the options."""

    contexts: list[int]
    parts: list[int]
    sets_parts: list[int]
    records: int
    steps: int
    exact_layers: int
    num: int
    sets_num: int
    sets_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Of one arm, at one budget (`part` None: all) and context: shares of needles and of whole answers that
    are right, and the token ids.
    """

    arm: str
    part: int | None
    context: int
    needles: float
    exact_match: float
    token_ids: list[tuple[int, ...]]


def measure(arguments: list[str]) -> int:
    """Measure sets and answers, print tables and record rows."""
    options = parse_options(arguments, OPTIONS)
    plan = _plan(options)
    _check_blocks(options)

    def record(found: list[dict[str, Any]]) -> None:
        print(table(found), flush=True)
        if options["record"] == "true":
            append_rows("sparse_fidelity", found, results=Path(options["results"]))

    exact = {context: _answers_of(options, plan, context, EXACT, None) for context in plan.contexts}
    for each in exact.values():
        record(rows_of_answers(each, each))
    record(set_rows(options, plan))
    for context in contexts_with_room({each.context: each.exact_match for each in exact.values()}):
        for part, arm in itertools.product(plan.parts, ARMS):
            record(rows_of_answers(_answers_of(options, plan, context, arm, part), exact[context]))
    return 0


def _check_blocks(options: dict[str, str]) -> tuple[int, int]:
    """Block size and mask token of the model."""
    meaning = Semantics.load(Path(options["model"]))
    if meaning.block_size is None or meaning.mask_token_id is None:
        raise UserError(
            "IDLM-0107",
            f"{options['model']} is no block-diffusion model",
            fix="idlm-train recipe=tiny_recall_block",
        )
    return meaning.block_size, meaning.mask_token_id


def _plan(options: dict[str, str]) -> Plan:
    lists = ("contexts", "parts", "sets_parts")
    numbers = ("records", "steps", "exact_layers", "num", "sets_num", "sets_context")
    try:
        chosen: dict[str, Any] = {name: [int(one) for one in options[name].split(",")] for name in lists}
        return Plan(**chosen | {name: int(options[name]) for name in numbers})
    except ValueError as error:
        raise UserError(
            "IDLM-0107",
            f"{', '.join((*lists, *numbers))} are whole numbers: {error}",
            fix="contexts=2048,8192 parts=4,8 records=48",
        ) from error


def _task(options: dict[str, str], plan: Plan, context: int) -> Task:
    knobs = {"min_context": context, "max_context": context, "max_records": plan.records}
    task: Task = TASKS.get("recall")(level=options["level"], **knobs, min_records=plan.records)
    return task


def set_rows(options: dict[str, str], plan: Plan) -> list[dict[str, Any]]:
    """Rows of both models' sets."""
    device, (size, mask) = resolve_device(options["device"]), _check_blocks(options)
    tokenizer = load_tokenizer(Path(options["model"]))
    samples = task_samples(_task(options, plan, plan.sets_context), "test", plan.sets_num)
    probes = {
        "trained": Probe(Path(options["model"]), size, device),
        "base": Probe(Path(options["base"]), size, device),
    }
    found: dict[tuple[str, int], list[Fidelity]] = {}
    for sample in samples:
        ids = encode_prompt(tokenizer, sample.prompt)
        start = len(ids) // size * size
        for probe in probes.values():
            probe.read(ids[:start])
        block = [*ids[start:], *[mask] * (start + size - len(ids))]
        read = denoise(probes["trained"], block, mask, plan.steps)
        for part in plan.sets_parts:
            for model, probe in probes.items():
                one = fidelity(probe, read, k=plan.sets_context // part, exact_layers=plan.exact_layers)
                found.setdefault((model, part), []).append(one)
    del probes
    free_cached_memory()
    return [row for (model, part), ones in found.items() for row in _rows_of_sets(model, part, ones, plan)]


def _rows_of_sets(model: str, part: int, ones: Sequence[Fidelity], plan: Plan) -> Iterator[dict[str, Any]]:
    recall, estimation = _mean([one.recall for one in ones]), _mean([one.estimation for one in ones])
    facts = {"k": f"1/{part}", "context": plan.sets_context}
    for (arm, step), value in sorted(recall.items()):
        if arm == "mage":
            yield _row("oracle_recall", {"model": model, **facts, "step": step + 1}, value)
    # All arms over the passes that none of them computes exactly.
    first = max(num_exact_passes(arm, plan.steps) for arm in ARMS)
    for arm in (*ARMS, "oracle"):
        steps = [step for found, step in recall if found == arm and step >= first]
        if not steps:
            continue
        mean, mean_own = (sum(of[arm, step] for step in steps) / len(steps) for of in (recall, estimation))
        case = {"model": model, **facts, "arm": arm, "step": "mean"}
        if arm != "oracle":
            yield _row("oracle_recall", case, mean, PAPER_RECALL[model] if arm == "mage" else None)
        if model == "trained":
            case = {"arm": arm, **facts}
            yield _row("estimation_accuracy", case, mean_own)


def _mean(values: Sequence[dict[tuple[str, int], float]]) -> dict[tuple[str, int], float]:
    """Means over blocks; a block that was clean early has fewer passes."""
    keys = dict.fromkeys(key for each in values for key in each)
    listed = {key: [each[key] for each in values if key in each] for key in keys}
    return {key: sum(each) / len(each) for key, each in listed.items()}


def contexts_with_room(shares: dict[int, float]) -> list[int]:
    """The two longest contexts at which exact answers leave room; else the nearest one to that."""
    low, high = ROOM
    fit = sorted((context for context, share in shares.items() if low <= share <= high), reverse=True)
    middle = (low + high) / 2
    return fit[:2] or [min(shares, key=lambda context: (abs(shares[context] - middle), -context))]


def _answers_of(options: dict[str, str], plan: Plan, context: int, arm: str, part: int | None) -> Answers:
    print(f"decoding: context {context}, {arm}, k 1/{part or 1}", file=sys.stderr, flush=True)
    task = _task(options, plan, context)
    samples = task_samples(task, "test", plan.num)
    chosen = {} if part is None else {arm: {"k": context // part, "exact_layers": plan.exact_layers}}
    settings: dict[str, Any] = {
        "max_length": context + int(options["max_tokens"]) + 64,
        "max_num_batched_tokens": max(1024, min(8192, context)),
        "prefix_cache": False,
        "graphs": "off",
        "strategy": STRATEGY,
        "steps": plan.steps,
    }
    engine = engine_of(options, "block", accelerators=chosen, **settings)
    evaluation = evaluate(engine, task, samples, greedy(options, {}))
    engine.close()
    del engine
    free_cached_memory()
    return Answers(
        arm=arm,
        part=part,
        context=context,
        needles=needles_found(samples, evaluation),
        exact_match=evaluation.exact_match,
        token_ids=[tuple(done.token_ids) for done in evaluation.completions],
    )


def needles_found(samples: Sequence[TaskSample], evaluation: Evaluation) -> float:
    """Share of the asked keys that an answer gives the right value, in their places."""
    num_right = num = 0
    for sample, done in zip(samples, evaluation.completions, strict=True):
        words = done.text.removeprefix(":").removesuffix(".").split()
        for place, pair in enumerate(asked_pairs(sample.prompt)):
            num, num_right = num + 1, num_right + (tuple(words[2 * place : 2 * place + 2]) == pair)
    return num_right / num


def rows_of_answers(each: Answers, exact: Answers) -> list[dict[str, Any]]:
    """Rows of needles and whole answers of one arm, and how many of these are those of `exact` attention."""
    case = {"arm": each.arm, "k": "1" if each.part is None else f"1/{each.part}", "context": each.context}
    is_paper = each.context == 8192 and each.part in (None, 8)
    paper = PAPER_NEEDLES[each.arm] if is_paper else None
    rows = [
        _row("needle_accuracy", case, each.needles, paper),
        _row("exact_match", case, each.exact_match, exact.exact_match),
    ]
    if each.arm != EXACT:
        same = [mine == theirs for mine, theirs in zip(each.token_ids, exact.token_ids, strict=True)]
        rows.append(_row("agreement_with_exact", case, sum(same) / len(same)))
    return rows


def _row(metric: str, case: dict[str, Any], value: float, baseline: float | None = None) -> dict[str, Any]:
    exactness = "exact" if case.get("arm") == EXACT else "lossy"
    return result_row("sparse_fidelity", case, metric, value, "share", baseline=baseline, exactness=exactness)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Plain text, one line per row, and whether the task leaves room."""
    lines = []
    for row in rows:
        case = " ".join(f"{key}={value}" for key, value in row["case"].items())
        paper = "" if row["baseline"] is None else f"   baseline {100 * row['baseline']:.1f}"
        lines.append(f"{row['metric']:<20} {case:<58} {100 * row['value']:>6.1f} %{paper}")
    for row in rows:
        if row["metric"] == "exact_match" and row["case"]["arm"] == EXACT:
            low, high = ROOM
            fit = "leaves room" if low <= row["value"] <= high else "is outside 70 to 98 %"
            lines.append(f"context {row['case']['context']}: exact answers {100 * row['value']:.0f} %, {fit}")
    return "\n".join(lines)


if __name__ == "__main__":
    start(measure, __doc__)
