"""Ctrl-C in tests. A shell's background job, and some CI, starts with SIGINT ignored; Python then installs no
handler of its own, so a test that sends SIGINT has to ask for one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a terminal; also in processes that are started meanwhile."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
