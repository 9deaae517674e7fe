"""`idlm report RUN [RUN ...]`: runs of idlm-train next to each other, in a table and in overlaid plots.

Modules that import torch are imported inside functions, so that help and mistakes come at once."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from idlm.acceptance import tokens_per_forward_cold
from idlm.cli import command
from idlm.cli.help import CommandHelp
from idlm.config.compose import compose
from idlm.config.schema import option
from idlm.errors import UserError
from idlm.files.disk import replace_text, translate_disk_errors
from idlm.text.markdown import html_page, table


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """`idlm-report`."""

    output: str | None = option("HTML file of the table and plots", "comparison.html", is_path=True)


HELP = CommandHelp.of("idlm-report", CompareConfig)


class Run(NamedTuple):
    """Records of training and of evaluations, and the figures of the report; all may be empty."""

    name: str
    metrics: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]
    figures: Mapping[str, Any]

    def cells(self) -> dict[str, str]:
        """The columns of the table; empty for what is not known."""
        from idlm.train.planning.flops import span

        trained: dict[str, Any] = dict(*self.metrics[-1:])
        held_out: dict[str, Any] = dict(*self.evaluations[-1:])
        acceptance = held_out.get("acceptance") or trained.get("acceptance") or []
        measured = [one for one in self.figures.get("measurements", ()) if one["tokens_per_forward"]]
        clean = self.figures.get("clean")
        return {
            "steps": f"{trained['step']:,}" if trained else "",
            "loss": _losses(trained),
            "held-out loss": _losses(held_out),
            "acceptance by position": " ".join(f"{value:.3f}" for value in acceptance),
            "expected tokens per forward": f"{tokens_per_forward_cold(acceptance):.2f}" if acceptance else "",
            "measured": ", ".join(f"{one['decoder']} {one['tokens_per_forward']:.2f}" for one in measured),
            "clean KL": f"{clean['kl']:.4f}" if clean else "",
            "time": span(sum(record["seconds"] for record in self.metrics)) if self.metrics else "",
        }


def _losses(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{key[:-5]} {record[key]:.3f}" for key in record if key.endswith("_loss"))


def main() -> int:
    return command.run(compare)


def compare(arguments: list[str]) -> int:
    """Run the command; returns the exit status. UserError IDLM-0555 without runs, or with what is none."""
    if command.has_help_flag(arguments):
        return HELP.print(arguments)
    names = [one for one in arguments if Path(one).is_dir() or not ("=" in one or one.startswith("-"))]
    config = compose("report", CompareConfig, [one for one in arguments if one not in names])
    runs = [read_run(name) for name in dict.fromkeys(names)]
    strange = [run.name for run in runs if not (run.metrics or run.figures)]
    if strange or not runs:
        what = f"no run/metrics.jsonl in {', '.join(strange)}" if strange else "no run is given"
        raise UserError("IDLM-0555", what, fix="give output_dir of runs of idlm-train: idlm report RUN ...")
    cells = {run.name: run.cells() for run in runs}
    header = ("run", *cells[runs[0].name])
    rows = [(name, *(value or "-" for value in row.values())) for name, row in cells.items()]
    lacking = {name: [column for column, value in row.items() if not value] for name, row in cells.items()}
    notes = [f"- {name} lacks: {', '.join(columns)}" for name, columns in lacking.items() if columns]
    text = "\n\n".join(["# Comparison of runs", table(header, rows), *(["\n".join(notes)] if notes else [])])
    print(text)
    if config.output is not None:
        with translate_disk_errors(Path(config.output)), tempfile.TemporaryDirectory() as folder:
            names = _draw(runs, Path(folder))
            figures = "\n\n".join(f"![{name}]({name})" for name in names)
            replace_text(Path(config.output), html_page(f"{text}\n\n{figures}\n", Path(folder)))
        print(f"\nplots: {config.output}")
    return 0


def read_run(name: str) -> Run:
    from idlm.train.checkpoint.resume import RUN_FOLDER
    from idlm.train.loop.progress import EVALUATION, read_metrics, training_records
    from idlm.train.report import FIGURES_FILE, PLOT_FOLDER

    records = read_metrics(Path(name) / RUN_FOLDER / "metrics.jsonl")
    figures = Path(name) / PLOT_FOLDER / FIGURES_FILE
    known = json.loads(figures.read_text(encoding="utf-8")) if figures.is_file() else {}
    return Run(name, training_records(records), [one for one in records if EVALUATION in one], known)


def _draw(runs: Sequence[Run], folder: Path) -> list[str]:
    """Draw the curves of all runs over each other; returns the names of the plots."""
    from idlm.train.report import Plot, plots_of

    merged: dict[str, Plot] = {}
    for run in runs:
        for plot in plots_of(run.metrics) if run.metrics else ():
            known = merged.setdefault(plot.name, plot._replace(curves={}))
            known.curves.update({f"{run.name} {label}": curve for label, curve in plot.curves.items()})
    for plot in merged.values():
        plot.draw(folder)
    return list(merged)


if __name__ == "__main__":
    sys.exit(main())
