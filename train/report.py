"""`report.md` and `report.html` next to the checkpoint: what was trained, how losses and acceptance went
(plots), and samples.

Samples come from a `Sampler` that the command line passes in, because training never imports the engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from idlm.acceptance import tokens_per_forward_branch, tokens_per_forward_cold
from idlm.files.disk import replace_text, translate_disk_errors
from idlm.fingerprint import run_fingerprint
from idlm.log import num_processes
from idlm.text.markdown import html_page, table
from idlm.train.checkpoint.export import stage_directory
from idlm.train.checkpoint.model_card import drafts_table, run_facts
from idlm.train.checkpoint.resume import REPORT_FILE, RUN_FOLDER, config_text
from idlm.train.config.schema import TrainConfig
from idlm.train.loop.progress import (
    EVALUATION,
    clean_weight_warning,
    describe,
    read_metrics,
    training_records,
)
from idlm.train.planning.estimate import Estimate, estimate_run
from idlm.train.planning.flops import span
from idlm.train.planning.state import size_text
from idlm.train.prepare import Prepared, data_report

PLOT_FOLDER = "report"
LOSS_PLOT, CONVERSION_PLOT, FIGURES_FILE = "losses.svg", "conversion.svg", "figures.json"
HELD_OUT, TRAINED = "held-out prompts", "prompts that were trained on"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """One generation; `verdict` is free text, such as the checker's reason, empty without a checker."""

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
    """Samples and measurements; `problem`: why there are none, `origin`: what the prompts are,
    `conversion`: what changed since the base, with a `text` of Markdown and a figure to `draw`."""

    samples: tuple[SampleText, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    problem: str = ""
    origin: str = HELD_OUT
    conversion: Any = None


Sampler = Callable[[Path, int], SampleReport]
"""`(checkpoint directory, number of samples) -> SampleReport`."""


def report_run(
    config: TrainConfig,
    prepared: Prepared,
    sampler: Sampler | None,
    *,
    seconds: float,
    free: Callable[[], None] = lambda: None,
) -> Path:
    """Report on the published checkpoint, on rank 0. `free` gives the memory of training back."""
    target = Path(config.output_dir)
    records = read_metrics(target / RUN_FOLDER / "metrics.jsonl")
    metrics, curriculum = training_records(records), prepared.curriculum
    facts = {
        **dict(run_facts(config, prepared)),
        "base": config.model.path or "new weights",
        "mask rows": prepared.draft_input,
        "time": f"{seconds:.0f} s in this process, {sum(r['seconds'] for r in metrics):.0f} s of training",
        "document tokens trained": f"{sum(record['num_tokens'] for record in metrics):,}",
        "last metrics": describe(metrics[-1]) if metrics else "none",
    }
    highest = max(metrics, key=lambda record: record.get("clean_weight", 0.0), default={})
    if warning := clean_weight_warning(highest):
        facts["warning"] = warning
    exports = [stage_directory(config.output_dir, stage) for stage in curriculum.stages[:-1]]
    exports = [path.relative_to(target) for path in exports if path.is_dir()]
    if exports:
        facts["stage checkpoints"] = ", ".join(map(str, exports))
    estimate = estimate_run(config, prepared.model, prepared.dataset, curriculum, gpus=num_processes())
    setting = [
        "## Data",
        "\n".join(f"- {line}" for line in data_report(config, prepared).lines()),
        "## Configuration",
        f"```yaml\n{config_text(config).rstrip()}\n```",
        "## Environment",
        f"```json\n{json.dumps(run_fingerprint(), indent=2)}\n```",
    ]
    samples: SampleReport | None = None
    if sampler is not None and (num := config.report.num_samples) > 0:
        print(f"report: {num} answers by each decoder (none: report.num_samples=0)", flush=True)
        free()
        samples = sampler(target, num)
    with translate_disk_errors(target / REPORT_FILE):
        return write_report(target, records, facts, samples, setting=setting, estimate=estimate)


def write_report(
    directory: Path,
    records: Sequence[dict[str, Any]],
    facts: dict[str, str],
    samples: SampleReport | None,
    *,
    setting: Sequence[str] = (),
    estimate: Estimate | None = None,
) -> Path:
    """Write `report.md`, `report.html` and their plots into `directory`; `records`: of `metrics.jsonl`,
    `facts`: lines of the summary, `setting`: the last sections, `estimate`: what the run was expected to
    need."""
    metrics, folder = training_records(records), directory / PLOT_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    plots = plots_of(metrics) if metrics else []
    # Every stage ends with a record, so the boundary is the last step of a stage, not the next logged step.
    boundaries = [a["step"] for a, b in itertools.pairwise(metrics) if a["stage"] != b["stage"]]
    summary = [*facts.items(), *_measured(metrics, estimate)]
    evaluations = [record for record in records if EVALUATION in record]
    parts = ["# Training report", table(("what", "value"), summary)]
    if samples is not None and samples.conversion is not None:
        samples.conversion.draw(folder / CONVERSION_PLOT)
        parts += [samples.conversion.text(), f"![What changed]({PLOT_FOLDER}/{CONVERSION_PLOT})"]
    parts += _held_out_parts(evaluations)
    for plot in plots:
        plot.draw(folder, boundaries)
        parts += [f"## {plot.title}", f"![{plot.title}]({PLOT_FOLDER}/{plot.name})"]
    if samples is not None:
        parts += _sample_parts(samples)
        replace_text(folder / FIGURES_FILE, json.dumps(_figures(samples), indent=2) + "\n")
    text = "\n\n".join([*parts, *setting]) + "\n"
    replace_text((directory / REPORT_FILE).with_suffix(".html"), html_page(text, directory))
    replace_text(directory / REPORT_FILE, text)
    return directory / REPORT_FILE


def _figures(samples: SampleReport) -> dict[str, Any]:
    """What `idlm report` compares, besides the metrics."""
    whole = None if samples.conversion is None else samples.conversion.shifts[0]._asdict()
    return {"clean": whole, "measurements": [asdict(one) for one in samples.measurements]}


def _measured(metrics: Sequence[dict[str, Any]], estimate: Estimate | None) -> list[tuple[str, str]]:
    """Speed and memory, measured and estimated; the first record, a warm-up, counts if it is alone."""
    rows: list[tuple[str, str]] = []
    steady = metrics[1:] or metrics
    seconds = sum(record["seconds"] for record in steady)
    per_gpu = sum(record.get("tokens_per_second_per_gpu", 0) * record["seconds"] for record in steady)
    plan = None if estimate is None else estimate.time
    if seconds and per_gpu:
        rate = f"{per_gpu / seconds:,.0f} document tokens per second and process"
        expected = "" if plan is None else f" (estimated {plan.tokens_per_second_per_gpu:,.0f})"
        rows.append(("speed", rate + expected))
    shares = [(record["mfu"], record["seconds"]) for record in steady if "mfu" in record]
    if shares:
        mean = sum(share * weight for share, weight in shares) / sum(weight for _, weight in shares)
        rows.append(("MFU", f"{mean:.1%} of the data sheet's bf16 rate, recomputation not counted"))
    if plan is not None:
        taken = sum(record["seconds"] for record in metrics)
        rows.append(("time of the steps", f"{span(taken)} (estimated {span(plan.seconds)})"))
    peaks = [record["peak_memory"] for record in metrics if "peak_memory" in record]
    if peaks:
        text = size_text(max(peaks))
        if estimate is not None:
            planned = estimate.memory.peak_allocated
            text += f" (estimated {size_text(planned)}, {planned / max(peaks) - 1:+.1%})"
        rows.append(("peak memory of a GPU", text))
    return rows


def _held_out_parts(evaluations: Sequence[dict[str, Any]]) -> list[str]:
    """The last evaluation of every stage: losses, and acceptance by draft position."""
    if not evaluations:
        return []
    last = {record["stage"]: record for record in evaluations}
    names = [key for key in evaluations[0] if key.endswith("_loss")]
    rows = [([f"{record[name]:.3f}" for name in names], record) for _, record in sorted(last.items())]
    header = [name.replace("_", " ") for name in names]
    note = "Losses in nats per token; acceptance is the expected overlap of draft and verify probabilities."
    return ["## Held-out data at the end of each stage", drafts_table(header, rows), note]


def _sample_parts(report: SampleReport) -> list[str]:
    parts = []
    if report.measurements:
        rows = []
        for item in report.measurements:
            rates = (item.exact_match, item.acceptance_rate)
            forward = "-" if item.tokens_per_forward is None else f"{item.tokens_per_forward:.2f}"
            percents = ("-" if rate is None else f"{100 * rate:.1f} %" for rate in rates)
            rows.append((item.decoder, *percents, forward))
        header = ("decoder", "exact match", "acceptance", "tokens per forward")
        parts += [f"## Measured on {report.origin}", table(header, rows)]
    if report.samples or report.problem:
        parts.append("## Sample generations" + (f" for {report.origin}" if report.samples else ""))
    if report.problem:
        parts.append(f"None: {report.problem}")
    for number, sample in enumerate(report.samples, start=1):
        texts = f"Prompt\n\n{_quoted(sample.prompt)}\n\nResponse\n\n{_quoted(sample.response)}"
        parts.append(f"{number}. {texts}" + (f"\n\n{sample.verdict}" if sample.verdict else ""))
    return parts


Curves = dict[str, tuple[list[int], list[float]]]
"""Steps and values of a plot, by the name of the curve."""


class Plot(NamedTuple):
    title: str
    name: str
    unit: str
    curves: Curves

    def draw(self, folder: Path, boundaries: Sequence[int] = ()) -> None:
        """Write the plot as `name`; `boundaries`: steps that end a stage."""
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for label, (steps, values) in self.curves.items():
            axes.plot(steps, values, label=label, marker="." if len(steps) < 20 else None)
        for step in boundaries:
            axes.axvline(step, color="grey", linestyle=":", linewidth=1)
        steps_label = "optimizer step (dotted: next stage)" if boundaries else "optimizer step"
        axes.set(title=self.title, xlabel=steps_label, ylabel=self.unit)
        # Losses fall by orders of magnitude: on a linear scale the first steps hide all later ones.
        is_loss = self.name == LOSS_PLOT
        if is_loss and any(value > 0 for _, values in self.curves.values() for value in values):
            axes.set_yscale("log", nonpositive="mask")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / self.name)


