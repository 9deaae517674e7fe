"""What several tokens a pass cost a block-diffusion model trained here: exact match on held-out questions.

    python -m benchmarks.block_quality model=outputs/tiny_block [num=1000] [record=true]

Greedy. The baseline is the better of the model's two one-token-a-step decodings; at threshold `JUDGED` the
model may lose two points of it. Every question counts once in every arm, so a difference is judged by the
questions on which two arms disagree. `reference=n`: answers of so many questions are computed anew by
tests/block_reference.py, which shares no code with the engine.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from idlm import command
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.evaluate import Evaluation, evaluate, task_samples
from idlm.semantics import Semantics
from idlm.tasks import TASKS, Task, TaskSample
from idlm.tokens import encode_prompt, load_tokenizer
from tests.block_reference import Rules, Sampling, SlowBlocks

COMMAND = "python -m benchmarks.block_quality"
OPTIONS = {
    "model": "outputs/tiny_block",
    "task": "ledger",
    "level": "tiny",
    "num": "1000",
    "thresholds": "0.5,0.6,0.7,0.8,0.85,0.9,0.95",
    "max_tokens": "320",
    "batch": "64",
    "device": "auto",
    "dtype": "auto",
    "reference": "4",
    "record": "false",
    "results": str(RESULTS),
}
JUDGED, ALLOWED_LOSS = 0.9, 0.02
ONE_TOKEN = ("low_confidence_static", "sequential")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Options of decoder `block`."""

    strategy: str
    threshold: float | None = None

    def options(self) -> dict[str, Any]:
        """Keywords for the engine."""
        return {"strategy": self.strategy} | ({} if self.threshold is None else {"threshold": self.threshold})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An arm's answers; `num_equal` of the first `num_compared` are those of the slow reference."""

    arm: Arm
    evaluation: Evaluation
    num_compared: int = 0
    num_equal: int = 0
    marks: tuple[bool, ...] = field(default=(), repr=False)

    @property
    def share(self) -> float:
        """Exact match."""
        return self.evaluation.exact_match


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Decode with every arm, print a table, record rows; status 1 where the judged threshold fails."""
    options = parse_options(arguments, OPTIONS)
    num, thresholds = _numbers(options)
    task = TASKS.get(options["task"])(level=options["level"])
    samples = task_samples(task, "test", num)
    arms = [Arm(strategy=name) for name in ONE_TOKEN]
    arms += [Arm(strategy="low_confidence_dynamic", threshold=threshold) for threshold in thresholds]
    results = []
    for arm in arms:
        print(f"decoding: {arm.strategy} {arm.threshold or ''}", file=sys.stderr)
        results.append(_run(options, arm, task, samples))
    base = max(results[: len(ONE_TOKEN)], key=lambda result: result.share)
    print(table(results, base))
    if options["record"] == "true":
        append_rows("block_quality", rows(results, base), results=Path(options["results"]))
    return int(any(passes(result, base) is False for result in results))


def _numbers(options: dict[str, str]) -> tuple[int, list[float]]:
    try:
        num, thresholds = int(options["num"]), [float(one) for one in options["thresholds"].split(",")]
    except ValueError as error:
        raise UserError(
            "IDLM-0107", f"num and thresholds are numbers: {error}", fix="num=1000 thresholds=0.8,0.9"
        ) from error
    return num, thresholds


def _run(options: dict[str, str], arm: Arm, task: Task, samples: Sequence[TaskSample]) -> Result:
    """One arm; its engine is closed again, and the first answers are compared with the slow reference."""
    engine = Engine.from_pretrained(
        options["model"],
        "block",
        device=options["device"],
        dtype=options["dtype"],
        max_num_seqs=int(options["batch"]),
        **arm.options(),
    )
    params = SamplingParams(temperature=0, max_tokens=int(options["max_tokens"]), seed=1)
    try:
        evaluation = evaluate(engine, task, samples, params)
        compared = samples[: int(options["reference"])]
        expected = slow_answers(Path(options["model"]), arm, compared, params)
    finally:
        engine.close()
    answers = [list(done.token_ids) for done in evaluation.completions[: len(compared)]]
    return Result(
        arm=arm,
        evaluation=evaluation,
        num_compared=len(compared),
        num_equal=sum(mine == true for mine, true in zip(answers, expected, strict=True)),
        marks=tuple(verdict.correct for verdict in evaluation.verdicts),
    )


def slow_answers(
    model: Path, arm: Arm, samples: Sequence[TaskSample], params: SamplingParams
) -> list[list[int]]:
    """Token ids by tests/block_reference.py, on a CPU in float32."""
    if not samples:
        return []
    meaning, tokenizer = Semantics.load(model), load_tokenizer(model)
    assert meaning.block_size is not None and meaning.mask_token_id is not None
    slow = SlowBlocks(model, Rules(size=meaning.block_size, mask=meaning.mask_token_id, **arm.options()))
    settings = Sampling(temperature=0, max_tokens=params.max_tokens, stops=meaning.stop_token_ids)
    return [slow.answer(encode_prompt(tokenizer, one.prompt), settings)[0] for one in samples]


def binomial_error(share: float, num: int) -> float:
    """Standard error of a share of `num` questions."""
    return math.sqrt(share * (1 - share) / num)


def difference_error(result: Result, base: Result) -> float:
    """Standard error of `result.share - base.share` over the same questions."""
    differences = [mine - theirs for mine, theirs in zip(result.marks, base.marks, strict=True)]
    mean = sum(differences) / len(differences)
    return math.sqrt(sum((one - mean) ** 2 for one in differences)) / len(differences)


def passes(result: Result, base: Result) -> bool | None:
    """Whether the judged threshold keeps the model's quality; None for every other arm."""
    return None if result.arm.threshold != JUDGED else result.share >= base.share - ALLOWED_LOSS


