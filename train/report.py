"""`report.md` beside the checkpoint: what was trained, how it went (plots), what it writes now.

Generations come from a `Sampler` that the command line passes in, because training never imports the engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idlm.acceptance import tokens_per_forward_branch, tokens_per_forward_cold

PLOT_FOLDER = "report"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """One generation; `verdict` is free text, such as the checker's reason, and empty where nothing judged
    it.
    """

    prompt: str
    response: str
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one decoder reached on the sampled prompts; None where it does not apply. Rates are in [0, 1]."""

    decoder: str
    exact_match: float | None = None
    acceptance_rate: float | None = None
    tokens_per_forward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReport:
    """Samples of the finished checkpoint and what was measured while drawing them."""

    samples: tuple[SampleText, ...] = ()
    measurements: tuple[Measurement, ...] = ()


Sampler = Callable[[Path, int], SampleReport]
"""`(checkpoint directory, number of samples) -> SampleReport`."""


def write_report(
    directory: Path,
    *,
    metrics: Sequence[dict[str, Any]],
    config_yaml: str,
    fingerprint: dict[str, Any],
    facts: dict[str, str],
    samples: SampleReport | None,
) -> Path:
    """Write `report.md` and its plots into `directory`; `facts` are lines of the summary."""
    plots = _plots(directory / PLOT_FOLDER, metrics) if metrics else []
    parts = ["# Training report", _table(("what", "value"), list(facts.items()))]
    for title, name in plots:
        parts += [f"## {title}", f"![{title}]({PLOT_FOLDER}/{name})"]
    if samples is not None:
        parts += _sample_parts(samples)
    parts += ["## Configuration", f"```yaml\n{config_yaml.rstrip()}\n```"]
    parts += ["## Environment", f"```json\n{json.dumps(fingerprint, indent=2)}\n```"]
    path = directory / "report.md"
    aside = path.with_suffix(".tmp")
    aside.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    os.replace(aside, path)
    return path


def expected_tpf(acceptance_J: Sequence[float]) -> dict[str, float]:
    """Tokens per forward that the acceptance by draft position predicts, per rejection strategy."""
    return {"cold": tokens_per_forward_cold(acceptance_J), "branch": tokens_per_forward_branch(acceptance_J)}


def _sample_parts(report: SampleReport) -> list[str]:
    parts = []
    if report.measurements:
        header = ("decoder", "exact match", "acceptance", "tokens per forward")
        rows = [
            (
                item.decoder,
                _percent(item.exact_match),
                _percent(item.acceptance_rate),
                "-" if item.tokens_per_forward is None else f"{item.tokens_per_forward:.2f}",
            )
            for item in report.measurements
        ]
        parts += ["## Measured on held-out prompts", _table(header, rows)]
    if report.samples:
        parts.append("## Sample generations")
    for number, sample in enumerate(report.samples, start=1):
        verdict = f"\n\n{sample.verdict}" if sample.verdict else ""
        parts.append(
            f"{number}. Prompt\n\n{_quoted(sample.prompt)}\n\nResponse\n\n{_quoted(sample.response)}{verdict}"
        )
    return parts


def _plots(folder: Path, metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(title, file name) of every plot that the metrics have something for."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = [record["step"] for record in metrics]
    loss_names = [key for key in metrics[0] if key.endswith("_loss")]
    losses = {key[:-5]: (steps, [record[key] for record in metrics]) for key in loss_names}
    plots = [("Loss of both paths" if len(losses) > 1 else "Loss", "losses.png", losses, "nats per token")]
    drafted = [record for record in metrics if record["acceptance"]]
    if drafted:
        num_positions = max(len(record["acceptance"]) for record in drafted)
        by_position = {}
        for position in range(num_positions):
            known = [record for record in drafted if len(record["acceptance"]) > position]
            by_position[f"draft {position + 1}"] = (
                [record["step"] for record in known],
                [record["acceptance"][position] for record in known],
            )
        plots.append(("Acceptance by draft position", "acceptance.png", by_position, "expected acceptance"))
        forwards = {
            name: ([r["step"] for r in drafted], [expected_tpf(r["acceptance"])[name] for r in drafted])
            for name in ("cold", "branch")
        }
        plots.append(
            ("Tokens per forward that the acceptance predicts", "tpf.png", forwards, "tokens per forward")
        )
    boundaries = [b["step"] for a, b in zip(metrics, metrics[1:], strict=False) if a["stage"] != b["stage"]]
    for title, name, lines, unit in plots:
        _plot(folder / name, lines, title=title, unit=unit, boundaries=boundaries)
    return [(title, name) for title, name, _, _ in plots]


def _plot(
    path: Path,
    lines: dict[str, tuple[list[int], list[float]]],
    *,
    title: str,
    unit: str,
    boundaries: Sequence[int],
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, (steps, values) in lines.items():
        axes.plot(steps, values, label=label, marker="." if len(steps) < 20 else None)
    for step in boundaries:
        axes.axvline(step, color="grey", linestyle=":", linewidth=1)
    axes.set(
        title=title,
        xlabel="optimizer step (dotted: next stage)" if boundaries else "optimizer step",
        ylabel=unit,
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(
        [*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)]
    )


def _quoted(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
