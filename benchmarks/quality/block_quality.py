"""Exact match of a block-diffusion model on held-out questions when a pass decides several tokens.

    python -m benchmarks.block_quality model=outputs/tiny_block [num=1000] [record=true]

Decoding is greedy. The baseline is the better of the model's two one-token-a-step decodings; at threshold
`JUDGED` the model may lose two points. Every question counts once in every arm, so a difference is judged by
the questions on which two arms disagree. `reference=n`: tests/block_reference.py, which shares no code with
the engine, recomputes the answers of n questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.arms import ArmResult, Measured, add_arm, difference_error, greedy, results_of
from benchmarks.shared import Report, defaults, parse_options, start
from idlm.contracts import SamplingParams
from idlm.infer.evaluation.evaluate import task_samples
from idlm.semantics import Semantics
from idlm.tasks import TASKS, TaskSample
from idlm.text.tokenizer import encode_prompt, load_tokenizer
from tests.block_reference import Rules, Sampling, SlowBlocks

OPTIONS = defaults(
    "model=outputs/tiny_block task=ledger level=tiny num=1000 "
    "thresholds=0.5,0.6,0.7,0.8,0.85,0.9,0.95 max_tokens=320 batch=64 device=auto dtype=auto "
    "reference=4 record=false"
)
JUDGED, ALLOWED_LOSS = 0.9, 0.02
SEQUENTIAL, DYNAMIC = "sequential", "low_confidence_dynamic"
ONE_TOKEN = 1.0
"""No confidence exceeds this threshold, so only the most confident token is decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How blocks are decided: by `threshold`, else from left to right."""

    threshold: float | None = None

    @property
    def strategy(self) -> str:
        return SEQUENTIAL if self.threshold is None else DYNAMIC

    def engine_options(self) -> dict[str, Any]:
        return {"strategy": self.strategy}

    def request_options(self) -> dict[str, Any]:
        return {} if self.threshold is None else {"threshold": self.threshold}


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, OPTIONS)
    thresholds = [float(one) for one in options["thresholds"].split(",")]
    task = TASKS.get(options["task"])(level=options["level"])
    samples = task_samples(task, "test", int(options["num"]))
    arms = [Arm(), *(Arm(threshold=threshold) for threshold in (ONE_TOKEN, *thresholds))]
    results = list(results_of(options, "block", arms, task, samples, prefix_cache=False))
    base, report = max(results[:2], key=lambda result: result.share), Report("block_quality", options)
    for result in results:
        arm: Arm = result.arm
        case: dict[str, Any] = {"threshold": "-" if arm.threshold is None else arm.threshold}
        case |= {"strategy": arm.strategy, "questions": len(samples)}
        further: list[Measured] = [
            ("standard_error_of_difference", difference_error(result, base), "share", None)
        ]
        if compared := samples[: int(options["reference"])]:
            expected = slow_answers(Path(options["model"]), arm, compared, greedy(options, {}))
            answers = [list(done.token_ids) for done in result.evaluation.completions[: len(compared)]]
            num_equal = sum(mine == true for mine, true in zip(answers, expected, strict=True))
            further.append(("equal_to_reference", num_equal / len(compared), "share", None))
        add_arm(report, case, result, base, *further, gate=passes(result, base))
    return report.status


def slow_answers(
    model: Path, arm: Arm, samples: Sequence[TaskSample], params: SamplingParams
) -> list[list[int]]:
    """Token ids from tests/block_reference.py, on a CPU in float32."""
    meaning, tokenizer = Semantics.load(model), load_tokenizer(model)
    assert meaning.block_size is not None and meaning.mask_token_id is not None
    assert params.max_tokens is not None
    rules = Rules(
        size=meaning.block_size, mask=meaning.mask_token_id, strategy=arm.strategy, **arm.request_options()
    )
    slow = SlowBlocks(model, rules, allows_ties=True)
    settings = Sampling(temperature=0, max_tokens=params.max_tokens, stops=meaning.stop_token_ids)
    return [slow.answer(encode_prompt(tokenizer, one.prompt), settings)[0] for one in samples]


def passes(result: ArmResult, base: ArmResult) -> bool | None:
    """Whether the judged threshold preserves the model's quality; None for every other arm."""
    return None if result.arm.threshold != JUDGED else result.share >= base.share - ALLOWED_LOSS


if __name__ == "__main__":
    start(measure, __doc__)
