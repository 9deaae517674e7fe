"""How faithful sparse attention is on a model that was trained for long contexts, not on random weights.

    idlm-train recipe=tiny_recall_base; idlm-train recipe=tiny_recall_block
    python -m benchmarks.sparse_fidelity [contexts=2048,4096,8192,12288] [records=64] [record=true]

Sets: with exact attention in every pass, how much of each pass's per-block oracle set an arm's set has
(`oracle_recall`; of MAGE along the passes, also in the AR base of the model), and of each row's own set
(`estimation_accuracy`). Answers: of the engine, with `steps` passes a block in every arm: share of the
queried keys with the right value (`needle_accuracy`), and of answers that are those of exact attention, token
by token (`agreement_with_exact`). Budgets k are parts of the context. `records` (keys in a context, of which
the level's `asked` are queried) and `contexts` set the difficulty: exact answers should be 70 to 98 % right.
Exact attention answers at all contexts first; then come the sets, at budgets of `sets_parts`; then the arms
answer, budget by budget, at the two longest contexts of that difficulty, or where there is none at the one
nearest to it. Rows are recorded as soon as they are measured.

The base passes over the same blocks, under the same mask, with the mask token that training began with. As in
SparseD's plug-in every block gets a fresh pattern, and this task's answers have one block: that is
SparseD at its best.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.arms import engine_of, greedy
from benchmarks.quality.sparse_sets import ARMS, Fidelity, Probe, denoise, fidelity, num_exact_passes
from benchmarks.shared import Report, defaults, numbers, parse_options, start
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.infer.build import resolve_device
from idlm.infer.evaluation.evaluate import Evaluation, evaluate, task_samples
from idlm.semantics import Semantics
from idlm.tasks import TASKS, Task, TaskSample
from idlm.tasks.recall_check import queried_pairs
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
ROOM = (0.7, 0.98)
"""Shares of exact answers that leave room for mistakes, and are not mistakes themselves."""


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


class Bench:
    """The options, and the block size and mask token of the model."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options, self.report = options, Report("sparse_fidelity", options)
        meaning = Semantics.load(Path(options["model"]))
        if meaning.block_size is None or meaning.mask_token_id is None:
            raise UserError(
                "IDLM-0107",
                f"{options['model']} is no block-diffusion model",
                fix="idlm-train recipe=tiny_recall_block",
            )
        self.size, self.mask = meaning.block_size, meaning.mask_token_id

    def number(self, name: str) -> int:
        return int(self.options[name])

    def samples(self, context: int, num: int) -> tuple[Task, list[TaskSample]]:
        knobs = {"min_context": context, "max_context": context}
        knobs |= dict.fromkeys(("min_records", "max_records"), self.number("records"))
        task: Task = TASKS.get("recall")(level=self.options["level"], **knobs)
        return task, task_samples(task, "test", num)

    def add(self, metric: str, case: dict[str, Any], value: float, baseline: float | None = None) -> None:
        exactness = "exact" if case.get("arm") == EXACT else "lossy"
        self.report.add(case, metric, value, "share", baseline=baseline, exactness=exactness)


def measure(arguments: list[str]) -> int:
    bench = Bench(parse_options(arguments, OPTIONS))
    contexts = numbers(bench.options["contexts"])
    exact = {context: answers_of(bench, context, EXACT, None) for context in contexts}
    for each in exact.values():
        add_answers(bench, each, each)
    add_sets(bench)
    for context in contexts_with_room({each.context: each.exact_match for each in exact.values()}):
        for part, arm in itertools.product(numbers(bench.options["parts"]), ARMS):
            add_answers(bench, answers_of(bench, context, arm, part), exact[context])
    return 0


