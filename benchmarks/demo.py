"""`make demo`: convert the bundled checkpoint on this machine, then measure both, side by side.

    python -m benchmarks.demo [num=200] [output=outputs/tiny] [record=true]

Prints one table on held-out prompts of the verifiable task. `record=true` appends the figures to
benchmarks/results."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared import Report, defaults, parse_options, start
from idlm.acceptance import tokens_per_forward_branch, tokens_per_forward_cold
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import Evaluation, evaluate, task_samples
from idlm.tasks import TASKS, Task, TaskSample

BASE = Path("recipes/assets/tiny_ar")
STRIDE = 4
MAX_TOKENS = 320
SEED = 1
FORMULAS = {"cold": tokens_per_forward_cold, "branch": tokens_per_forward_branch}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One line of the table: a checkpoint, a decoder with its options, a temperature."""

    label: str
    is_base: bool
    decoder: str
    options: dict[str, Any]
    temperature: float


def arms() -> list[Arm]:
    """AR base, the converted model decoded by AR, and by ISD with each strategy; at T=0 and at T=1."""
    found = []
    for temperature in (0.0, 1.0):
        for label, is_base in (("AR base", True), ("converted, AR", False)):
            found.append(Arm(label=label, is_base=is_base, decoder="ar", options={}, temperature=temperature))
        for strategy in ("cold", "tree", "branch"):
            options = {"stride": STRIDE, "rejection_strategy": strategy}
            label = f"converted, ISD {strategy}"
            found.append(
                Arm(label=label, is_base=False, decoder="isd", options=options, temperature=temperature)
            )
    return found


def demo(arguments: list[str]) -> int:
    """Convert, evaluate, print; returns the exit status."""
    options = parse_options(arguments, defaults("num=200 output=outputs/tiny record=false"))
    output = Path(options["output"])
    convert_seconds = _convert(output)
    task = TASKS.get("ledger")(level="tiny")
    samples = task_samples(task, "test", int(options["num"]))
    # So small a model does not fill two cores: each of two processes has one, and engines share no GPU.
    num_processes = 1 if torch.cuda.is_available() else min(2, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(num_processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        measured = pool.map(partial(_measure, output=output, task=task, samples=samples), arms())
        results = list(zip(arms(), measured, strict=True))
    print(f"\n{len(samples)} held-out prompts, stride {STRIDE}; converted in {convert_seconds:.0f} s\n")
    print(table(results))
    differing = [arm.label for arm, result in results if parity(arm, result, results) is False]
    print(f"\ngreedy ISD equals greedy AR, token for token: {'yes' if not differing else f'NOT {differing}'}")
    print(f"report: {output}/report.md (with plots and sample generations)")
    print(f"try it: .venv/bin/idlm-generate model={output} sampling.temperature=0 -p '{samples[0].prompt}'")
    if options["record"] == "true":
        record(options, results, convert_seconds)
    return 0


def _measure(arm: Arm, *, output: Path, task: Task, samples: list[TaskSample]) -> Evaluation:
    print(f"evaluating {arm.label}, temperature {arm.temperature:g}", file=sys.stderr)
    engine = Engine.from_pretrained(BASE if arm.is_base else output, arm.decoder, **arm.options)
    params = SamplingParams(temperature=arm.temperature, max_tokens=MAX_TOKENS, seed=SEED)
    return evaluate(engine, task, samples, params)


def table(results: list[tuple[Arm, Evaluation]]) -> str:
    """The demo's table as Markdown, which is readable in a terminal too."""
    head = ("decoder", "T", "exact-match", "acceptance", "TPF", "closed form", "tokens/s")
    lines = [head, *(_line(arm, result) for arm, result in results)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = "|-" + "-|-".join("-" * width for width in widths) + "-|"
    first, *others = (f"| {line} |" for line in text)
    return "\n".join((first, rule, *others))


def _line(arm: Arm, result: Evaluation) -> tuple[str, ...]:
    rate, predicted = result.acceptance_rate, closed_form(arm, result)
    return (
        arm.label,
        f"{arm.temperature:g}",
        f"{100 * result.exact_match:.1f} %",
        "-" if rate is None else f"{rate:.3f}",
        f"{result.tokens_per_forward:.2f}",
        "-" if predicted is None else f"{decode_tokens_per_forward(result):.2f} / {predicted:.2f}",
        f"{result.tokens_per_second:.0f}",
    )


def closed_form(arm: Arm, result: Evaluation) -> float | None:
    """Tokens per forward by the strategy's formula at the measured acceptance of each position."""
    formula = FORMULAS.get(arm.options.get("rejection_strategy", ""))
    if formula is None:
        return None
    pairs = zip(result.accepted_by_position, result.tested_by_position, strict=True)
    return formula(tuple(accepted / tested if tested else 0.0 for accepted, tested in pairs))


def decode_tokens_per_forward(result: Evaluation) -> float:
    """Tokens per forward without each prompt pass and its token, as in the forms of idlm.acceptance."""
    passes = result.num_forwards - result.num_prompt_passes
    return (result.num_tokens - result.num_prompt_passes) / passes if passes else 0.0


def parity(arm: Arm, result: Evaluation, results: list[tuple[Arm, Evaluation]]) -> bool | None:
    """Whether greedy ISD equals AR token for token; None if there is nothing to compare."""
    if arm.decoder == "ar" or arm.temperature != 0:
        return None
    [ar] = [r for a, r in results if a.decoder == "ar" and a.temperature == 0 and not a.is_base]
    return [done.token_ids for done in result.completions] == [done.token_ids for done in ar.completions]


def record(options: dict[str, str], results: list[tuple[Arm, Evaluation]], convert_seconds: float) -> None:
    base = {arm.temperature: result for arm, result in results if arm.is_base}
    report = Report("demo", options, "make demo")
    report.add({}, "convert_seconds", convert_seconds, "s")
    for arm, result in results:
        case = {
            "model": "base" if arm.is_base else "converted",
            "decoder": arm.decoder,
            "strategy": arm.options.get("rejection_strategy", "-"),
            "stride": arm.options.get("stride", 1),
            "temperature": arm.temperature,
        }
        reference, predicted = base[arm.temperature], closed_form(arm, result)
        facts: dict[str, Any] = {"gate_passed": parity(arm, result, results), "exactness": result.exactness}
        for metric, value, unit, baseline in (
            ("exact_match", result.exact_match, "share", reference.exact_match),
            ("tokens_per_forward", result.tokens_per_forward, "tokens", 1.0),
            ("tokens_per_second", result.tokens_per_second, "tokens/s", reference.tokens_per_second),
            ("acceptance_rate", result.acceptance_rate, "share", None),
        ):
            if value is not None:
                report.add(case, metric, value, unit, baseline=baseline, **facts)
        if predicted is not None:
            value = decode_tokens_per_forward(result)
            report.add(case, "decode_tokens_per_forward", value, "tokens", baseline=predicted, **facts)


def _convert(output: Path) -> float:
    """Run the real command in another process; returns its wall-clock seconds."""
    start = time.perf_counter()
    arguments = ["recipe=tiny", f"output_dir={output}", "resume=never"]
    finished = subprocess.run([sys.executable, "-m", "idlm.train.cli", *arguments], check=False)
    if finished.returncode != 0:
        raise UserError(
            "IDLM-0108", f"the conversion ended with status {finished.returncode}", fix="see its output above"
        )
    return time.perf_counter() - start


if __name__ == "__main__":
    start(demo, __doc__)
