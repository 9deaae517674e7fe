"""A count of the work that this process has done outside of the training loop.

Long work that the watchdog (train/loop/watchdog.py) must not take for a hang calls `note_progress`; every rank's
watchdog adds the count to its rank's moves. Any thread may call it. Imports nothing.
"""

from __future__ import annotations


class _Progress:
    count = 0


def note_progress() -> None:
    """This process has finished another piece of work."""
    _Progress.count += 1


def progress_count() -> int:
    """How many pieces of work this process has finished so far."""
    return _Progress.count
