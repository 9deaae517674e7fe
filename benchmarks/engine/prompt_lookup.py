"""What drafts looked up in the prompt and the answer gain in tokens per forward pass.

    python -m benchmarks.prompt_lookup model=PATH [base=PATH] [prompts=FILE] [num=16] [minimums=0,3,4,6,8]
        [temperatures=0,1] [strategy=tree] [stride=] [max_tokens=128] [device=auto] [record=true]

`prompts` are as of idlm-bench. Each is answered as it is (`set` "chat"), and so is a request to copy its
greedy answer ("copy"). For every number of tokens that a match needs: tokens per forward pass, with those
without lookups as baseline, and the share of accepted first drafts. Greedy answers in float32 must be those
of AR decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.quality.arms import engine_of
from benchmarks.shared import Report, defaults, numbers, parse_options, start
from idlm.contracts import Completion, SamplingParams
from idlm.infer.clients.loads import load_prompts
from idlm.infer.evaluation.arms import sum_columns

DEFAULTS = defaults(
    "model= base= prompts=text num=16 minimums=0,3,4,6,8 temperatures=0,1 strategy=tree stride= "
    "max_tokens=128 max_length=1024 device=auto dtype=float32 record=false"
)
COPY = "Copy the following text exactly, word for word:\n\n"
Sets = dict[str, list[Any]]
Answers = dict[str, list[Completion]]


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS)
    report, minimums = Report("prompt_lookup", options), numbers(options["minimums"])
    prompts = load_prompts(options["prompts"])[: int(options["num"])]
    greedy = SamplingParams(temperature=0, max_tokens=int(options["max_tokens"]), seed=1)
    sets: Sets = {"chat": prompts}
    sets["copy"] = [COPY + one.text for one in answers_of(options, sets, greedy, "ar")["chat"]]
    expected = answers_of(options, sets, greedy, "ar")
    for temperature in map(float, options["temperatures"].split(",")):
        params = replace(greedy, temperature=temperature)
        plain: dict[str, float] = {}
        for minimum in minimums:
            found = answers_of(options, sets, params, "isd", prompt_lookup_min=minimum)
            for name, answers in found.items():
                case = {"model": Path(options["model"]).name, "set": name, "temperature": temperature}
                case |= {"minimum": minimum, "strategy": options["strategy"], "prompts": len(prompts)}
                gate = None if temperature else token_ids(answers) == token_ids(expected[name])
                # Prompts are not decoded: each takes one pass, as all have room.
                num_passes = sum(one.num_forwards - 1 for one in answers)
                mean = sum(len(one.token_ids) for one in answers) / num_passes
                baseline = plain.setdefault(name, mean)
                report.add(case, "tokens_per_forward", mean, "tokens", baseline=baseline, gate_passed=gate)
                tested = sum_columns(one.tested_by_position for one in answers)
                accepted = sum_columns(one.accepted_by_position for one in answers)
                report.add(case, "first_draft_acceptance", accepted[0] / max(1, tested[0]), "share")
    return report.status


def answers_of(
    options: dict[str, str], sets: Sets, params: SamplingParams, decoder: str, **own: Any
) -> Answers:
    if decoder == "isd":
        own["rejection_strategy"] = options["strategy"]
        own |= {"stride": int(options["stride"])} if options["stride"] else {}
    if options["base"]:
        own["base"] = options["base"]
    prompts = [prompt for each in sets.values() for prompt in each]
    with engine_of(
        options | {"batch": str(len(prompts))}, decoder, max_length=int(options["max_length"]), **own
    ) as engine:
        done = iter(engine.generate(prompts, params))
        del engine
    return {name: [next(done) for _ in each] for name, each in sets.items()}


def token_ids(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in answers]


if __name__ == "__main__":
    start(measure, __doc__)
