"""The sampling law of the whole engine on a GPU: a million responses per case, and planted faults.

    python -m benchmarks.law [draws=1000000] [device=cuda] [cases=2-cold,..,8-branch,adaptive]
                             [workers=0] [faults=true] [lanes=1024] [num_inflight_steps=2] [record=true]
                             [structured=false]

On a toy of 5 tokens, draws with graphs and asynchronous steps are tested against the joint laws of response
tokens 0..3 and 4..7, which transformers enumerates (tests/law/harness.py). One process per case, all on the
same GPU, because the toy is bound by the host. `faults`: pytest runs the suite of tests/law/faults.py on the
device too. `structured`: also 1e5 answers of a schema of six tokens (tests/law/structured.py); with `draws=0`
only those.
"""

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

from benchmarks.engine.decoding.pages import check_pages
from benchmarks.results import result_row
from benchmarks.shared import defaults, parse_options, save, start
from idlm.errors import UserError
from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.runtime.stride_controller import Load, StrideController
from tests.law import structured
from tests.law.harness import (
    NEUTRAL,
    NUM_TOKENS,
    PROMPT,
    build_engine,
    fits,
    sample,
    write_law_toy,
)

STRIDES = (2, 3, 4, 8)
ADAPTIVE = "adaptive"
LEVEL = 1e-6
PER_REQUEST, AT_ONCE = 1000, 100_000
STRUCTURED_DRAWS = 100_000
FAULT_TESTS = {"cuda": "tests/gpu/engine/test_faults_gpu.py", "cpu": "tests/law/test_planted_faults.py"}
ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = defaults(
    "draws=1000000 device=cuda cases= workers=0 faults=true lanes=1024 num_inflight_steps=2 "
    "structured=false record=true"
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
    """Draw, test, print and record; returns 1 when the law does not hold or a fault is missed."""
    options = parse_options(arguments, DEFAULTS)
    if options["device"] not in FAULT_TESTS or (
        options["device"] == "cuda" and not torch.cuda.is_available()
    ):
        raise UserError("IDLM-0543", f"device={options['device']}", fix="use cuda on a GPU, or cpu")
    names = options["cases"].split(",") if options["cases"] else case_names()
    if unknown := set(names) - set(case_names()):
        raise UserError("IDLM-0107", f"unknown cases {sorted(unknown)}", fix=f"use some of {case_names()}")
    rows = _law_rows(options, _draw(options, names)) if int(options["draws"]) else []
    if options["structured"] == "true":
        rows.append(_structured_row(options))
    if options["faults"] == "true":
        rows += _fault_rows(options["device"])
    save("law", rows, options)
    return int(any(row["gate_passed"] is False for row in rows))


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
    """Draw the case's responses from an engine of its own."""
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
    sampled = sample(engine, [(PROMPT, NEUTRAL)], case.draws, per_request=PER_REQUEST, at_once=AT_ONCE)
    seconds = time.perf_counter() - start
    check_pages(engine.pool)
    assert engine.pool.num_free == engine.pool.num_pages, f"{engine.pool.num_free=}"
    found = fits(case.toy, sampled)
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

    def recorded(load: Load) -> int:
        used.add(number := choose(load))
        return number

    controller.choose = recorded  # type: ignore[method-assign]
    return used


def _law_rows(options: dict[str, str], outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """The smallest tail probability over all tests, times their number."""
    tails = [p_value for outcome in outcomes for p_value in outcome.p_values]
    corrected = min(1.0, min(tails) * len(tails))
    gate = corrected > LEVEL and all(outcome.is_near for outcome in outcomes)
    case = {
        "draws": int(options["draws"]),
        "tokens": NUM_TOKENS,
        "cases": " ".join(outcome.name for outcome in outcomes),
        "graphs": "on",
    }
    print(f"smallest p of {len(tails)} tests {min(tails):.3g}, after Bonferroni {corrected:.3g}")
    return [result_row("law", case, "p_value_min", corrected, "", gate_passed=gate)]


def _structured_row(options: dict[str, str]) -> dict[str, Any]:
    """The smallest tail probability of answers that match a schema, under two strategies and AR."""
    found, start = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        toy = structured.write_structured_toy(Path(home))
        for name in ("ar", "4-tree", "3-branch"):
            decoder: dict[str, Any] = {}
            if name != "ar":
                decoder = {"stride": int(name[0]), "rejection_strategy": name[2:]}
            engine = structured.build_engine(
                toy, "isd" if decoder else "ar", device=options["device"], graphs="on", **decoder
            )
            settings = structured.SETTINGS[:1]
            found.append(structured.draw_fits(toy, engine, STRUCTURED_DRAWS, settings=settings))
            print(f"structured {name:10s} p {found[-1].p_value:.3g}, acceptance {found[-1].acceptance:.3f}")
    corrected = min(1.0, min(one.p_value for one in found) * len(found))
    print(f"structured: {time.perf_counter() - start:.0f} s")
    case = {"structured": True, "draws": STRUCTURED_DRAWS, "tokens": structured.NUM_TOKENS}
    return result_row("law", case, "p_value_min", corrected, "", gate_passed=corrected > LEVEL)


def _fault_rows(device: str) -> list[dict[str, Any]]:
    """Result rows: how many faults are caught, and how many engines without a fault pass the same checks."""
    with tempfile.TemporaryDirectory() as home:
        report = Path(home) / "report.xml"
        path = FAULT_TESTS[device]
        arguments = ["-q", "-m", "gpu or not gpu", "-p", "no:cacheprovider", f"--junitxml={report}", path]
        subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    rows = []
    for metric, test in (
        ("planted_faults_caught", "test_the_fault_is_caught"),
        ("controls_passed", "test_the_engine_as_it_is_passes"),
    ):
        chosen = [case for case in cases if case.get("name", "").startswith(test)]
        passed = sum(map(_passed, chosen))
        print(f"{metric}: {passed} of {len(chosen)}")
        gate = passed == len(chosen) > 0
        where = {"device": device, "of": len(chosen)}
        rows.append(result_row("law", where, metric, passed, "", baseline=len(chosen), gate_passed=gate))
    return rows


def _passed(case: ElementTree.Element) -> bool:
    return not any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))


if __name__ == "__main__":
    start(measure, __doc__)
