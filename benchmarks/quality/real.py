"""What a conversion of a real checkpoint changed, and what it gains.

    python -m benchmarks.real model=PATH base=PATH sets=chat:chat.jsonl,code:code.jsonl [arm=NAME]
        [parts=acceptance,clean,tasks,law,speed] [tasks=tasks.jsonl.gz] [num=0] [max_tokens=256]
        [temperatures=0,1] [strategy=] [stride=] [concurrency=1,8,32] [prompts=24] [draws=96] [record=true]

`model` is a checkpoint, or an adapter of `base`. `sets` are files of prompts as of idlm-bench, of which the
first `num` count (0: all), and the first set is that of all parts but `acceptance`:

- acceptance: how often drafts are accepted by position, and tokens per forward, also by eq. 3
  (arXiv 2604.11035, the baseline), of all answers and of those that end and do not loop.
- clean: KL(base, model) in nats and equal first choices of clean rows, on the base's answers at T=1.
- tasks: multiple choice by log-likelihoods. A line of the file is {"task": NAME, "docs": [[context,
  [choice, ..], index of the right one], ..]}; with a single choice, greedy decoding has to write it. The
  log-likelihoods of a gated adapter must be those of its base, digit for digit.
- law: total variation of the first `FIRST_TOKENS` tokens, by position, between `draws` answers of ISD and of
  AR, whose floor is that between AR and AR with other seeds. It passes within `MAX_ERRORS` standard errors.
- speed: tokens/s over those of AR, in turns, at each concurrency and temperature."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.quality.arms import engine_of
from benchmarks.shared import Report, chosen, defaults, numbers, parse_options, start
from idlm.acceptance import tokens_per_forward_cold
from idlm.conf.recipe.smollm2_data import loops
from idlm.contracts import Completion, SamplingParams
from idlm.files.paths import json_lines, unpacked
from idlm.infer.clients.loads import load_prompts
from idlm.infer.engine import Engine
from idlm.infer.evaluation.arms import sum_columns
from idlm.infer.evaluation.conversion import CleanRows, clean_rows, shifts, token_classes
from idlm.infer.evaluation.requests import EngineRequests

Options = dict[str, str]
Sets = dict[str, list[Any]]
Tokens = Sequence[tuple[int, ...]]
OPTIONS = defaults(
    "model= base= arm= parts=acceptance,clean,tasks,law,speed sets= tasks= num=0 max_tokens=256 "
    "temperatures=0,1 strategy= stride= concurrency=1,8,32 rounds=3 prompts=24 draws=96 batch=256 "
    "max_length=1024 deterministic=true device=auto dtype=auto record=false"
)
BASE = "base"
FIRST_TOKENS, MAX_ERRORS = 8, 3.0
PAGE = 16


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, OPTIONS)
    options["arm"] = options["arm"] or Path(options["model"]).name
    files = dict(each.split(":", 1) for each in options["sets"].split(",") if each)
    sets = {name: load_prompts(path)[: int(options["num"]) or None] for name, path in files.items()}
    report = Report("real", options)
    for part in chosen(options, "parts", PARTS):
        PARTS[part](report, options, sets)
    return report.status


def is_adapter(options: Options) -> bool:
    return (Path(options["model"]) / "adapter_config.json").is_file()


def opened(options: Options, decoder: str, **settings: Any) -> AbstractContextManager[Engine]:
    """An engine of the model, or with `decoder=base` one of the base, which AR decodes. Its pages hold a
    batch and no more, so that another has room on the device."""
    own: dict[str, Any] = {"base": options["base"]} if decoder != BASE and is_adapter(options) else {}
    model = options["base"] if decoder == BASE else options["model"]
    if decoder == "isd" and options["strategy"]:
        own["rejection_strategy"] = options["strategy"]
    if decoder == "isd" and options["stride"]:
        own["stride"] = int(options["stride"])
    length = int(options["max_length"])
    pages = (int(options["batch"]) + 1) * math.ceil(length / PAGE)
    name = "ar" if decoder == BASE else decoder
    sizes: dict[str, Any] = {"max_length": length, "num_pages": pages, "page_size": PAGE}
    return engine_of(options | {"model": model}, name, **sizes, **own, **settings)


def answers_of(
    engine: Engine, prompts: Sequence[Any], params: SamplingParams, first: int = 0
) -> list[Completion]:
    """Answer each prompt with a seed of its own, from `first` on."""
    return engine.generate(prompts, [params.with_seed(first + number) for number in range(len(prompts))])


def acceptance(report: Report, options: Options, sets: Sets) -> None:
    prompts = [prompt for each in sets.values() for prompt in each]
    with opened(options, "isd") as engine:
        for temperature in map(float, options["temperatures"].split(",")):
            params = SamplingParams(temperature=temperature, max_tokens=int(options["max_tokens"]))
            done = iter(answers_of(engine, prompts, params))
            for name, each in sets.items():
                answers = list(itertools.islice(done, len(each)))
                case = {"arm": options["arm"], "temperature": temperature, "set": name, "subset": "all"}
                add_drafts(report, case, answers)
                free = [one for one in answers if one.finish_reason == "stop" and not loops(one.token_ids)]
                add_drafts(report, case | {"subset": "loop-free"}, free)
        del engine


def add_drafts(report: Report, case: dict[str, Any], answers: Sequence[Completion]) -> None:
    if not answers:
        return
    tested = sum_columns(one.tested_by_position for one in answers)
    accepted = sum_columns(one.accepted_by_position for one in answers)
    rates = [a / max(1, t) for a, t in zip(accepted, tested, strict=True)]
    for position, rate in enumerate(rates, start=1):
        report.add(case | {"position": position}, "acceptance", rate, "share")
    sizes = [(len(one.token_ids), one.num_forwards) for one in answers]
    num_tokens, num_forwards = map(sum, zip(*sizes, strict=True))
    found = num_tokens / num_forwards
    squares = sum((tokens - found * forwards) ** 2 for tokens, forwards in sizes)
    expected = tokens_per_forward_cold(rates)
    report.add(case, "tokens_per_forward", found, "tokens", baseline=expected)
    report.add(case, "tokens_per_forward_error", math.sqrt(squares) / num_forwards, "tokens")
    report.add(case, "answers", len(answers), "")


def clean(report: Report, options: Options, sets: Sets) -> None:
    prompts = next(iter(sets.values()))
    with opened(options, BASE) as engine:
        params = SamplingParams(temperature=1.0, max_tokens=int(options["max_tokens"]))
        prompts_ids = [list(ids) for ids in engine.encode(prompts)]
        done = answers_of(engine, prompts_ids, params)
        texts = [
            ([*ids, *one.token_ids], range(len(ids), len(ids) + len(one.token_ids)))
            for ids, one in zip(prompts_ids, done, strict=True)
        ]
        base: CleanRows = clean_rows(engine.model, texts)
        del engine
    with opened(options, "isd") as engine:
        classes = token_classes(engine.tokenizer, texts)
        whole = shifts(base, clean_rows(engine.model, texts), classes)[0]
        del engine
    case = {"arm": options["arm"], "tokens": whole.num_tokens}
    report.add(case, "clean_kl", whole.kl, "nats", gate_passed=whole.kl == 0 if is_adapter(options) else None)
    report.add(case, "clean_agreement", whole.agreement, "share")
    report.add(case, "base_entropy", whole.entropy, "nats")


def tasks(report: Report, options: Options, sets: Sets) -> None:
    path, scores = Path(options["tasks"]), {}
    with path.open("rb") as file:
        files = {value["task"]: value["docs"] for _, value in json_lines(unpacked(file, path))}
    for decoder in (BASE, "isd"):
        with opened(options, decoder, deterministic=options["deterministic"] == "true") as engine:
            scores[decoder] = {
                task: score(engine, docs[: int(options["num"]) or None]) for task, docs in files.items()
            }
            del engine
    for task, found in scores["isd"].items():
        base = scores[BASE][task]
        for judge, (share, theirs) in {
            "sum": (found[0], base[0]),
            "per character": (found[1], base[1]),
        }.items():
            case = {"arm": options["arm"], "task": task, "judge": judge, "questions": len(found[2])}
            gate = found[2] == base[2] if is_adapter(options) else None
            report.add(case, "task_accuracy", share, "share", baseline=theirs, gate_passed=gate)


def score(
    engine: Engine, docs: Sequence[tuple[str, list[str], int]]
) -> tuple[float, float, list[list[float]]]:
    """The share of questions that the sums of log-likelihoods answer, that their sums over characters answer,
    and the sums of all choices."""
    requests = EngineRequests(engine, SamplingParams())
    pairs = [pair_ids(requests, context, choice) for context, choices, _ in docs for choice in choices]
    found = iter(requests.loglikelihood(pairs))
    by_sum, by_character, sums = 0, 0, []
    for _, choices, right in docs:
        scored = list(itertools.islice(found, len(choices)))
        values = [value for value, _ in scored]
        means = [value / len(choice) for value, choice in zip(values, choices, strict=True)]
        sums.append(values)
        is_written = len(choices) > 1 or scored[0][1]
        by_sum += is_written and values.index(max(values)) == right
        by_character += is_written and means.index(max(means)) == right
    return by_sum / len(docs), by_character / len(docs), sums


def pair_ids(requests: EngineRequests, context: str, choice: str) -> tuple[list[int], list[int]]:
    """Token ids of a context and of the choice after a space, as lm-eval divides them."""
    head = requests.encode(context, add_special_tokens=False)
    whole = requests.encode(f"{context} {choice}", add_special_tokens=False)
    return head, whole[len(head) :]


def law(report: Report, options: Options, sets: Sets) -> None:
    draws = int(options["draws"])
    texts = next(iter(sets.values()))[: int(options["prompts"])]
    params = SamplingParams(temperature=1.0, max_tokens=FIRST_TOKENS)
    drawn: list[list[Tokens]] = []
    for decoder, first_seeds in (("ar", (0, 1_000_000)), ("isd", (2_000_000,))):
        with opened(options, decoder) as engine:
            for first in first_seeds:
                done = answers_of(engine, [text for text in texts for _ in range(draws)], params, first)
                drawn.append(
                    [[one.token_ids for one in done[at : at + draws]] for at in range(0, len(done), draws)]
                )
            del engine
    ar, other, isd = drawn
    floors = list(map(total_variation, ar, other))
    found = [
        (total_variation(*mine) + total_variation(mine[0], third)) / 2
        for *mine, third in zip(isd, ar, other, strict=True)
    ]
    excess = [one - floor for one, floor in zip(found, floors, strict=True)]
    error = statistics.stdev(excess) / math.sqrt(len(excess))
    is_near = statistics.mean(excess) <= MAX_ERRORS * error
    case = {"arm": options["arm"], "prompts": len(texts), "draws": draws}
    mean = statistics.mean(found)
    report.add(case, "law_tv", mean, "", floor=statistics.mean(floors), gate_passed=is_near)
    report.add(case, "law_tv_error", error, "")


def total_variation(one: Tokens, two: Tokens) -> float:
    """Half the distance of two empirical laws of the token at a position, as the mean of all positions."""
    found = 0.0
    for position in range(FIRST_TOKENS):
        # Answers that have ended count as a token of their own.
        counts = [Counter(ids[position : position + 1] for ids in each) for each in (one, two)]
        keys = counts[0].keys() | counts[1].keys()
        found += sum(abs(counts[0][key] / len(one) - counts[1][key] / len(two)) for key in keys) / 2
    return found / FIRST_TOKENS


def speed(report: Report, options: Options, sets: Sets) -> None:
    texts = next(iter(sets.values()))
    for concurrency in numbers(options["concurrency"]):
        sized = options | {"batch": str(concurrency)}
        # Some answers are long, and the last ones leave lanes empty.
        wanted = list(itertools.islice(itertools.cycle(texts), max(8, 4 * concurrency)))
        with opened(sized, "ar") as ar, opened(sized, "isd") as isd:
            device = "CPU" if isd.model.device.type == "cpu" else "GPU"
            for temperature in map(float, options["temperatures"].split(",")):
                params = SamplingParams(temperature=temperature, max_tokens=int(options["max_tokens"]))
                for engine in (ar, isd):
                    answers_of(engine, wanted[:concurrency], params)
                rounds = [
                    [tokens_per_second(each, wanted, params) for each in (ar, isd)]
                    for _ in range(int(options["rounds"]))
                ]
                case = {"arm": options["arm"], "device": device, "concurrency": concurrency}
                case |= {"temperature": temperature, "strategy": options["strategy"] or "default"}
                case |= {"stride": int(options["stride"])} if options["stride"] else {}
                theirs, ours = (statistics.median(column) for column in zip(*rounds, strict=True))
                ratio = statistics.median(mine / other for other, mine in rounds)
                report.add(case, "speed_over_ar", ratio, "x")
                report.add(case, "tokens_per_second", ours, "tokens/s", baseline=theirs)
            del ar, isd, engine


def tokens_per_second(engine: Engine, prompts: Sequence[Any], params: SamplingParams) -> float:
    begin = time.perf_counter()
    done = answers_of(engine, prompts, params)
    return sum(len(one.token_ids) for one in done) / (time.perf_counter() - begin)


PARTS: Mapping[str, Callable[[Report, Options, Sets], None]] = {
    each.__name__: each for each in (acceptance, clean, tasks, law, speed)
}


if __name__ == "__main__":
    start(measure, __doc__)
