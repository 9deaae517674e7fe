"""A thin subclass of transformers' Trainer, whose loop calls `idlm.train.step`; and what stops it.

Hooks used, checked in transformers 5.17 and 5.24: `get_batch_samples` (sees all micro-batches of an optimizer
step), `compute_loss`, `training_step`, `create_scheduler`, `_get_train_sampler` and `get_train_dataloader`,
those for saving in `idlm.train.checkpoint.save`."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers import TrainerCallback, TrainerState

from idlm.cli.command import Terminated
from idlm.devices import free_cached_memory
from idlm.train.checkpoint.save import SavingTrainer
from idlm.train.checkpoint.writer import CheckpointWriter
from idlm.train.config.schema import LoopConfig
from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.distributed.collectives import highest
from idlm.train.distributed.deepspeed import local_part, printing_to_log
from idlm.train.model.attention import forget_clean_keys
from idlm.train.objectives.base import Batch, Losses
from idlm.train.objectives.curriculum import rate_factor
from idlm.train.step import PreviousMeans, TrainingStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 2.0
TIME_UP, SAVE_FAILED = 1, 1000
"""What ranks agree on next to numbers of signals, the least urgent first: no signal that is heard is 1."""
EXIT_SECONDS = 15.0
"""Between the end of a save and the end of the process."""


class IdlmTrainer(SavingTrainer):
    """`objective` has the losses of `train_dataset`."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        args: TrainingArguments,
        train_dataset: PackedDataset,
        objective: Losses,
        attention: str,
        loop: LoopConfig,
        callbacks: list[Any],
    ) -> None:
        self.rate_factor = partial(
            rate_factor,
            curriculum=train_dataset.curriculum,
            schedule=loop.schedule,
            warmup=loop.warmup,
            decay=loop.decay,
        )
        previous = PreviousMeans() if loop.balance == "previous" else None
        if args.deepspeed_plugin is not None:
            from idlm.train.distributed.deepspeed_settings import hold_gradients

            hold_gradients(args.deepspeed_plugin.deepspeed_config, model.parameters())
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            data_collator=collate,
            callbacks=callbacks if previous is None else [previous, *callbacks],
        )
        if self.is_deepspeed_enabled:
            # DeepSpeed prints the memory of a GPU while an engine is made.
            self.accelerator.prepare = printing_to_log(self.accelerator.prepare)
        # Our losses are already divided by the global count: the Trainer must not divide by the accumulation.
        self.model_accepts_loss_kwargs = True
        self.step = TrainingStep(
            model,
            args,
            objective=objective,
            curriculum=train_dataset.curriculum,
            attention=attention,
            log_every=loop.log_every,
            autocast=self.accelerator.autocast,
            previous=previous,
        )
        if previous is not None:
            previous.step = self.step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor]:
        """The micro-batches of one optimizer step, and the supervised tokens per term over all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, torch.zeros(0)
        return batches, self.step.start(self.state.global_step, batches, self._prepare_inputs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        assert not return_outputs
        return self.step.loss(model, inputs)

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Forward and backward pass of one micro-batch; a loss that is not finite ends the run here."""
        guard, engine = self.step.guard, getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        if engine is not None and guard.watch(engine.engine.basic_optimizer):
            self._prepare_engine(engine.engine)
        loss = super().training_step(model, inputs, num_items_in_batch)
        guard.check()
        if engine is not None:
            guard.check_skipped(engine.engine.optimizer)
        return loss

    def _prepare_engine(self, engine: Any) -> None:
        """Fit a new `engine` of DeepSpeed, which exists when training begins, and the step to each other."""
        from idlm.train.distributed.zero2_gradients import shorten

        # What DeepSpeed has read from our configuration or the user's; versions without the key average.
        if not getattr(engine, "gradient_average", True):
            self.step.averaged_ranks = 1
        shorten(engine.optimizer)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The learning rate of each step. DeepSpeed gives its own `optimizer`."""
        made: torch.optim.lr_scheduler.LRScheduler | None = vars(self)["lr_scheduler"]
        if made is None:
            chosen = self.optimizer if optimizer is None else optimizer
            made = torch.optim.lr_scheduler.LambdaLR(chosen, self.rate_factor)
            self.lr_scheduler, self._created_lr_scheduler = made, True
        return made

    def release(self) -> None:
        """Give back the memory of weights, gradients, optimizer and copies; nothing can be trained any more.
        Explicitly, because DeepSpeed's engine outlives its last reference in hooks of autograd."""
        forget_clean_keys(self.model)
        self.step.release()
        for value in (*self.model.parameters(), *self.model.buffers()):
            value.grad = None
            value.data = value.data.new_empty(0)
            local_part(value).data = value.data
        holders = [self.optimizer]
        while hasattr(holders[-1], "optimizer"):
            holders.append(holders[-1].optimizer)
        if self.is_deepspeed_enabled:
            self.model_wrapped.destroy()
        for holder in (*holders, self.writer):
            vars(holder).clear()
        free_cached_memory()

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        # The dataset is already in training order; a random order would undo curriculum and resume.
        return SequentialSampler(self.train_dataset)

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader: DataLoader[Any] = super().get_train_dataloader()
        # accelerate's loader hands out the rows of one that it holds.
        inner = getattr(loader, "base_dataloader", loader)
        inner.worker_init_fn = partial(_start_worker, inner.worker_init_fn)
        atexit.unregister(end_workers)
        atexit.register(end_workers)
        return loader


