"""What a run shows while it trains: a progress bar on a terminal, plain lines elsewhere, and `metrics.jsonl`.

Losses are means over all tokens since the last line; acceptance is the teacher-forced expectation of the step
shown.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from idlm.train.trainer import all_reduce

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from idlm.train.trainer import IdlmTrainer


def read_metrics(path: Path, *, up_to_step: int | None = None) -> list[dict[str, Any]]:
    """Records of `metrics.jsonl` in order; a torn last line, which a crash may leave, is ignored."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if up_to_step is None or record["step"] <= up_to_step:
            records.append(record)
    return records


class Progress(TrainerCallback):
    """Reports every `log_every` steps; `attach` gives it the trainer whose steps it reads."""

    def __init__(self, metrics_path: Path, *, log_every: int, console: Any) -> None:
        self.metrics_path, self.log_every, self.console = metrics_path, log_every, console
        self.trainer: IdlmTrainer | None = None
        self._bar: Bar | None = None
        self._task: Any = None
        self._sums: Tensor | None = None
        self._counts: Tensor | None = None
        self._tokens: Tensor | None = None
        self._window_start = 0.0

    def attach(self, trainer: IdlmTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._window_start = time.perf_counter()
        if not state.is_world_process_zero:
            return
        kept = read_metrics(self.metrics_path, up_to_step=state.global_step)
        self._rewrite(kept)
        if self.console.is_terminal:
            self._bar = _new_bar(self.console)
            self._task = self._bar.add_task(
                "training", total=state.max_steps, completed=state.global_step, text=""
            )
            self._bar.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._accumulate()
        is_first = self.trainer is not None and state.global_step == 1
        if is_first or state.global_step % self.log_every == 0 or state.global_step == state.max_steps:
            record = self._record(state)
            if state.is_world_process_zero:
                self._show(record, state)
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back; safe to call again, and needed when training ends by an exception."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _accumulate(self) -> None:
        assert self.trainer is not None and self.trainer.step_losses is not None
        step = self.trainer.step_losses
        if self._sums is None or self._counts is None or self._tokens is None:
            self._sums, self._counts, self._tokens = (
                step.sums.clone(),
                step.counts.clone(),
                step.num_tokens.clone(),
            )
        else:
            self._sums += step.sums
            self._counts += step.counts
            self._tokens += step.num_tokens

    def _record(self, state: TrainerState) -> dict[str, Any]:
        """Collective: every rank comes here at the same steps."""
        assert self.trainer is not None and self.trainer.step_losses is not None
        assert self._sums is not None and self._counts is not None and self._tokens is not None
        step = self.trainer.step_losses
        overlap = torch.stack([step.overlap_sums, step.overlap_counts])
        tokens = self._tokens.clone()
        for tensor in (self._sums, overlap, tokens):
            all_reduce(tensor)
        means = (self._sums / self._counts.clamp_min(1)).tolist()
        seconds = time.perf_counter() - self._window_start
        names = self.trainer.objective.term_names
        self._sums = self._counts = self._tokens = None
        self._window_start = time.perf_counter()
        return {
            "step": state.global_step,
            "stage": step.stage.index,
            "stride": step.stage.stride,
            **{f"{name}_loss": mean for name, mean in zip(names, means, strict=True)},
            "clean_weight": float(step.weights[-1]),
            "acceptance": [value for value in (overlap[0] / overlap[1]).tolist() if not math.isnan(value)],
            "learning_rate": self.trainer.optimizer.param_groups[0]["lr"],
            "num_tokens": int(tokens),
            "seconds": seconds,
            "tokens_per_second": int(tokens) / seconds,
        }

    def _show(self, record: dict[str, Any], state: TrainerState) -> None:
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        text = describe(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step, text=text)
        else:
            self.console.print(
                f"step {record['step']}/{state.max_steps}  {text}", highlight=False, soft_wrap=True
            )

    def _rewrite(self, records: list[dict[str, Any]]) -> None:
        """A resumed run repeats the steps after its checkpoint; their old lines go."""
        self.metrics_path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.metrics_path.with_suffix(".tmp")
        aside.write_text("".join(json.dumps(record) + "\n" for record in records))
        os.replace(aside, self.metrics_path)


def describe(record: dict[str, Any]) -> str:
    """One line of text about a metrics record."""
    parts = [f"stride {record['stride']}"] if record["stride"] > 1 else []
    parts += [f"{key[:-5]} loss {value:.3f}" for key, value in record.items() if key.endswith("_loss")]
    if record["stride"] > 1:
        parts.append(f"s {record['clean_weight']:.2f}")
    if record["acceptance"]:
        parts.append("acceptance " + " ".join(f"{value:.3f}" for value in record["acceptance"]))
    return "  ".join([*parts, f"{record['tokens_per_second']:,.0f} tok/s"])


def _new_bar(console: Any) -> Bar:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
    )
