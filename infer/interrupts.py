"""Ctrl-C and SIGTERM wait until the engine's records agree with each other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_is_open = False
"""Whether the main thread is in a block."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Deliver a SIGINT or SIGTERM that arrives inside at the end. A second one is delivered at once, because
    a step that compiles kernels or waits for a GPU can take long.

    Only the main thread receives signals. A block takes about 20 us; one inside another takes 2.
    """
    global _is_open
    if threading.current_thread() is not threading.main_thread() or _is_open:
        yield
        return
    received: list[int] = []
    handlers: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1 or not _is_open:
            deliver()

    def deliver() -> None:
        # To raise a signal again would wake an asyncio loop a second time.
        while received:
            number = received.pop(0)
            handlers[number](number, None)

    try:
        _is_open = True
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            # A signal that is ignored, or ends the process without a handler, need not wait.
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, note)
        yield
    finally:
        _is_open = False
        for replaced, handler in handlers.items():
            signal.signal(replaced, handler)
        deliver()
