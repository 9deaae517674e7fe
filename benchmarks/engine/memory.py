"""Memory and time of one full-diffusion step: longest canvas, step time, and how good the plans are.

    python -m benchmarks.memory [quick=true] [models=llada_8b] [arms=ARM,..] [caps=24] [shares=0.1,0.5,0.9]
        [parts=l_max,step,timeline] [allocators=default,expandable] [lengths=8192,32768] [layers=0]
        [probe_layers=2] [budget_s=570] [timeout_s=540] [figures=FOLDER] [record=true]

It needs a GPU. Models of true shapes have random bf16 weights. Every arm runs in a fresh process under a cap
that binds all of them (`canvas/card.py`). Arms of libraries: native_fp64, native, compile, masked,
compile_masked (`canvas/native_arms.py`). Ours: paper (attention whole, 48 KiB a token of LLaDA-8B), mosaic
(attention whole, planned), ours (query chunks).
Part `l_max` bisects with `probe_layers` layers, the other layers' weights as ballast. Part `step` runs
`layers` layers (0: all); its floor is linear FLOPs at the rate of the best library product plus attention
FLOPs at the rate of the best library attention, both of this run. Arms that fail, are late or find no memory
are printed with the reason. No part starts after `budget_s`. `quick` fits into 5 minutes of one H200.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.canvas import report
from benchmarks.engine.canvas.child import ALLOCATORS
from benchmarks.engine.canvas.models import (
    CONFIGS,
    attention_flops,
    length_floor,
    linear_flops,
    model_spec,
    num_masks,
)
from benchmarks.engine.canvas.session import Session
from benchmarks.engine.canvas.tasks import ARMS
from benchmarks.results import append_rows
from benchmarks.shared import defaults, parse_options, print_absent, start
from idlm.config.suggest import did_you_mean
from idlm.errors import UserError

DEFAULTS = defaults(
    "quick=false models=llada_8b caps=24 shares=0.1,0.5,0.9 "
    "parts=l_max,step,timeline lengths=8192,32768 layers=0 probe_layers=2 "
    "budget_s=570 "
    "timeout_s=540 device=cuda dtype=bfloat16 figures= record=true",
    arms=",".join(ARMS),
    allocators=",".join(ALLOCATORS),
)
QUICK = {
    "arms": "ours,mosaic,masked,native,compile",
    "shares": "0.5",
    "parts": "l_max,step",
    "allocators": "expandable",
    "layers": "8,0",
    "budget_s": "285",
}
TIMELINE_LENGTH = 16_384


def measure(arguments: list[str]) -> int:
    """Measure the parts asked for, print the table and record the rows; returns 0."""
    is_quick = parse_options(arguments, DEFAULTS)["quick"] == "true"
    options = parse_options(arguments, {**DEFAULTS, **(QUICK if is_quick else {})})
    session = Session(options, time.monotonic() + float(options["budget_s"]))
    _check(session)
    results = Path(options["results"])
    try:
        for model in session.listed("models"):
            for part in session.listed("parts"):
                PARTS[part](session, model)
    finally:
        rows = session.rows()
        if options["record"] == "true" and rows:
            append_rows(report.BENCH, rows, results=results)
        print_absent(session.absent)
        print(report.table(rows))
    if options["figures"]:
        for path in report.draw(results, Path(options["figures"])):
            print(f"drawn: {path}")
    return 0


def _check(session: Session) -> None:
    for key, known in (("models", CONFIGS), ("arms", ARMS), ("parts", PARTS), ("allocators", ALLOCATORS)):
        for value in session.listed(key):
            if value not in known:
                raise UserError(
                    "IDLM-0107",
                    f"{key}={value}{did_you_mean(value, known)}",
                    fix=f"use some of {', '.join(known)}",
                )
    # No context of this process may stay on the card, so the GPU is only counted here.
    if session.options["device"] == "cuda" and not torch.cuda.device_count():
        raise UserError(
            "IDLM-0543", "no CUDA device", fix="run benchmarks.memory on a GPU, or give device=cpu"
        )


def _number(text: str) -> float:
    """A number, without a point if it is whole."""
    return int(text) if text.isdigit() else float(text)


def measure_l_max(session: Session, model: str) -> None:
    """Rows of L_max at every cap and prompt share."""
    arms = session.listed("arms")
    probe_layers = int(session.options["probe_layers"])
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for cap in map(_number, session.listed("caps")):
        for share in map(float, session.listed("shares")):
            for arm in arms:
                guess = round(0.97 * length_floor(model_spec(model), arm, share, cap))
                for allocator in session.allocators(arm):
                    task = session.task(
                        "l_max",
                        model,
                        arm=arm,
                        prompt_share=share,
                        length=guess,
                        layers=probe_layers,
                        cap_gib=cap,
                        expandable=ALLOCATORS[allocator],
                    )
                    answer = session.ask(task)
                    if answer is not None:
                        found[model, cap, share, arm, allocator] = answer
    session.later(report.l_max_rows, found, session.command(model))


def measure_steps(session: Session, model: str) -> None:
    """Rows of step time at every length and prompt share, for each choice of layers."""
    lengths = tuple(map(int, session.listed("lengths")))
    rates = session.ask(session.task("rates", model, lengths=lengths))
    for chosen in map(int, session.listed("layers")):
        spec = model_spec(model, num_layers=chosen or None)
        layers = None if spec == model_spec(model) else chosen
        found: dict[tuple[Any, ...], float] = {}
        floors: dict[tuple[Any, ...], float | None] = {}
        for share in map(float, session.listed("shares")):
            for length in lengths:
                wanted = num_masks(length, share)
                floors[model, layers, length, share] = (
                    None
                    if rates is None or not rates["attention"][str(length)]["rate"]
                    else 1e3
                    * (
                        linear_flops(spec, length, wanted) / rates["matmul"]
                        + attention_flops(spec, length) / rates["attention"][str(length)]["rate"]
                    )
                )
            for arm in session.listed("arms"):
                for milliseconds, length in _steps_of(session, model, arm, share, lengths, chosen):
                    key = (model, layers, length, share, arm)
                    found[key] = min(milliseconds, found.get(key, milliseconds))
        session.later(report.step_rows, found, floors, session.command(model))


def _steps_of(
    session: Session, model: str, arm: str, share: float, lengths: tuple[int, ...], layers: int
) -> list[tuple[float, int]]:
    """Milliseconds and length of every step that an arm ran, with each allocator."""
    times = []
    for allocator in session.allocators(arm):
        task = session.task(
            "step",
            model,
            arm=arm,
            prompt_share=share,
            lengths=lengths,
            layers=layers,
            expandable=ALLOCATORS[allocator],
        )
        answer = session.ask(task) or {"lengths": {}}
        for length, timed in answer["lengths"].items():
            if "reason" in timed:
                session.absent[f"step {model} {arm} {allocator} length={length}"] = timed["reason"]
            else:
                times.append((timed["ms"], int(length)))
    return times


def measure_timelines(session: Session, model: str) -> None:
    """Rows of each arm's use of memory at 16K, and the points of its timeline."""
    found = {}
    for arm in session.listed("arms"):
        allocator = session.allocators(arm)[-1]
        task = session.task(
            "timeline", model, arm=arm, length=TIMELINE_LENGTH, layers=4, expandable=ALLOCATORS[allocator]
        )
        answer = session.ask(task)
        if answer is not None:
            found[arm] = answer
            session.later(report.arm_rows, arm, answer, session.command(model))
    if session.options["record"] == "true" and found:
        report.save_timelines(found, Path(session.options["results"]))


PARTS: dict[str, Callable[[Session, str], None]] = {
    "l_max": measure_l_max,
    "step": measure_steps,
    "timeline": measure_timelines,
}

if __name__ == "__main__":
    start(measure, __doc__)
