"""The fingerprint of code, software and hardware that is stored with every reported number."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_fingerprint() -> dict[str, Any]:
    """Return the code version, software, hardware and UTC date that a result depends on. Outside a clone,
    `dirty` is None and `commit` that of the unpacked archive, or None."""
    # Imported here, because tools that only read results need not wait for it.
    import torch

    has_gpu = torch.cuda.is_available()
    commit, dirty = _git_state()
    return {
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "triton": version_of("triton"),
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if has_gpu else None,
        "num_gpus": torch.cuda.device_count() if has_gpu else 0,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> tuple[str | None, bool | None]:
    # An installed copy may be inside another repository, whose commit is not ours.
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        return _archived_commit(), None
    status = _git("status", "--porcelain")
    return _git("rev-parse", "HEAD"), None if status is None else bool(status)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _archived_commit() -> str | None:
    """Return the commit that `git archive` wrote into an unpacked archive of the repository."""
    path = ROOT / ".git_archival.txt"
    node = path.read_text(encoding="utf-8").partition("node:")[2].strip() if path.is_file() else ""
    return node if node and not node.startswith("$Format") else None
