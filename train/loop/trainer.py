"""A thin subclass of transformers' Trainer, whose loop calls `idlm.train.step`; and how a signal stops it.

Hooks used, checked in transformers 5.17 and 5.23: `get_batch_samples` (sees all micro-batches of an optimizer
step), `compute_loss`, `training_step`, `create_scheduler`, `_get_train_sampler` and `get_train_dataloader`,
those for saving in `idlm.train.checkpoint.save`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers import TrainerCallback, TrainerState

from idlm.cli.command import Terminated
from idlm.train.checkpoint.save import SavingTrainer
from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.distributed.collectives import highest
from idlm.train.objectives.base import Batch, Objective
from idlm.train.objectives.curriculum import rate_factor
from idlm.train.step import PreviousMeans, TrainingStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 2.0


class IdlmTrainer(SavingTrainer):
    """`objective` decides rows and losses; `balance` is one of `train.objectives.curriculum.BALANCES`,
    `schedule` of its SCHEDULES, `decay` as in its `rate_factor`.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        args: TrainingArguments,
        train_dataset: PackedDataset,
        objective: Objective,
        attention: str,
        log_every: int,
        callbacks: list[Any],
        balance: str = "step",
        schedule: str = "cosine",
        decay: float = 0.0,
    ) -> None:
        self.rate_factor = partial(
            rate_factor,
            curriculum=train_dataset.curriculum,
            schedule=schedule,
            warmup=args.warmup_steps,
            decay=decay,
        )
        previous = PreviousMeans() if balance == "previous" else None
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            data_collator=collate,
            callbacks=callbacks if previous is None else [previous, *callbacks],
        )
        # Our losses are already divided by the global count: the Trainer must not divide by the accumulation.
        self.model_accepts_loss_kwargs = True
        self.step = TrainingStep(
            model,
            args,
            objective=objective,
            curriculum=train_dataset.curriculum,
            attention=attention,
            log_every=log_every,
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
        """This rank's share of the step's loss."""
        assert not return_outputs
        return self.step.loss(model, inputs)

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Forward and backward pass of one micro-batch; a loss that is not finite ends the run here."""
        guard, engine = self.step.guard, getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        if engine is not None:
            guard.watch(engine.engine.basic_optimizer)
        loss = super().training_step(model, inputs, num_items_in_batch)
        guard.check()
        if engine is not None:
            guard.check_skipped(engine.engine.optimizer)
        return loss

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

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        # The dataset is already in training order; a random order would undo curriculum and resume.
        return SequentialSampler(self.train_dataset)

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader: DataLoader[Any] = super().get_train_dataloader()
        # accelerate's loader hands out the rows of one that it holds.
        inner = getattr(loader, "base_dataloader", loader)
        inner.worker_init_fn = partial(_start_worker, inner.worker_init_fn)
        return loader


def _start_worker(seed: Callable[[int], None] | None, worker: int) -> None:
    """Prepare a data worker: seed it as transformers does, and ignore signals that are meant for the run.

    Launchers and terminals signal the whole process group, and a run whose workers have died cannot finish
    its step and save.
    """
    if seed is not None:
        seed(worker)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopOnSignal(TrainerCallback):
    """Inside `listening()`, saves and stops after the current step when a signal arrives; `received` is its
    number. A second signal ends the process at once.

    One keystroke can arrive twice, from the terminal and from the launcher, so a second signal counts only
    `ECHO_SECONDS` later. Launchers send SIGKILL some time after their first signal: DeepSpeed after 30 s,
    torchrun after TORCH_ELASTIC_SHUTDOWN_TIMEOUT (torch 2.12 and newer). If a step and its save take longer,
    the run continues from the checkpoint before.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._heard_at = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handlers are process-wide and Python allows them on the main thread only; elsewhere this does
        nothing. A signal that is ignored stays ignored: a shell starts background jobs with SIGINT ignored,
        so that a Ctrl-C at the terminal does not stop them.
        """
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
        # Ranks may hear a signal on different sides of a step; one that stops alone hangs the others.
        self.received = highest(self.received or 0) or None
        if self.received is not None:
            control.should_save = True
            control.should_training_stop = True
        return control
