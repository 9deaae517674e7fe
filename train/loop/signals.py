"""Stopping on SIGINT and SIGTERM: the step in progress is finished and saved, a second signal ends the
process at once.

One keystroke can arrive twice, from the terminal and from the launcher, so a second signal counts only
`ECHO_SECONDS` later. Launchers send SIGKILL some time after their first signal: DeepSpeed after 30 s,
torchrun after TORCH_ELASTIC_SHUTDOWN_TIMEOUT (torch 2.12 and newer). If a step and its save take longer, the
run continues from the checkpoint before.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from idlm.cli.command import Terminated
from idlm.train.distributed.collectives import highest

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 2.0


def ignore_stop_signals() -> None:
    """Ignore SIGINT and SIGTERM in this process. Data workers call this: launchers and terminals signal the
    whole process group, and a run whose workers have died cannot finish its step and save.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopOnSignal(TrainerCallback):
    """Inside `listening()`, saves and stops after the current step when a signal arrives; `received` is its
    number.
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

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> TrainerControl:
        # Ranks may hear a signal on different sides of a step; one that stops alone hangs the others.
        self.received = highest(self.received or 0) or None
        if self.received is not None:
            control.should_save = True
            control.should_training_stop = True
        return control
