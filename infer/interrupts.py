"""Ctrl-C and SIGTERM wait until the engine's records agree with each other."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_is_open = False
"""Whether the main thread is in a block."""


class _Deferred:
    """Signals that wait; `note` is their handler meanwhile. All but the first are delivered at once."""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.is_ending = False
        self._waiting: list[int] = []
        self._num_received, self._pid = 0, os.getpid()

    def note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A process that was forked inside a block never reaches its end.
            self.handlers[number](number, frame)
            return
        self._waiting.append(number)
        self._num_received += 1
        if self._num_received > 1 and not self.is_ending:
            self.deliver()

    def restore(self, number: int) -> None:
        """Put the handler back, unless another one was installed inside."""
        if signal.getsignal(number) == self.note:
            signal.signal(number, self.handlers[number])

    def deliver(self, error: BaseException | None = None) -> None:
        """Call the handlers: to raise a signal again would wake an asyncio loop twice. `error` ended the
        block."""
        while self._waiting:
            number = self._waiting.pop(0)
            try:
                self.handlers[number](number, None)
            except BaseException as raised:
                raise raised from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Deliver a SIGINT or SIGTERM that arrives inside at the end. Every later one is delivered at once,
    because a step can take long. A block takes about 20 us; one inside another takes 2."""
    global _is_open
    if threading.current_thread() is not threading.main_thread() or _is_open:
        yield
        return
    deferred = _Deferred()
    # A handler that raises stops none of the callbacks; they run in reverse order.
    with ExitStack() as end:
        end.push(lambda _, error, __: deferred.deliver(error))
        end.callback(_close)
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            # A signal that is ignored, or ends the process without a handler, need not wait.
            if callable(handler):
                deferred.handlers[number] = handler
                end.callback(deferred.restore, number)
                signal.signal(number, deferred.note)
        _is_open = True
        try:
            yield
        finally:
            deferred.is_ending = True


def _close() -> None:
    global _is_open
    _is_open = False
