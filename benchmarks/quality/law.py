"""The sampling law of the whole engine on a GPU: a million responses per case, and planted faults.

    python -m benchmarks.law [draws=1000000] [device=cuda] [cases=2-cold,..,8-branch,adaptive]
                             [workers=0] [faults=true] [penalties=true] [lanes=1024]
                             [num_inflight_steps=2] [record=true]

On a toy of 5 tokens, draws with graphs and asynchronous steps are tested against the joint laws of response
tokens 0..3 and 4..7, which transformers enumerates (tests/law/harness.py). `penalties`: penalties, biases and
both at three temperatures, which share the draws and every pass (tests/law/changes/law.py). One process per
case, all on the same GPU, because the toy is bound by the host. `faults`: pytest runs the suite of
tests/law/faults.py on the device too."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.shared import Report, chosen, defaults, parse_options, start
from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.runtime.stride_controller import StepLoad, StrideController
from tests.law.changes import law as changes
from tests.law.harness import NEUTRAL, NUM_TOKENS, PROMPT, build_engine, fits, sample, write_law_toy
from tests.prefix_simulation import check_pages

STRIDES = (2, 3, 4, 8)
ADAPTIVE = "adaptive"
LEVEL = 1e-6
PER_REQUEST, AT_ONCE = 1000, 100_000
FAULT_TESTS = {"cuda": "tests/gpu/engine/test_faults_gpu.py", "cpu": "tests/law/test_planted_faults.py"}
ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = defaults(
    "draws=1000000 device=cuda cases= workers=0 faults=true penalties=false lanes=1024 "
    "num_inflight_steps=2 record=true"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The draws of one process."""

    name: str
    toy: Path
    draws: int
    device: str
    lanes: int
    num_inflight_steps: int
    has_penalties: bool

    def decoder_options(self) -> dict[str, Any]:
        """Options of the decoder; `adaptive` has the largest stride, so that it may choose any."""
        if self.name == ADAPTIVE:
            return {"stride": max(STRIDES), "adaptive": True}
        stride, _, strategy = self.name.partition("-")
        return {"stride": int(stride), "rejection_strategy": strategy}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Tail probabilities of two chi-square tests. `is_near`: total variation is within its bound."""

    name: str
    p_values: tuple[float, ...]
    is_near: bool
    acceptance: float
    num_modes: int
    seconds: float


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="law")
    chosen(options, "device", FAULT_TESTS)
    names, report = chosen(options, "cases", case_names()) or case_names(), Report("law", options)
    _add_law(report, _draw(options, names))
    if options["faults"] == "true":
        _add_faults(report)
    return report.status


def case_names() -> list[str]:
    """Every stride with every strategy, and `adaptive`."""
    return [*(f"{stride}-{name}" for stride in STRIDES for name in STRATEGIES.names()), ADAPTIVE]


def _draw(options: dict[str, str], names: list[str]) -> list[Outcome]:
    workers = int(options["workers"]) or max(1, min(len(names), (os.cpu_count() or 1) - 1))
    outcomes = []
    with tempfile.TemporaryDirectory() as home:
        toy = write_law_toy(Path(home) / "toy")
        cases = [
            Case(
                name=name,
                toy=toy,
                draws=int(options["draws"]),
                device=options["device"],
                lanes=int(options["lanes"]),
                num_inflight_steps=int(options["num_inflight_steps"]),
                has_penalties=options["penalties"] == "true",
            )
            for name in names
        ]
        if workers == 1:
            return [_printed(run_case(case)) for case in cases]
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=spawning) as pool:
            outcomes = [
                _printed(done.result()) for done in as_completed([pool.submit(run_case, c) for c in cases])
            ]
    return sorted(outcomes, key=lambda outcome: names.index(outcome.name))


def _printed(outcome: Outcome) -> Outcome:
    tails = " ".join(f"{p_value:.3g}" for p_value in outcome.p_values)
    print(
        f"{outcome.name:10s} p {tails}, acceptance {outcome.acceptance:.3f}, "
        f"{outcome.num_modes} modes in use, {outcome.seconds:.0f} s",
        flush=True,
    )
    return outcome


def run_case(case: Case) -> Outcome:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = build_engine(
            case.toy,
            "isd",
            num_lanes=case.lanes,
            device=case.device,
            graphs="on",
            num_inflight_steps=case.num_inflight_steps,
            **case.decoder_options(),
        )
    controller = engine._stride_controller
    used = {0} if controller is None else _record_choices(controller)
    start = time.perf_counter()
    settings = changes.SETTINGS if case.has_penalties else ((PROMPT, NEUTRAL),)
    num_draws, per_request = case.draws // len(settings), min(PER_REQUEST, case.draws // len(settings))
    sampled = sample(engine, settings, num_draws, per_request=per_request, at_once=AT_ONCE)
    seconds = time.perf_counter() - start
    check_pages(engine.pool)
    assert engine.pool.num_free == engine.pool.num_pages, f"{engine.pool.num_free=}"
    found = (changes.fits if case.has_penalties else fits)(case.toy, sampled)
    return Outcome(
        name=case.name,
        p_values=tuple(one.p_value for one in found.values()),
        is_near=all(one.total_variation <= one.bound for one in found.values()),
        acceptance=sampled.acceptance,
        num_modes=len(used),
        seconds=seconds,
    )


def _record_choices(controller: StrideController) -> set[int]:
    """A set to which every mode that the controller chooses is added."""
    used: set[int] = set()
    choose = controller.choose

    def recorded(load: StepLoad) -> int:
        used.add(number := choose(load))
        return number

    controller.choose = recorded  # type: ignore[method-assign]
    return used


def _add_law(report: Report, outcomes: list[Outcome]) -> None:
    """The smallest tail probability over all tests, times their number."""
    tails = [p_value for outcome in outcomes for p_value in outcome.p_values]
    corrected = min(1.0, min(tails) * len(tails))
    gate = corrected > LEVEL and all(outcome.is_near for outcome in outcomes)
    case = {
        "draws": int(report.options["draws"]),
        "tokens": NUM_TOKENS,
        "cases": " ".join(outcome.name for outcome in outcomes),
        "graphs": "on",
        **({"penalties": True} if report.options["penalties"] == "true" else {}),
    }
    report.add(case, "p_value_min", corrected, "", gate_passed=gate)


def _add_faults(report: Report) -> None:
    """How many faults are caught, and how many engines without a fault pass the same checks."""
    device = report.options["device"]
    with tempfile.TemporaryDirectory() as home:
        xml = Path(home) / "report.xml"
        arguments = ["-q", "-m", "gpu or not gpu", "-p", "no:cacheprovider", f"--junitxml={xml}"]
        command = [sys.executable, "-m", "pytest", *arguments, FAULT_TESTS[device]]
        subprocess.run(command, cwd=ROOT, check=False)
        cases = list(ElementTree.parse(xml).iter("testcase"))
    for metric, test in (
        ("planted_faults_caught", "test_the_fault_is_caught"),
        ("controls_passed", "test_the_engine_as_it_is_passes"),
    ):
        found = [case for case in cases if case.get("name", "").startswith(test)]
        passed = sum(map(_passed, found))
        gate, where = passed == len(found) > 0, {"device": device, "of": len(found)}
        report.add(where, metric, passed, "", baseline=len(found), gate_passed=gate)


def _passed(case: ElementTree.Element) -> bool:
    return not any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))


if __name__ == "__main__":
    start(measure, __doc__)
