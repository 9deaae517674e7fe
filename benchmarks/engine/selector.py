"""What a selector of drafts gains in tokens per forward pass.

    python -m benchmarks.selector model=PATH [task=ledger] [level=p4] [prompts=FILE] [num=64]
        [temperature=1.0] [strategies=cold,branch] [stride=] [max_tokens=256] [device=auto] [record=true]

`tokens_per_forward_gain`: a checkpoint with a selector, whose engine draws the drafts with it and without, on
the same prompts (of a task, or as of idlm-bench)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.shared import Report, defaults, parse_options, start
from idlm.contracts import SamplingParams
from idlm.infer.clients.loads import load_prompts
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import task_samples
from idlm.tasks import TASKS

DEFAULTS = defaults(
    "model= task=ledger level=p4 prompts= num=64 temperature=1.0 strategies=cold,branch stride= "
    "max_tokens=256 device=auto record=false"
)


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS)
    report = Report("selector", options)
    num = int(options["num"])
    if options["prompts"]:
        prompts = load_prompts(options["prompts"])[:num]
    else:
        task = TASKS.get(options["task"])(level=options["level"])
        prompts = [sample.prompt for sample in task_samples(task, "test", num)]
    params = SamplingParams(
        temperature=float(options["temperature"]), max_tokens=int(options["max_tokens"]), seed=1
    )
    more: dict[str, Any] = {"stride": int(options["stride"])} if options["stride"] else {}
    for strategy in options["strategies"].split(","):
        found = {}
        for selector in (False, True):
            engine = Engine.from_pretrained(
                options["model"],
                "isd",
                device=options["device"],
                max_num_seqs=num,
                rejection_strategy=strategy,
                selector=selector,
                **more,
            )
            done = engine.generate(prompts, params)
            # Prompts are not decoded: each takes one pass, as all have room.
            found[selector] = sum(len(c.token_ids) for c in done) / sum(c.num_forwards - 1 for c in done)
            engine.close()
        case = {"strategy": strategy, "prompts": len(prompts), "temperature": params.temperature}
        case |= {"model": Path(options["model"]).name}
        report.add(case, "tokens_per_forward_gain", found[True] / found[False], "x", baseline=None)
        report.add(case, "tokens_per_forward", found[True], "tokens", baseline=found[False])
    return report.status


if __name__ == "__main__":
    start(measure, __doc__)