def plots_of(metrics: Sequence[dict[str, Any]]) -> list[Plot]:
    """Every plot that the records of training have something for."""

    def curve(records: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> Any:
        return [record["step"] for record in records], [value(record) for record in records]

    names = [key for key in metrics[0] if key.endswith("_loss")]
    losses: Curves = {name[:-5]: curve(metrics, itemgetter(name)) for name in names}
    plots = [Plot("Loss of both paths" if len(losses) > 1 else "Loss", LOSS_PLOT, "nats per token", losses)]
    drafted = [record for record in metrics if record["acceptance"]]
    if drafted:
        by_position: Curves = {}
        for position in range(max(len(record["acceptance"]) for record in drafted)):
            known = [record for record in drafted if len(record["acceptance"]) > position]
            values = [record["acceptance"][position] for record in known]
            by_position[f"draft {position + 1}"] = [record["step"] for record in known], values
        title = "Acceptance by draft position"
        plots.append(Plot(title, "acceptance.svg", "expected acceptance", by_position))
        title = "Tokens per forward that the acceptance predicts"
        forwards: Curves = {
            "cold": curve(drafted, lambda record: tokens_per_forward_cold(record["acceptance"])),
            "branch": curve(drafted, lambda record: tokens_per_forward_branch(record["acceptance"])),
        }
        plots.append(Plot(title, "tpf.svg", "tokens per forward", forwards))
    return plots


def _quoted(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
