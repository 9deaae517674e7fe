"""Rows, the printed table and the figures of `benchmarks.memory`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.canvas.models import length_floor, model_spec
from benchmarks.figures import save_svg
from benchmarks.results import read_rows, result_row

BENCH = "memory"
TIMELINES = "memory_timeline.json"
STRONG = ("masked", "compile_masked")
"""The arms of libraries that judge ours: logits of masks only, and no softmax stored."""
OURS = ("paper", "mosaic", "ours")
MIB = 1 << 20
PHYSICAL_SLACK = 64 * MIB
Row = dict[str, Any]


def command_of(models: str, *, is_quick: bool) -> str:
    """The command that a row names; cases of some metrics have no model, so the command tells it."""
    parts = ["python -m benchmarks.memory"]
    parts += [f"models={models}"] if models != "llada_8b" else []
    return " ".join(parts + (["quick=true"] if is_quick else []))


def l_max_rows(found: Mapping[tuple[Any, ...], Row], command: str) -> list[Row]:
    """`l_max_tokens` of answers by (model, cap, share, arm, allocator), with the best strong arm beside ours.

    `ratio` is set for our arms, against the longest canvas of the masked arms at the same model, cap and
    share.
    """
    rows = []
    for (model, cap, share, arm, allocator), answer in found.items():
        others = [
            other["length"]
            for (*place, name, _), other in found.items()
            if place == [model, cap, share] and name in STRONG
        ]
        rows.append(
            result_row(
                BENCH,
                {
                    "model": model,
                    "cap_gib": cap,
                    "prompt_share": share,
                    "arm": arm,
                    "allocator": allocator,
                },
                "l_max_tokens",
                answer["length"],
                "tokens",
                baseline=max(others) if others and arm in OURS else None,
                floor=length_floor(model_spec(model), arm, share, cap),
                command=command,
            )
        )
    return rows


def over_rows(l_max: Iterable[Row], command: str, *, share: float = 0.5) -> list[Row]:
    """`l_max_over`: the L_max of `ours` over the best of each other arm, at one prompt share."""
    best: dict[tuple[str, float, str], float] = {}
    for row in l_max:
        case = row["case"]
        if case["prompt_share"] == share and row["value"] > 0 and row["gate_passed"] is not False:
            key = (case["model"], case["cap_gib"], case["arm"])
            best[key] = max(best.get(key, 0), row["value"])
    return [
        result_row(
            BENCH,
            {"model": model, "cap_gib": cap, "arm": arm},
            "l_max_over",
            best[model, cap, "ours"] / value,
            "x",
            command=command,
        )
        for (model, cap, arm), value in best.items()
        if arm != "ours" and (model, cap, "ours") in best
    ]


def recorded_l_max(rows: Iterable[Row], results: Path) -> list[Row]:
    """The given rows of L_max and the newest recorded ones of other cases of this GPU and commit."""
    current = [row for row in rows if row["metric"] == "l_max_tokens"]
    if not current:
        return []
    newest: dict[str, Row] = {}
    for row in [*read_rows(BENCH, results=results), *current]:
        is_same = all(row[key] == current[0][key] for key in ("gpu", "commit"))
        if row["metric"] == "l_max_tokens" and is_same:
            newest[json.dumps(row["case"], sort_keys=True)] = row
    return list(newest.values())


def step_rows(
    found: Mapping[tuple[Any, ...], float], floors: Mapping[tuple[Any, ...], float | None], command: str
) -> list[Row]:
    """`step_ms` of milliseconds by (model, layers, length, share, arm); floors by the same key less the arm.

    `layers` is None for the whole model. `ratio` is set for our arms, against the faster masked arm.
    """
    rows = []
    for key, value in found.items():
        *place, arm = key
        model, layers, length, share = place
        others = [found[(*place, name)] for name in STRONG if (*place, name) in found]
        case = {"model": model, "length": length, "prompt_share": share, "arm": arm}
        rows.append(
            result_row(
                BENCH,
                case if layers is None else {**case, "layers": layers},
                "step_ms",
                value,
                "ms",
                baseline=min(others) if others and arm in OURS else None,
                floor=floors[tuple(place)],
                command=command,
            )
        )
    return rows


def arm_rows(arm: str, answer: Row, command: str) -> list[Row]:
    """The ratios of one timeline: peak over average, reserved over live, and those of a plan."""

    def row(metric: str, value: float, is_passed: bool | None = None) -> Row:
        return result_row(BENCH, {"arm": arm}, metric, value, "x", gate_passed=is_passed, command=command)

    live: int = answer["planned_live_bytes" if "planned_live_bytes" in answer else "live_bytes"]
    rows = []
    if answer["points"]:
        rows.append(row("peak_over_average", answer["peak_over_average"]))
    if live:
        rows.append(row("reserved_over_live", answer["reserved_bytes"] / live))
    if "planned_bytes" in answer:
        workspace, planned = answer["workspace_bytes"], answer["planned_bytes"]
        rows.append(row("planned_over_live", workspace / live, workspace <= 1.01 * live))
        physical = answer["physical_bytes"]
        is_passed = physical <= 1.01 * planned + PHYSICAL_SLACK
        rows.append(row("physical_over_planned", physical / planned, is_passed))
    return rows


def table(rows: Sequence[Row]) -> str:
    """One line a row: metric, case, value, ratio to the baseline and share of the floor."""
    lines = [("metric", "case", "value", "over baseline", "of floor", "gate")]
    for row in rows:
        case = " ".join(f"{key}={value}" for key, value in row["case"].items())
        gate = {None: "", True: "passed", False: "FAILED"}[row["gate_passed"]]
        numbers = (
            f"{row['value']:,.4g} {row['unit']}"
            if row["value"] < 1e4
            else f"{row['value']:,.0f} {row['unit']}",
            "" if row["ratio"] is None else f"{row['ratio']:.2f}x",
            "" if row["share_of_floor"] is None else f"{row['share_of_floor']:.1%}",
        )
        lines.append((row["metric"], case, *numbers, gate))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def save_timelines(found: Mapping[str, Row], results: Path) -> Path:
    """Add the points of each arm to the file of timelines; those of other arms stay."""
    path = results / TIMELINES
    kept = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    kept |= {arm: {"points": answer["points"]} for arm, answer in found.items() if answer["points"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept) + "\n", "utf-8")
    return path


def draw(results: Path, folder: Path) -> list[Path]:
    """Draw recorded L_max of every model and cap, and one timeline per arm; returns the SVGs."""
    from matplotlib.figure import Figure

    drawn: list[Path] = []
    for (model, cap), best in _best_l_max(results).items():
        figure = Figure(figsize=(7, 3.5))
        axes = figure.add_subplot()
        axes.barh(list(best), list(best.values()))
        for place, value in enumerate(best.values()):
            axes.annotate(f" {value:,.0f}", (value, place), va="center", fontsize=8)
        axes.set(
            xscale="log", xlabel="longest canvas, tokens", title=f"{model}, {cap:g} GiB, prompt share 0.5"
        )
        drawn.append(save_svg(figure, folder / f"memory_l_max_{model}_{cap:g}gib.svg"))
    path = results / TIMELINES
    timelines = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if timelines:
        figure = Figure(figsize=(7, 2 * len(timelines)))
        for place, (arm, line) in enumerate(timelines.items(), start=1):
            axes = figure.add_subplot(len(timelines), 1, place)
            times, sizes = zip(*line["points"], strict=True)
            share = [100 * (time - times[0]) / max(1e-9, times[-1] - times[0]) for time in times]
            axes.fill_between(share, [size / MIB for size in sizes], step="post")
            axes.set(ylabel="MiB alive", title=arm, xlim=(0, 100))
        axes.set_xlabel("percent of a step, 16K tokens")
        figure.tight_layout()
        drawn.append(save_svg(figure, folder / "memory_timelines.svg"))
    return drawn


def _best_l_max(results: Path) -> dict[tuple[str, float], dict[str, float]]:
    """The newest L_max at prompt share 0.5 by model and cap, then by arm; the better allocator."""
    newest: dict[tuple[Any, ...], float] = {}
    for row in read_rows(BENCH, results=results):
        case = row["case"]
        if (
            row["metric"] == "l_max_tokens"
            and case["prompt_share"] == 0.5
            and row["gate_passed"] is not False
        ):
            newest[tuple(case[key] for key in ("model", "cap_gib", "arm", "allocator"))] = row["value"]
    best: dict[tuple[str, float], dict[str, float]] = {}
    for (model, cap, arm, _), value in newest.items():
        arms = best.setdefault((model, cap), {})
        arms[arm] = max(arms.get(arm, 0), value)
    return {place: dict(sorted(arms.items(), key=lambda item: item[1])) for place, arms in best.items()}
