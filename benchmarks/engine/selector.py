"""What a selector of drafts gains in tokens per forward pass, and its share of a step.

    python -m benchmarks.selector model=PATH [task=ledger] [level=p4] [prompts=FILE] [num=64]
        [temperature=1.0] [strategies=cold,branch] [stride=] [max_tokens=256] [device=auto] [record=true]
    python -m benchmarks.selector shape=qwen3-8b [loads=1x1024,64x1024] [strategies=alternate] [stride=8]
        [trace=p0.78] [rounds=3] [tokens=192] [record=true]

`tokens_per_forward_gain`: a checkpoint with a selector, whose engine draws the drafts with it and without, on
the same prompts (of a task, or as of idlm-bench). `step_share`: random weights of a true shape on one GPU,
with the verdicts of a trace; what the selector adds to a step, over the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.decoding.harness import SAMPLING, Arm, Load, Measured, SteadyEngine
from benchmarks.engine.decoding.replay import trace_of
from benchmarks.models import random_model
from benchmarks.quality.arms import engine_of
from benchmarks.shared import Report, defaults, numbers, parse_options, start
from idlm.contracts import SamplingParams
from idlm.infer.clients.loads import load_prompts
from idlm.infer.evaluation.evaluate import task_samples
from idlm.tasks import TASKS

DEFAULTS = defaults(
    "model= shape= task=ledger level=p4 prompts= num=64 temperature=1.0 strategies=cold,branch stride= "
    "max_tokens=256 device=auto loads=1x1024,64x1024 trace=p0.78 rounds=3 tokens=192 record=false"
)


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS)
    report = Report("selector", options)
    (step_share if options["shape"] else gain)(report, options)
    return report.status


def gain(report: Report, options: dict[str, str]) -> None:
    num = int(options["num"])
    if options["prompts"]:
        prompts = load_prompts(options["prompts"])[:num]
    else:
        task = TASKS.get(options["task"])(level=options["level"])
        prompts = [sample.prompt for sample in task_samples(task, "test", num)]
    temperature, max_tokens = float(options["temperature"]), int(options["max_tokens"])
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=1)
    more: dict[str, Any] = {"stride": int(options["stride"])} if options["stride"] else {}
    sizes = options | {"batch": str(num), "dtype": "auto"}
    for strategy in options["strategies"].split(","):
        found = {}
        for selector in (False, True):
            with engine_of(sizes, "isd", rejection_strategy=strategy, selector=selector, **more) as engine:
                done = engine.generate(prompts, params)
                del engine
            # Prompts are not decoded: each takes one pass, as all have room.
            found[selector] = sum(len(c.token_ids) for c in done) / sum(c.num_forwards - 1 for c in done)
        case = {"strategy": strategy, "prompts": len(prompts), "temperature": temperature, **more}
        case |= {"model": Path(options["model"]).name}
        report.add(case, "tokens_per_forward_gain", found[True] / found[False], "x", baseline=None)
        report.add(case, "tokens_per_forward", found[True], "tokens", baseline=found[False])


def step_share(report: Report, options: dict[str, str]) -> None:
    device, stride = options["device"].replace("auto", "cuda"), int(options["stride"] or 8)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = random_model(options["shape"], device=device, dtype=dtype)
    for word in options["loads"].split(","):
        concurrency, context = numbers(word.replace("x", ","))
        load = Load(concurrency, context, int(options["tokens"]), SAMPLING["T1"])
        for strategy in options["strategies"].split(","):
            plain = Arm(name="plain", strategy=strategy, stride=stride)
            arms, trace = (plain, replace(plain, selector=True)), trace_of(options["trace"], stride)
            engines = [SteadyEngine(model, arm, load, trace) for arm in arms]
            found = [Measured(arm=arm, load=load, width=0) for arm in arms]
            for _ in range(int(options["rounds"])):
                for engine, measured in zip(engines, found, strict=True):
                    engine.measure(measured)
            share = found[1].step_ms() / found[0].step_ms() - 1
            case = {"shape": options["shape"], "strategy": strategy, "stride": stride, "context": context}
            report.add(case | {"concurrency": concurrency}, "step_share", share, "share")


if __name__ == "__main__":
    start(measure, __doc__)