def _start_worker(seed: Callable[[int], None] | None, worker: int) -> None:
    """Seed a data worker as transformers does, and have it ignore signals, which launchers and terminals send
    to the whole process group: a run whose workers have died cannot finish its step and save."""
    if seed is not None:
        seed(worker)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_workers() -> None:
    """Kill data workers. At the end of a process multiprocessing sends them SIGTERM, which they ignore, and
    waits: a run that failed with its loader still open would never end."""
    # torch's handler would raise that a worker was killed.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


class TimeLimit:
    """Whether `train.max_minutes` are over before another step and a save have ended.

    A step counts as long as the longest one so far, with what is done between steps. A save counts as long as
    the longest of `writer`, and before a first one `assumed_save` seconds; a thread may have to finish the
    save before. `elapsed`: seconds since the process was started."""

    def __init__(
        self,
        minutes: float,
        writer: CheckpointWriter,
        *,
        assumed_save: float,
        elapsed: Callable[[], float] | None = None,
    ) -> None:
        self.seconds, self.writer, self.assumed_save = 60 * minutes, writer, assumed_save
        self.elapsed = elapsed or seconds_since_start
        self._longest = 0.0
        self._last: float | None = None

    def is_over(self) -> bool:
        """Call it once at the end of every step."""
        now = self.elapsed()
        self._longest = max(self._longest, 0.0 if self._last is None else now - self._last)
        self._last = now
        saves = max(self.writer.times, default=self.assumed_save)
        saves *= 2 if self.writer.is_async else 1
        return now + self._longest + saves + EXIT_SECONDS >= self.seconds


class StopRequests(TrainerCallback):
    """Ends the run after the current step, on all ranks: by the error of a save in a thread, and after saving
    when a signal has arrived inside `listening()` (`received` is its number) or the time of `limit` is over.
    A signal while a save runs ends the run with that save: another one would take as long as the training
    that it keeps. A second signal ends the process at once.

    One keystroke can arrive twice, from the terminal and from the launcher, so a second signal counts only
    `ECHO_SECONDS` later. Launchers send SIGKILL some time after their first signal: DeepSpeed after 30 s,
    torchrun after TORCH_ELASTIC_SHUTDOWN_TIMEOUT (torch 2.12 and newer). If a step and its save take longer,
    the run continues from the checkpoint before."""

    def __init__(self, writer: CheckpointWriter | None = None, limit: TimeLimit | None = None) -> None:
        self.writer, self.limit = writer or CheckpointWriter("sync"), limit
        self.received: int | None = None
        self.is_time_up = False
        self._heard_at = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handlers are process-wide and Python allows them on the main thread only; elsewhere this does
        nothing. A signal that is ignored stays ignored: a shell starts background jobs with SIGINT ignored,
        so that a Ctrl-C at the terminal does not stop them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._heard_at = number, now
        elif now - self._heard_at > ECHO_SECONDS:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> Any:
        is_over = self.limit is not None and self.limit.is_over()
        own = SAVE_FAILED if self.writer.has_failed else self.received or (TIME_UP if is_over else 0)
        # Ranks may hear a signal on different sides of a step; one that stops alone hangs the others.
        agreed = highest(own)
        if agreed == SAVE_FAILED:
            self.writer.wait()
        self.is_time_up = agreed == TIME_UP
        # A signal that has arrived meanwhile is for the next step.
        if agreed > TIME_UP:
            self._stop(agreed, control)
            control.should_save = control.should_save or not highest(int(self.writer.is_saving))
        elif agreed:
            control.should_save = control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> Any:
        """A signal that has arrived while training waited for this save."""
        if agreed := highest(self.received or 0):
            self._stop(agreed, control)
        return control

    def _stop(self, number: int, control: Any) -> None:
        if self.received is None:
            # Its own signal may still come, as an echo.
            self._heard_at = time.monotonic()
        self.received, control.should_training_stop = number, True


class PrepareSaves(TrainerCallback):
    """After the first step, which makes the optimizer's state, the writer gets what saves will copy. After
    `StopRequests`: a save that follows at once need not be expected."""

    def __init__(self, trainer: IdlmTrainer) -> None:
        self.trainer: IdlmTrainer | None = trainer

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> Any:
        trainer, self.trainer = self.trainer, None
        if trainer is not None and not control.should_save:
            trainer.expect_saves()
        return control


def seconds_since_start() -> float:
    """Seconds since this process started. Dates do not count: containers may have another one of the boot."""
    started = psutil.Process().create_time() - psutil.boot_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
