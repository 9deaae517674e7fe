"""One run per output_dir: rank 0 holds a file lock for the life of the run.

The lock file lies next to output_dir, because publishing replaces output_dir itself. The kernel releases the
lock when the process ends, also by a crash; a file that a dead process left blocks no run. It holds the name
of its owner."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from idlm.errors import UserError
from idlm.files.disk import NO_LOCKS, cannot_save, lock_file
from idlm.train.distributed.collectives import from_rank_zero

log = logging.getLogger(__name__)
_HELD: dict[Path, int] = {}
"""Descriptors of the locks of this process, by their files."""


@contextlib.contextmanager
def exclusive_output(output_dir: str) -> Iterator[None]:
    """Inside, no other run may use `output_dir`; UserError IDLM-0525 on all ranks while one does. Collective.

    A file system without locks gets a warning."""
    path = lock_path(output_dir)
    from_rank_zero(lambda: _lock(path, output_dir))
    try:
        yield
    finally:
        held = _HELD.pop(path, None)
        if held is not None:
            # Before the lock is released: afterwards another run may own the file.
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(held)


def _close_in_child() -> None:
    for descriptor in _HELD.values():
        os.close(descriptor)
    _HELD.clear()


# A forked child (a worker that loads data) shares the lock: without this it would outlive a killed run.
os.register_at_fork(after_in_child=_close_in_child)


def lock_path(output_dir: str) -> Path:
    target = Path(output_dir).resolve()
    return target.with_name(f".{target.name}.lock")


def _lock(path: Path, output_dir: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = lock_file(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise cannot_save(path, error.strerror or str(error)) from error
        log.warning("%s: %s; see to it that no other run uses this output_dir", path, error.strerror)
        return
    if held is None:
        raise UserError(
            "IDLM-0525",
            f"{_owner(path)} is running in output_dir={output_dir}",
            fix="wait for its end or stop it, or give another output_dir",
        )
    os.ftruncate(held, 0)
    started = datetime.now().isoformat(sep=" ", timespec="seconds")
    os.write(held, f"process {os.getpid()} on {socket.gethostname()}, started {started}".encode())
    _HELD[path] = held


def _owner(path: Path) -> str:
    with contextlib.suppress(OSError):
        owner = path.read_text(encoding="utf-8", errors="replace").strip()
        if owner:
            return f"another idlm-train ({owner})"
    return "another idlm-train"
