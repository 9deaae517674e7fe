"""Shows a run while it trains: a progress bar on a terminal, plain lines elsewhere, and `metrics.jsonl`."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState

from idlm.files.disk import replace_text, translate_disk_errors
from idlm.train.loop.metrics import (
    MetricsWindow,
    clean_weight_warning,
    describe,
    metrics_record,
    read_metrics,
)
from idlm.train.planning.flops import ModelWork, span, work_of

if TYPE_CHECKING:
    from idlm.cli.progress import FigureBar
    from idlm.train.loop.metrics import WandbTracker
    from idlm.train.loop.trainer import IdlmTrainer


log = logging.getLogger(__name__)


class Progress(TrainerCallback):
    """Reports the steps that are logged; `attach` gives it the trainer. Between reports nothing here waits
    for the device. `tracker` gets every record too. The first report of a resumed run covers the steps since
    its checkpoint."""

    def __init__(self, metrics_path: Path, *, console: Any) -> None:
        self.metrics_path, self.console = metrics_path, console
        self.tracker: WandbTracker | None = None
        self.trainer: IdlmTrainer | None = None
        self._bar: FigureBar | None = None
        self._task: Any = None
        self._window = MetricsWindow(step=0, start=0.0)
        self._work: ModelWork | None = None
        self._grad_norm: Any = None
        self._warned: set[int] = set()

    def attach(self, trainer: IdlmTrainer) -> None:
        """Report the steps of `trainer`, and the gradient norms that it clips by."""
        self.trainer = trainer
        self._work = work_of(trainer.model)
        clip = trainer.accelerator.clip_grad_norm_

        def clip_and_keep(*args: Any, **kwargs: Any) -> Any:
            self._grad_norm = clip(*args, **kwargs)
            # transformers waits for DeepSpeed's norm in every step, but only to log what we log ourselves.
            return None if trainer.is_deepspeed_enabled else self._grad_norm

        trainer.accelerator.clip_grad_norm_ = clip_and_keep

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside is not counted as training: evaluation, which may draw bars of its own."""
        start = time.perf_counter()
        with contextlib.nullcontext() if self._bar is None else self._bar.hidden():
            yield
        self._window.start += time.perf_counter() - start

    def write(self, record: dict[str, Any]) -> None:
        """Append a record of another kind, with its `step`, to the metrics. On rank 0."""
        self._append(record)
        self._report_line(f"step {record['step']}  {describe(record)}")

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._window = MetricsWindow(step=state.global_step, start=time.perf_counter())
        if not state.is_world_process_zero:
            return
        if self.metrics_path.exists():
            # A resumed run repeats the steps after its checkpoint; their old lines go.
            kept = read_metrics(self.metrics_path, up_to_step=state.global_step)
            replace_text(self.metrics_path, "".join(json.dumps(record) + "\n" for record in kept))
        if self.console.is_terminal:
            self._bar = _new_bar(self.console)
            self._task = self._bar.add_task(
                "training", total=state.max_steps, completed=state.global_step, text=""
            )
            self._bar.start()

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        # When the step ends, the optimizer has the rate of the next one already.
        self._window.rate = self.trainer.optimizer.param_groups[0]["lr"]

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None and self.trainer.step.losses is not None
        step = self.trainer.step.losses
        self._window.add(step)
        if step.is_logged:
            record = metrics_record(
                self.trainer, self._window, work=self._work, gradient_norm=self._grad_norm
            )
            self._window = MetricsWindow(step=state.global_step, start=time.perf_counter())
            if state.is_world_process_zero:
                self._show(record, state)
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing the bar; needed when training ends by an exception. Further calls change nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _report_line(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def _show(self, record: dict[str, Any], state: TrainerState) -> None:
        self._append(record)
        warning = clean_weight_warning(record)
        if warning is not None and record["stage"] not in self._warned:
            self._warned.add(record["stage"])
            log.warning("%s", warning)
        text = describe(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step, text=text)
        else:
            left = span(record["step_seconds"] * (state.max_steps - state.global_step))
            self._report_line(f"step {record['step']}/{state.max_steps}  {text}  left {left}")

    def _append(self, record: dict[str, Any]) -> None:
        with translate_disk_errors(self.metrics_path), self.metrics_path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self.tracker is not None:
            self.tracker.log(record)


def _new_bar(console: Any) -> FigureBar:
    from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from idlm.cli.progress import figure_bar

    left = (TextColumn("left"), TimeRemainingColumn())
    return figure_bar(console, MofNCompleteColumn(), TimeElapsedColumn(), *left)
