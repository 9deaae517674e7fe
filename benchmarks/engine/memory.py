"""Memory and time of one full-diffusion step: longest canvas, step time, and how good the plans are.

    python -m benchmarks.memory [quick=true] [models=llada_8b] [arms=ARM,..] [caps=24] [shares=0.1,0.5,0.9]
        [parts=l_max,step,timeline,plan,chunking,resize] [allocators=default,expandable] [lengths=8192,32768]
        [layers=0] [probe_layers=2] [confirm=false] [check_layers=true] [chunks=8] [requests=200]
        [resize_layers=8] [budget_s=570] [timeout_s=540] [figures=FOLDER] [record=true]

Models of true shapes have random bf16 weights. Every arm runs in a fresh process under a cap that binds
all of them (`canvas/card.py`). Arms of libraries: native_fp64, native, compile, masked, compile_masked
(`canvas/native_arms.py`). Ours: paper (attention whole, 48 KiB a token of LLaDA-8B), mosaic (attention whole,
planned), ours (query chunks).
Part `l_max` bisects with `probe_layers` layers, the other layers' weights as ballast; `check_layers` compares
the peaks of 2 and 4 layers, and `confirm` runs a step of all layers at the length found. Part `step` runs
`layers` layers (0: all); its floor is linear FLOPs at the rate of the best library product plus attention
FLOPs at the rate of the best library attention, both of this run. Arms that fail, are late or find no memory
are printed with the reason. No part starts after `budget_s`. `quick` fits into 5 minutes of one H200.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.canvas import product, report
from benchmarks.engine.canvas.child import ALLOCATORS
from benchmarks.engine.canvas.models import (
    CONFIGS,
    GIB,
    ITEM_BYTES,
    RESERVE_BYTES,
    attention_flops,
    length_floor,
    linear_flops,
    model_spec,
    num_masks,
    total_weights,
)
from benchmarks.engine.canvas.session import Session
from benchmarks.engine.canvas.tasks import ARMS
from benchmarks.optional_arms import print_absent
from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows
from idlm.cli import command
from idlm.config.suggest import did_you_mean
from idlm.errors import UserError

DEFAULTS = {
    "quick": "false",
    "models": "llada_8b",
    "arms": ",".join(ARMS),
    "caps": "24",
    "shares": "0.1,0.5,0.9",
    "parts": "l_max,step,timeline,plan,chunking,resize",
    "allocators": ",".join(ALLOCATORS),
    "lengths": "8192,32768",
    "layers": "0",
    "probe_layers": "2",
    "confirm": "false",
    "check_layers": "true",
    "chunks": "8",
    "requests": "200",
    "resize_layers": "8",
    "budget_s": "570",
    "timeout_s": "540",
    "device": "cuda",
    "dtype": "bfloat16",
    "figures": "",
    "record": "true",
    "results": str(RESULTS),
}
QUICK = {
    "arms": "ours,mosaic,masked,native,compile",
    "shares": "0.5",
    "parts": "l_max,step,plan",
    "allocators": "expandable",
    "layers": "8,0",
    "check_layers": "false",
    "budget_s": "285",
}
TIMELINE_LENGTH, CHECK_LENGTH, CHUNKING_LENGTH = 16_384, 16_384, 32_768
PLAN_LENGTHS = (8_192, 32_768, 131_072)
RESIZE_LENGTHS = (1_024, 65_536)
CHECK_LAYERS = (2, 4)
SAME_LIVE, SAME_PHYSICAL = 0.02, 0.05
"""Largest differences of the peaks of 2 and 4 layers, as shares of the peak; segments are coarser."""
CONFIRMED_SHARES = (1.0, 0.99, 0.97, 0.94)


def main() -> int:
    """Console entry point."""
    return command.run(measure)


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
    does_check = session.options["check_layers"] == "true"
    same = {arm: _has_same_peaks(session, model, arm) if does_check else None for arm in arms}
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
                        found[model, cap, share, arm, allocator] = {**answer, "gate_passed": same[arm]}
            if session.options["confirm"] == "true":
                _confirm(session, found, (model, cap, share))
    session.later(report.l_max_rows, found, session.command(model))


def _has_same_peaks(session: Session, model: str, arm: str) -> bool | None:
    """Whether a step of 2 and of 4 layers takes the same bytes; None if one of them has no answer."""
    expandable = ALLOCATORS[session.allocators(arm)[0]]
    peaks = []
    for layers in CHECK_LAYERS:
        task = session.task("peak", model, arm=arm, length=CHECK_LENGTH, layers=layers, expandable=expandable)
        answer = session.ask(task)
        if answer is None:
            return None
        peaks.append(answer["planned_bytes"] if "planned_bytes" in answer else answer["live_bytes"])
        peaks.append(answer["physical_bytes"])
    live, physical = (peaks[0], peaks[2]), (peaks[1], peaks[3])
    is_same = _are_close(*live, SAME_LIVE) and _are_close(*physical, SAME_PHYSICAL)
    if not is_same:
        print(f"peaks of {CHECK_LAYERS} layers differ: {arm}, live {live}, physical {physical}")
    return is_same


def _are_close(few: int, many: int, share: float) -> bool:
    return abs(few - many) <= share * max(few, many, 1)


def _confirm(session: Session, found: dict[tuple[Any, ...], dict[str, Any]], place: tuple[Any, ...]) -> None:
    """One step of all layers at the longest canvas of each arm, or a little below; the value is what ran."""
    model, cap, share = place
    best: dict[str, tuple[Any, ...]] = {}
    for key, answer in found.items():
        arm = key[3]
        if key[:3] == place and (arm not in best or answer["length"] > found[best[arm]]["length"]):
            best[arm] = key
    for arm, key in best.items():
        answer = found[key]
        for part in CONFIRMED_SHARES if answer["length"] else ():
            length = int(part * answer["length"])
            fields = {"arm": arm, "prompt_share": share, "cap_gib": cap, "expandable": ALLOCATORS[key[4]]}
            reply = session.ask(session.task("confirm", model, length=length, **fields))
            if reply is None:
                break
            if reply["fits"]:
                found[key] = {**answer, "length": length, "gate_passed": answer["gate_passed"] is not False}
                break
        else:
            found[key] = {**answer, "gate_passed": False}


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


def measure_plans(session: Session, model: str) -> None:
    """Rows of the time of one plan, and of a search under the first cap, which needs no GPU."""
    spec = model_spec(model)
    cap = float(session.listed("caps")[0]) * GIB
    capacity = int(cap - ITEM_BYTES * total_weights(spec) - RESERVE_BYTES)
    for length in PLAN_LENGTHS:
        times = product.planning_ms(spec, length=length, wanted=num_masks(length, 0.5), capacity=capacity)
        for metric, value in times.items():
            session.later(report.length_rows, metric, length, value, "ms", session.command(model))


def measure_chunking(session: Session, model: str) -> None:
    """The row of what chunks cost at 32K if they are forced on."""
    chunks = int(session.options["chunks"])
    task = session.task("chunking", model, arm="ours", length=CHUNKING_LENGTH, chunks=chunks)
    answer = session.ask(task)
    if answer is not None:
        cost = answer["chunked_ms"] / answer["whole_ms"] - 1
        made_by = session.command(model)
        session.later(report.length_rows, "chunking_cost", CHUNKING_LENGTH, cost, "share", made_by)


def measure_resizing(session: Session, model: str) -> None:
    """Rows of the share of time that resizing takes, for both arenas."""
    fields = {
        "layers": int(session.options["resize_layers"]),
        "requests": int(session.options["requests"]),
        "lengths": RESIZE_LENGTHS,
        "expandable": True,
    }
    for arena in product.ARENAS:
        task = replace(session.task("resize", model, arm="ours", **fields), arena=arena)
        answer = session.ask(task)
        if answer is not None:
            session.later(report.resize_rows, arena, answer, session.command(model))


PARTS: dict[str, Callable[[Session, str], None]] = {
    "l_max": measure_l_max,
    "step": measure_steps,
    "timeline": measure_timelines,
    "plan": measure_plans,
    "chunking": measure_chunking,
    "resize": measure_resizing,
}

if __name__ == "__main__":
    sys.exit(main())
