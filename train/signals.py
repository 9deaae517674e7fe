"""Stopping on SIGINT and SIGTERM: the step in progress is finished and saved, a second signal ends the
process at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal(TrainerCallback):
    """Inside `listening()`, turns a signal into "save and stop" after the current step; `received` says which
    one.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handlers are process-wide and Python allows them on the main thread only; elsewhere this does
        nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        self._agree(args)
        if self.received is not None:
            control.should_save = True
            control.should_training_stop = True
        return control

    def _agree(self, args: TrainingArguments) -> None:
        """Ranks may hear a signal on different sides of a step; one that stops alone hangs the others."""
        if args.world_size > 1:
            heard = torch.tensor(self.received or 0, device=args.device)
            dist.all_reduce(heard, op=dist.ReduceOp.MAX)
            self.received = int(heard) or None