def add_sets(bench: Bench) -> None:
    device, options, size = resolve_device(bench.options["device"]), bench.options, bench.size
    context, steps, exact_layers = map(bench.number, ("sets_context", "steps", "exact_layers"))
    tokenizer = load_tokenizer(Path(options["model"]))
    probes = {
        name: Probe(Path(options[option]), size, device)
        for name, option in (("trained", "model"), ("base", "base"))
    }
    found: dict[tuple[str, int], list[Fidelity]] = {}
    for sample in bench.samples(context, bench.number("sets_num"))[1]:
        ids = encode_prompt(tokenizer, sample.prompt)
        start = len(ids) // size * size
        for probe in probes.values():
            probe.read(ids[:start])
        block = [*ids[start:], *[bench.mask] * (start + size - len(ids))]
        read = denoise(probes["trained"], block, bench.mask, steps)
        for part, (model, probe) in itertools.product(numbers(options["sets_parts"]), probes.items()):
            one = fidelity(probe, read, k=context // part, exact_layers=exact_layers)
            found.setdefault((model, part), []).append(one)
    del probes, probe
    free_cached_memory()
    for (model, part), ones in found.items():
        facts = {"k": f"1/{part}", "context": context}
        _add_sets_of(bench, model, facts, ones)


def _add_sets_of(bench: Bench, model: str, facts: dict[str, Any], ones: Sequence[Fidelity]) -> None:
    recall, estimation = _mean([one.recall for one in ones]), _mean([one.estimation for one in ones])
    for (arm, step), value in sorted(recall.items()):
        if arm == "mage":
            bench.add("oracle_recall", {"model": model, **facts, "step": step + 1}, value)
    # All arms over the passes that none of them computes exactly.
    first = max(num_exact_passes(arm, bench.number("steps")) for arm in ARMS)
    for arm in (*ARMS, "oracle"):
        steps = [step for found, step in recall if found == arm and step >= first]
        if not steps:
            continue
        mean, mean_own = (sum(of[arm, step] for step in steps) / len(steps) for of in (recall, estimation))
        if arm != "oracle":
            case = {"model": model, **facts, "arm": arm, "step": "mean"}
            bench.add("oracle_recall", case, mean, PAPER_RECALL[model] if arm == "mage" else None)
        if model == "trained":
            bench.add("estimation_accuracy", {"arm": arm, **facts}, mean_own)


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


def answers_of(bench: Bench, context: int, arm: str, part: int | None) -> Answers:
    print(f"decoding: context {context}, {arm}, k 1/{part or 1}", flush=True)
    task, samples = bench.samples(context, bench.number("num"))
    budget = {} if part is None else {"k": context // part, "exact_layers": bench.number("exact_layers")}
    settings: dict[str, Any] = {
        "accelerators": {arm: budget} if budget else {},
        "max_length": context + bench.number("max_tokens") + 64,
        "max_num_batched_tokens": max(1024, min(8192, context)),
        "prefix_cache": False,
        "graphs": "off",
        "strategy": STRATEGY,
        "steps": bench.number("steps"),
    }
    with engine_of(bench.options, "block", **settings) as engine:
        evaluation = evaluate(engine, task, samples, greedy(bench.options, {}))
        del engine
    return Answers(
        arm=arm,
        part=part,
        context=context,
        needles=needles_found(samples, evaluation),
        exact_match=evaluation.exact_match,
        token_ids=[tuple(done.token_ids) for done in evaluation.completions],
    )


def needles_found(samples: Sequence[TaskSample], evaluation: Evaluation) -> float:
    """Share of the requested keys whose value in an answer is right, at their positions."""
    num_right = num = 0
    for sample, done in zip(samples, evaluation.completions, strict=True):
        words = done.text.removeprefix(":").removesuffix(".").split()
        for index, pair in enumerate(queried_pairs(sample.prompt)):
            num, num_right = num + 1, num_right + (tuple(words[2 * index : 2 * index + 2]) == pair)
    return num_right / num


def add_answers(bench: Bench, each: Answers, exact: Answers) -> None:
    """Rows of needles and whole answers of one arm, and how many of these are those of `exact` attention."""
    case = {"arm": each.arm, "k": "1" if each.part is None else f"1/{each.part}", "context": each.context}
    # SDAR-8B-Chat at 8K and k = 1024, an eighth of the context, retrieves all (MAGE, table 3).
    paper = 1.0 if each.context == 8192 and each.part in (None, 8) else None
    bench.add("needle_accuracy", case, each.needles, paper)
    bench.add("exact_match", case, each.exact_match, exact.exact_match)
    if each.arm != EXACT:
        same = [mine == theirs for mine, theirs in zip(each.token_ids, exact.token_ids, strict=True)]
        bench.add("agreement_with_exact", case, sum(same) / len(same))


if __name__ == "__main__":
    start(measure, __doc__)