def table(results: Sequence[Result], base: Result) -> str:
    """Plain text, one line per arm."""
    num = base.evaluation.num_prompts
    lines = [
        f"{num} held-out questions; +- is one standard error",
        f"{'strategy':<22} {'threshold':>9} {'exact match':>15} {'less than one a step':>21} {'TPF':>5} "
        f"{'tokens/s':>9} {'reference':>9}",
    ]
    for result in results:
        loss = base.share - result.share
        verdict = {None: "", True: "  passed", False: "  FAILED"}[passes(result, base)]
        lines.append(
            f"{result.arm.strategy:<22} {result.arm.threshold or '-':>9} "
            f"{100 * result.share:>7.1f} +- {100 * binomial_error(result.share, num):<4.1f} "
            f"{100 * loss:>13.1f} +- {100 * difference_error(result, base):<4.1f} "
            f"{result.evaluation.tokens_per_forward:>5.2f} {result.evaluation.tokens_per_second:>9.0f} "
            f"{result.num_equal:>4} / {result.num_compared}{verdict}"
        )
    return "\n".join(lines)


def rows(results: Sequence[Result], base: Result) -> list[dict[str, Any]]:
    """Result rows; the baseline of every arm is one token a step."""
    out = []
    for result in results:
        num, dynamic = result.evaluation.num_prompts, result.arm.threshold is not None
        case = {
            "threshold": result.arm.threshold if dynamic else "-",
            "strategy": result.arm.strategy,
            "questions": num,
        }
        speed = result.evaluation.tokens_per_second, base.evaluation.tokens_per_second
        measured: list[tuple[str, float, str, float | None]] = [
            ("exact_match", result.share, "share", base.share),
            ("standard_error", binomial_error(result.share, num), "share", None),
            ("standard_error_of_difference", difference_error(result, base), "share", None),
            ("tokens_per_forward", result.evaluation.tokens_per_forward, "tokens", 1.0),
            ("tokens_per_second", speed[0], "tokens/s", speed[1]),
        ]
        if result.num_compared:
            measured.append(("equal_to_reference", result.num_equal / result.num_compared, "share", None))
        out += [
            result_row(
                "block_quality",
                case,
                metric,
                value,
                unit,
                baseline=baseline,
                gate_passed=passes(result, base),
                exactness=result.evaluation.exactness,
                command=COMMAND,
            )
            for metric, value, unit, baseline in measured
        ]
    return out


if __name__ == "__main__":
    sys.exit(main())
