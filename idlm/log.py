"""Logs of one process of many: rank 0 logs everything, other ranks only warn; and a count of
finished work, by which others see that it does not hang."""

from __future__ import annotations

import logging
import os
import sys

_progress = [0]


def rank() -> int:
    """Return the rank that the launcher set (torchrun, DeepSpeed, SLURM); 0 without a launcher."""
    for variable in ("RANK", "SLURM_PROCID"):
        value = os.environ.get(variable, "")
        if value.isdigit():
            return int(value)
    return 0


def num_processes() -> int:
    """Return the number of processes that torchrun or DeepSpeed started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_local_processes() -> int:
    """Return how many of them run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or num_processes())


def get_logger(name: str = "idlm") -> logging.Logger:
    """Return a logger under `idlm` for stderr: INFO on rank 0 (or IDLM_LOG_LEVEL), WARNING elsewhere."""
    root = logging.getLogger("idlm")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        prefix = "" if rank() == 0 else f"[rank {rank()}] "
        handler.setFormatter(logging.Formatter(f"{prefix}%(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
        root.setLevel(os.environ.get("IDLM_LOG_LEVEL", "INFO").upper() if rank() == 0 else logging.WARNING)
        root.propagate = False
    return root if name == "idlm" else root.getChild(name.removeprefix("idlm."))


def note_progress() -> None:
    """Record another piece of finished work outside of the training loop, which the watchdog
    (train/loop/watchdog.py) must not take for a hang. Any thread may call it."""
    _progress[0] += 1


def progress_count() -> int:
    """The pieces of work that this process has recorded so far."""
    return _progress[0]
