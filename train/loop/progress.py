"""Shows a run while it trains: a progress bar on a terminal, plain lines elsewhere, and `metrics.jsonl`.

Losses are means over all tokens since the last line, whose steps are all of one stage; acceptance is the
teacher-forced expectation of the step shown. Trackers get the same metrics on request."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from idlm.files.disk import replace_text, translate_disk_errors
from idlm.train.config.schema import DECODED
from idlm.train.distributed.collectives import all_reduce, highest
from idlm.train.planning.flops import TokenCounts, peak_flops, span, train_flops, work_of
from idlm.train.step import StepLosses

if TYPE_CHECKING:
    from idlm.cli.progress import FigureBar
    from idlm.train.loop.trainer import IdlmTrainer

log = logging.getLogger(__name__)
HIGH_CLEAN_WEIGHT = 100.0
"""A balanced clean weight above this means that the clean loss is next to nothing."""
EVALUATION = "held_out"
"""Marks the records of `metrics.jsonl` that are evaluations."""


@dataclass(slots=True, kw_only=True)
class MetricsWindow:
    """Sums over the steps after `step`, the last one with a line; `start` [s] on the performance counter.
    `counts` are over all ranks, `sums` and `fed` of this rank; `rate` is that of the step that runs or ran
    last."""

    step: int
    start: float
    counts: Tensor | None = None
    sums: Tensor | None = None
    fed: Tensor | None = None
    rate: float = 0.0

    def add(self, step: StepLosses) -> None:
        for name in ("counts", "sums", "fed"):
            known, new = getattr(self, name), getattr(step, name)
            setattr(self, name, new.clone() if known is None else known + new)


def read_metrics(path: Path, *, up_to_step: int | None = None) -> list[dict[str, Any]]:
    """Records of `metrics.jsonl` in order; a line that is no record, as a crash may leave one, is skipped."""
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


def metrics_record(trainer: IdlmTrainer, window: MetricsWindow, *, gradient_norm: Any) -> dict[str, Any]:
    """The line of the metrics for `window`, which ends with the trainer's last step. Collective."""
    step, names, state = trainer.step.losses, trainer.step.objective.term_names, trainer.state
    assert step is not None and step.weights is not None
    assert window.counts is not None and window.sums is not None and window.fed is not None
    overlap = step.overlap.clone()
    for tensor in (overlap, window.sums, window.fed):
        all_reduce(tensor)
    means = (window.sums / window.counts.clamp_min(1)).tolist()
    acceptance = [value for value in (overlap[0] / overlap[1]).tolist() if not math.isnan(value)]
    fed, num_processes = TokenCounts(*window.fed.tolist()), trainer.args.world_size
    tokens, global_batch = int(fed.document_tokens), trainer.step.curriculum.global_batch
    # Read last: everything above has waited for the device.
    seconds = max(time.perf_counter() - window.start, 1e-9)
    record = {
        "step": state.global_step,
        "stage": step.stage.index,
        "stride": step.stage.stride,
        **{f"{name}_loss": mean for name, mean in zip(names, means, strict=True)},
        "clean_weight": float(step.weights[names.index("clean") if "clean" in names else -1]),
        "acceptance": acceptance,
        "learning_rate": window.rate,
        "gradient_norm": None if gradient_norm is None else float(gradient_norm),
        "first_item": window.step * global_batch,
        "last_item": state.global_step * global_batch - 1,
        "num_tokens": tokens,
        "seconds": seconds,
        "step_seconds": seconds / (state.global_step - window.step),
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_gpu": tokens / seconds / num_processes,
    }
    if (work := work_of(trainer.model)) is not None:
        flops = train_flops(work, fed, trains_clean=step.stage.clean_weight != 0)
        device = trainer.args.device
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        record["tflops_per_gpu"] = flops / seconds / num_processes / 1e12
        if peak is not None:
            record["mfu"] = flops / seconds / num_processes / peak
    if trainer.args.device.type == "cuda":
        record["peak_memory"] = highest(torch.cuda.max_memory_allocated())
    return record


def clean_weight_warning(record: dict[str, Any]) -> str | None:
    """What is wrong with the clean weight of a record of training, which clean_weight=auto alone makes so
    high; None if nothing is."""
    weight, loss = record.get("clean_weight", 0.0), record.get("clean_loss", 0.0)
    if not weight > HIGH_CLEAN_WEIGHT:
        return None
    return (
        f"the balanced clean weight (clean_weight=auto: mask loss / clean loss) is {weight:.0f} at step "
        f"{record['step']}: the clean loss is {loss:.2g} nats, and what is left of it gets as much gradient "
        "as all that masks have to learn. Bound it with train.max_clean_weight=10, or give a number as "
        "clean_weight"
    )


def training_records(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if EVALUATION not in record]


def describe(record: dict[str, Any]) -> str:
    parts = ["held out"] if EVALUATION in record else []
    parts += [f"stride {record['stride']}"] if record["stride"] > 1 else []
    parts += [f"{key[:-5]} loss {value:.3f}" for key, value in record.items() if key.endswith("_loss")]
    if record["stride"] > 1 and "clean_weight" in record and "clean_loss" in record:
        parts.append(f"clean weight {record['clean_weight']:.2f}")
    if record["acceptance"]:
        parts.append("acceptance " + " ".join(f"{value:.3f}" for value in record["acceptance"]))
    parts += [f"{key} {value:.3f}" for key, value in record.items() if key.endswith(DECODED)]
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    return "  ".join(parts)


class Progress(TrainerCallback):
    """Reports the steps that are logged; `attach` gives it the trainer. Between reports nothing here waits
    for the device. `mirrors` get every record too. The first report of a resumed run covers the steps since
    its checkpoint."""

    def __init__(self, metrics_path: Path, *, console: Any) -> None:
        self.metrics_path, self.console = metrics_path, console
        self.mirrors: Sequence[Callable[[dict[str, Any]], None]] = ()
        self.trainer: IdlmTrainer | None = None
        self._bar: FigureBar | None = None
        self._task: Any = None
        self._window = MetricsWindow(step=0, start=0.0)
        self._grad_norm: Any = None
        self._warned: set[int] = set()

    def attach(self, trainer: IdlmTrainer) -> None:
        """Report the steps of `trainer`, and the gradient norms that it clips by."""
        self.trainer = trainer
        clip = trainer.accelerator.clip_grad_norm_

        def clip_and_record(*args: Any, **kwargs: Any) -> Any:
            self._grad_norm = clip(*args, **kwargs)
            # transformers waits for DeepSpeed's norm in every step, but only to log what we log ourselves.
            return None if trainer.is_deepspeed_enabled else self._grad_norm

        trainer.accelerator.clip_grad_norm_ = clip_and_record

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
            record = metrics_record(self.trainer, self._window, gradient_norm=self._grad_norm)
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
        for mirror in self.mirrors:
            mirror(record)


def _new_bar(console: Any) -> FigureBar:
    from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from idlm.cli.progress import figure_bar

    left = (TextColumn("left"), TimeRemainingColumn())
    return figure_bar(console, MofNCompleteColumn(), TimeElapsedColumn(), *left)
