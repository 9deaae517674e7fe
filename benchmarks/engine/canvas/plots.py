"""The figures of `benchmarks.memory` in docs/plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import read_rows, save_svg

TIMELINES = "memory_timeline.json"
MODEL, CAP_GIB, SHARE = "llada_8b", 24, 0.5
"""Whose longest canvases are drawn."""
MIB = 1 << 20


def save_timelines(found: Mapping[str, dict[str, Any]], results: Path) -> Path:
    """Add the points of each arm to the file of timelines; those of other arms stay."""
    path = results / TIMELINES
    kept = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    kept |= {arm: {"points": answer["points"]} for arm, answer in found.items() if answer["points"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept) + "\n", "utf-8")
    return path


def draw(results: Path, folder: Path) -> None:
    """Draw the recorded longest canvases, and one timeline per arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5))
    axes, best = figure.add_subplot(), _best_l_max(results)
    axes.barh(list(best), list(best.values()))
    for index, value in enumerate(best.values()):
        axes.annotate(f" {value:,.0f}", (value, index), va="center", fontsize=8)
    title = f"{MODEL}, {CAP_GIB} GiB, prompt share {SHARE}"
    axes.set(xscale="log", xlabel="longest canvas, tokens", title=title)
    save_svg(figure, folder / f"memory_l_max_{MODEL}_{CAP_GIB}gib.svg")
    timelines = json.loads((results / TIMELINES).read_text("utf-8"))
    figure = Figure(figsize=(7, 2 * len(timelines)))
    for index, (arm, line) in enumerate(timelines.items(), start=1):
        axes = figure.add_subplot(len(timelines), 1, index)
        times, sizes = zip(*line["points"], strict=True)
        share = [100 * (time - times[0]) / max(1e-9, times[-1] - times[0]) for time in times]
        axes.fill_between(share, [size / MIB for size in sizes], step="post")
        axes.set(ylabel="MiB alive", title=arm, xlim=(0, 100))
    axes.set_xlabel("percent of a step, 16K tokens")
    figure.tight_layout()
    save_svg(figure, folder / "memory_timelines.svg")


def _best_l_max(results: Path) -> dict[str, float]:
    """The newest L_max by arm, the better allocator."""
    newest: dict[tuple[str, str], float] = {}
    wanted = {"model": MODEL, "cap_gib": CAP_GIB, "prompt_share": SHARE}
    for row in read_rows("memory", results=results):
        is_wanted = row["metric"] == "l_max_tokens" and row["gate_passed"] is not False
        if is_wanted and wanted.items() <= row["case"].items():
            newest[row["case"]["arm"], row["case"]["allocator"]] = row["value"]
    best: dict[str, float] = {}
    for (arm, _), value in newest.items():
        best[arm] = max(best.get(arm, 0), value)
    return dict(sorted(best.items(), key=lambda item: item[1]))
