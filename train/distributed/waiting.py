"""Work of some ranks for which the others wait at any length, and no watchdog or process group ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from idlm.train.distributed.collectives import highest, raise_together
from idlm.train.loop.liveness import note_progress, progress_count

SECONDS_BETWEEN_SIGNS = 5.0


def while_others_wait(work: Callable[[], None] | None) -> None:
    """Do `work` (None: wait for ranks that have some); UserErrors are raised on all ranks.

    Collective calls at short intervals keep the process group from timing out.
    """
    failures: list[Exception] = []

    def guarded() -> None:
        try:
            if work is not None:
                work()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=guarded, name="open data", daemon=True)
    thread.start()
    heard = -1
    while heard:
        thread.join(timeout=SECONDS_BETWEEN_SIGNS if work is not None else 0.0)
        is_working = work is not None and thread.is_alive()
        before, heard = heard, highest(1 + progress_count() if is_working else 0)
        if not is_working and heard > before:
            # Progress of the rank that this one waits for counts as progress here: it is no hang.
            note_progress()
    # After an unexpected error the other ranks wait here; the watchdog ends them.
    raise_together(failures[0] if failures else None)
