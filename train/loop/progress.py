"""What a run shows while it trains: a progress bar on a terminal, plain lines elsewhere, and `metrics.jsonl`.

Losses are means over all tokens since the last line, which are of one stage; acceptance is the teacher-forced
expectation of the step shown.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from idlm.files.disk import replace_text, translate_disk_errors
from idlm.train.distributed.collectives import all_reduce, highest
from idlm.train.loop.metrics import MetricsWindow, restored
from idlm.train.planning.flops import ModelWork, fed_of, peak_of, train_flops, work_of
from idlm.train.planning.time import span

if TYPE_CHECKING:
    from idlm.cli.progress import FigureBar
    from idlm.train.loop.tracking import Tracker
    from idlm.train.loop.trainer import IdlmTrainer

EVALUATION = "held_out"
"""Marks the records of `metrics.jsonl` that are evaluations."""


def read_metrics(path: Path, *, up_to_step: int | None = None) -> list[dict[str, Any]]:
    """Records of `metrics.jsonl` in order; lines that are none, as a crash may leave one, are ignored."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is int and (up_to_step is None or step <= up_to_step):
            records.append(record)
    return records


class Progress(TrainerCallback, ExportableState):
    """Reports the steps that the trainer calls logged; `attach` gives it the trainer whose steps it reads.

    Between reports nothing here waits for the device. `tracker` gets every record too. What is not reported
    yet is saved in `trainer_state.json`.
    """

    def __init__(self, metrics_path: Path, *, console: Any) -> None:
        self.metrics_path, self.console = metrics_path, console
        self.tracker: Tracker | None = None
        self.trainer: IdlmTrainer | None = None
        self._bar: FigureBar | None = None
        self._task: Any = None
        self._window: MetricsWindow | None = None
        self._gathered: dict[str, Any] | None = None
        self._paused = 0.0
        self._work: ModelWork | None = None
        self._grad_norm: Any = None

    def attach(self, trainer: IdlmTrainer) -> None:
        """Read the steps of `trainer`, and the gradient norms that it clips by."""
        self.trainer = trainer
        self._work = work_of(trainer.model)
        clip = trainer.accelerator.clip_grad_norm_

        def clip_and_keep(*args: Any, **kwargs: Any) -> Any:
            self._grad_norm = clip(*args, **kwargs)
            # transformers waits for DeepSpeed's norm in every step, but only to log what we log ourselves.
            return None if trainer.is_deepspeed_enabled else self._grad_norm

        trainer.accelerator.clip_grad_norm_ = clip_and_keep
        trainer.before_save = self.gather

    def gather(self) -> None:
        """Make `state` that of this step. Collective; waits for the device."""
        assert self._window is not None
        seconds = time.perf_counter() - self._window.start - self._paused
        self._gathered = self._window.gathered(seconds=seconds)

    def state(self) -> dict[str, Any]:
        """What transformers writes with a checkpoint."""
        return {"args": {}, "attributes": {"window": self._gathered}}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside is not training: evaluation, samples."""
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def write(self, record: dict[str, Any]) -> None:
        """Append a record of another kind, with its `step`, to the metrics. On rank 0."""
        self._append(record)
        self._say(f"step {record['step']}  {describe(record)}")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Checkpoints from before windows were saved have no entry, and transformers replaces only entries.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self._window = restored(
            saved["attributes"].get("window"),
            step=state.global_step,
            rank=args.process_index,
            world_size=args.world_size,
            device=args.device,
        )
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
        assert self.trainer is not None and self.trainer.step_losses is not None and self._window is not None
        self._window.add(self.trainer.step_losses)
        if self.trainer.is_logged(state.global_step):
            record = self._record(self._window, state)
            self._window = MetricsWindow(step=state.global_step, start=time.perf_counter())
            self._paused = 0.0
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

    def _record(self, window: MetricsWindow, state: TrainerState) -> dict[str, Any]:
        """Collective: every rank comes here at the same steps."""
        trainer = self.trainer
        assert trainer is not None and trainer.step_losses is not None
        assert window.sums is not None and window.counts is not None
        assert window.num_tokens is not None and window.fed is not None
        step = trainer.step_losses
        overlap = torch.stack([step.overlap_sums, step.overlap_counts])
        for tensor in (window.sums, overlap, window.num_tokens, window.fed):
            all_reduce(tensor)
        means = (window.sums / window.counts.clamp_min(1)).tolist()
        tokens, num_processes = int(window.num_tokens), trainer.args.world_size
        flops = None
        if self._work is not None:
            flops = train_flops(self._work, fed_of(window.fed), trains_clean=step.stage.clean_weight != 0)
        # Read last: everything above has waited for the device.
        seconds = max(time.perf_counter() - window.start - self._paused, 1e-9)
        num_steps = state.global_step - window.step
        rate, peak = tokens / seconds, peak_of(trainer.args.device)
        record = {
            "step": state.global_step,
            "stage": step.stage.index,
            "stride": step.stage.stride,
            **{f"{name}_loss": mean for name, mean in zip(trainer.objective.term_names, means, strict=True)},
            "clean_weight": float(step.weights[-1]),
            "acceptance": [value for value in (overlap[0] / overlap[1]).tolist() if not math.isnan(value)],
            "learning_rate": trainer.optimizer.param_groups[0]["lr"],
            "gradient_norm": None if self._grad_norm is None else float(self._grad_norm),
            "first_item": window.step * trainer.curriculum.global_batch,
            "last_item": state.global_step * trainer.curriculum.global_batch - 1,
            "num_tokens": tokens,
            "seconds": seconds,
            "step_seconds": seconds / num_steps,
            "tokens_per_second": rate,
            "tokens_per_second_per_gpu": rate / num_processes,
        }
        if flops is not None:
            record["tflops_per_gpu"] = flops / seconds / num_processes / 1e12
            if peak is not None:
                record["mfu"] = flops / seconds / num_processes / peak
        if trainer.args.device.type == "cuda":
            record["peak_memory"] = highest(torch.cuda.max_memory_allocated())
        return record

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def _show(self, record: dict[str, Any], state: TrainerState) -> None:
        self._append(record)
        text = describe(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step, text=text)
        else:
            left = span(record["step_seconds"] * (state.max_steps - state.global_step))
            self._say(f"step {record['step']}/{state.max_steps}  {text}  left {left}")

    def _append(self, record: dict[str, Any]) -> None:
        with translate_disk_errors(self.metrics_path), self.metrics_path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self.tracker is not None:
            self.tracker.log(record)

    def _rewrite(self, records: list[dict[str, Any]]) -> None:
        """A resumed run repeats the steps after its checkpoint; their old lines go."""
        replace_text(self.metrics_path, "".join(json.dumps(record) + "\n" for record in records))


def training_records(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of training steps."""
    return [record for record in records if EVALUATION not in record]


def describe(record: dict[str, Any]) -> str:
    """One line of text about a metrics record."""
    parts = ["held out"] if EVALUATION in record else []
    parts += [f"stride {record['stride']}"] if record["stride"] > 1 else []
    parts += [f"{key[:-5]} loss {value:.3f}" for key, value in record.items() if key.endswith("_loss")]
    if record["stride"] > 1 and "clean_weight" in record and "clean_loss" in record:
        parts.append(f"s {record['clean_weight']:.2f}")
    if record["acceptance"]:
        parts.append("acceptance " + " ".join(f"{value:.3f}" for value in record["acceptance"]))
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    return "  ".join(parts)


def _new_bar(console: Any) -> FigureBar:
    from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from idlm.cli.progress import figure_bar

    left = (TextColumn("left"), TimeRemainingColumn())
    return figure_bar(console, MofNCompleteColumn(), TimeElapsedColumn(), *left)
