"""Counts the work that this process does outside of the training loop.

Long work that the watchdog (train/loop/watchdog.py) must not take for a hang calls `note_progress`; the
watchdog adds the count to its rank's `progress_count`. Any thread may call it. Imports nothing.
"""

from __future__ import annotations

_count = [0]


def note_progress() -> None:
    """Record that this process has finished another piece of work."""
    _count[0] += 1


def progress_count() -> int:
    """The pieces of work that this process has finished so far."""
    return _count[0]
