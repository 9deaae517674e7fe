"""Recorded or drawn outcomes of draft verification, which benchmarks replay.

A trace is a list of how many drafts each test accepted, in order; a file holds the lists of one recording
(`python -m benchmarks.decode record_trace=FILE model=outputs/tiny`). The name `p0.90` means draws instead:
every draft is accepted with that probability once its predecessors are. 0.90 is what the authors' published
tokens per forward imply by eq. 3: 1.80, 2.48, 2.96, 4.01 at strides 2, 3, 4, 8 give 0.889, 0.909, 0.905,
0.896 (I-DLM, arXiv 2604.11035).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.build import build
from idlm.infer.cli.evaluate import evaluate, task_samples
from idlm.infer.engine import Engine
from idlm.infer.options import check_options
from idlm.infer.request import Request
from idlm.infer.runtime.worker import Emission
from idlm.tasks import TASKS

TRACES = Path(__file__).resolve().parents[2] / "traces"
DRAWN_TESTS = 20_000
RECORDED_STRIDES = (2, 3, 4)
TASK, LEVEL, SPLIT = "ledger", "tiny", "test"
MAX_TOKENS = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`accepted[i]` of `num_drafts` drafts passed in test i; `filled` likewise for drafts that `tree` drew
    from a rejected pass (empty: unknown).
    """

    name: str
    num_drafts: int
    accepted: tuple[int, ...]
    filled: tuple[int, ...] = ()

    def acceptance(self) -> list[float]:
        """Acceptance per position, given that all previous drafts were accepted."""
        reached = [sum(count >= place for count in self.accepted) for place in range(self.num_drafts + 1)]
        return [after / max(1, before) for before, after in zip(reached, reached[1:])]


def trace_of(name: str, stride: int) -> Trace:
    """The trace `name` (p0.90, a name in benchmarks/traces, or a file) for `stride`; raises IDLM-0109."""
    if name.startswith("p") and _is_share(name[1:]):
        return drawn(float(name[1:]), stride - 1)
    path = Path(name) if Path(name).suffix else TRACES / f"{name}.json"
    if not path.is_file():
        known = sorted(found.stem for found in TRACES.glob("*.json"))
        raise UserError("IDLM-0109", f"no trace {name!r}", fix=f"use p0.90 or some of {known}")
    lists = json.loads(path.read_text(encoding="utf-8"))["strides"].get(str(stride))
    if lists is None:
        raise UserError(
            "IDLM-0109", f"{path} has no tests at stride {stride}", fix="record one, or use p0.90"
        )
    return Trace(
        name=path.stem,
        num_drafts=stride - 1,
        accepted=tuple(map(int, lists["accepted"])),
        filled=tuple(map(int, lists["filled"])),
    )


def drawn(probability: float, num_drafts: int) -> Trace:
    """Independent draws with a fixed seed."""
    dice = random.Random(1_000_000 * probability + num_drafts)
    accepted = []
    for _ in range(DRAWN_TESTS):
        count = 0
        while count < num_drafts and dice.random() < probability:
            count += 1
        accepted.append(count)
    return Trace(name=f"p{probability:.2f}", num_drafts=num_drafts, accepted=tuple(accepted))


def _is_share(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False


class _Recorder(Engine):
    """Records every outcome that counts by request, for drafts from masks and from a rejected pass."""

    accepted: dict[Request, list[int]]
    filled: dict[Request, list[int]]

    def _process(self, request: Request, samples: bool, emission: Emission) -> None:
        next_from_verify: dict[Request, bool] = self.__dict__.setdefault("_next_from_verify", {})
        super()._process(request, samples, emission)
        if not samples or request.finish_reason is not None:
            return
        num_accepted, num_tested = emission.num_accepted, emission.num_tested
        from_verify_rows = next_from_verify.get(request, False)
        if num_tested:
            (self.filled if from_verify_rows else self.accepted).setdefault(request, []).append(num_accepted)
        # Under `tree`, a rejected draft from masks is followed by drafts from the rejected pass.
        next_from_verify[request] = not from_verify_rows and num_tested > num_accepted


def _digits(tests: dict[Request, list[int]]) -> str:
    return "".join(str(count) for counts in tests.values() for count in counts)


def record(model: str, path: Path, *, num: int, device: str) -> dict[str, Any]:
    """Decode held-out prompts greedily with `cold` and with `tree`, and write the outcomes to `path`."""
    task = TASKS.get(TASK)(level=LEVEL)
    samples = task_samples(task, SPLIT, num)
    strides: dict[str, dict[str, str]] = {}
    for stride in RECORDED_STRIDES:
        found = {}
        for strategy in ("cold", "tree"):
            options = {"stride": stride, "rejection_strategy": strategy, "device": device}
            engine = _Recorder(build(model, check_options("isd", options)))
            engine.accepted, engine.filled = {}, {}
            evaluate(engine, task, samples, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
            found[strategy] = engine
        strides[str(stride)] = {
            "accepted": _digits(found["cold"].accepted),
            "filled": _digits(found["tree"].filled),
        }
    said = {
        "what": "drafts accepted per test, a digit each, greedy; tests of drafts from masks (strategy cold) "
        "and of drafts from a rejected pass (strategy tree)",
        "model": f"recipe tiny, {TASK} {LEVEL}, {num} {SPLIT} prompts",
        "strides": strides,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return said
