"""One error for a disk that refuses to write, whichever library failed; exclusive locks on files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from idlm.errors import UserError

DISK_CODE = "IDLM-0301"
"""Code of the UserError for a disk that refuses a file."""
DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
TORCH_TEXTS = ("PytorchStreamWriter failed writing", "inline_container.cc", "iostream error")
FULL_BYTES = 1 << 20
"""A disk with less free than that right after a failed write is full."""
MANIFEST = "manifest.json"
"""Every published directory has this file; see idlm.checkpoint."""
CHECKPOINT_PREFIX = "checkpoint-"
"""Names of the checkpoints of a run, which are siblings, start with this."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
"""Errors of a file system without locks."""
_HELD: dict[Path, int] = {}
"""Descriptors of the locks that this process has taken, by their files."""


@contextmanager
def translate_disk_errors(target: Path, *, written: Path | None = None) -> Iterator[None]:
    """Inside, a full, size-limited or read-only disk raises UserError IDLM-0301 about saving `target`,
    whichever library failed. The message gives the size of `written`, the folder that is being filled."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = _disk_reason(error, target)
        if reason is None:
            raise
        raise cannot_save(target, reason, written=written) from error


def replace_text(target: Path, text: str) -> None:
    """Replace `target` as a whole or leave it unchanged. UserError IDLM-0301 as `translate_disk_errors`."""
    staged = target.with_suffix(f".{os.getpid()}.tmp")
    with translate_disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.write_text(text, encoding="utf-8")
        os.replace(staged, target)


def lock_file(path: Path) -> int | None:
    """Return a descriptor of `path` (created if missing) with its exclusive lock, which ends when the
    descriptor is closed; None while another process holds it or without the folder. OSError with an errno of
    NO_LOCKS on file systems without locks."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            return None
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last owner may have removed the file since it was opened: a lock on it guards nothing.
                is_current = os.path.samestat(os.stat(path), os.fstat(descriptor))
            except FileNotFoundError:
                continue
            except BlockingIOError:
                return None
            if is_current:
                stack.pop_all()
                return descriptor


def take_lock(path: Path, *, of: str) -> str | None:
    """Lock the file `path` until `release_lock`, so that no other run uses `of`. Returns the run that has the
    lock, else None; on a file system without locks too, with a warning. Raises OSError as `lock_file`."""
    try:
        held = lock_file(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn(
            f"the file system of {of} has no locks ({error.strerror}): make sure that no other run uses it",
            stacklevel=5,
        )
        _HELD[path] = os.open(os.devnull, os.O_WRONLY)
        return None
    if held is None:
        with contextlib.suppress(OSError):
            if owner := path.read_text(encoding="utf-8", errors="replace").strip():
                return f"another run ({owner})"
        return "another run"
    started = datetime.now().isoformat(sep=" ", timespec="seconds")
    os.ftruncate(held, 0)
    os.write(held, f"process {os.getpid()} on {socket.gethostname()}, started {started}".encode())
    _HELD[path] = held
    return None


def release_lock(path: Path) -> None:
    """Remove the file of a lock that this process has; a file that a dead process left locks nothing."""
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


# A forked child (a worker that loads data) shares the locks: without this they would outlive a killed run.
os.register_at_fork(after_in_child=_close_in_child)


def cannot_save(target: Path, reason: str, *, written: Path | None = None) -> UserError:
    """Return the error to raise, with the free space and the checkpoint that is intact, if any."""
    done = ""
    if written is not None:
        size = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
        done = f", {_mib(size)} of it were written"
    return UserError(
        DISK_CODE,
        f"cannot save {target}: {reason} ({_mib(_free_bytes(target))} free{done}){_intact(target)}",
        fix="free space or choose another path, then start the same command again",
    )


def _intact(target: Path) -> str:
    """Name the published directory to continue from: the one that `target` would have replaced, or the newest
    checkpoint of the same run."""
    if _is_whole(target):
        return "; what was published there before is intact"
    if not target.name.startswith(CHECKPOINT_PREFIX):
        return ""
    kept = [path for path in target.parent.glob(f"{CHECKPOINT_PREFIX}*") if _is_whole(path)]
    newest = max(kept, key=lambda path: (path / MANIFEST).stat().st_mtime, default=None)
    return "" if newest is None else f"; {newest} is intact"


def _is_whole(directory: Path) -> bool:
    """Return whether every file in the manifest of `directory` exists with its size. Contents are not read:
    `idlm.checkpoint.verify` does that before anything is loaded."""
    try:
        files = json.loads((directory / MANIFEST).read_bytes())["files"]
        return all((directory / name).stat().st_size == entry["size"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _disk_reason(error: Exception, target: Path) -> str | None:
    """Return why the disk refused, or None if the error is not about the disk."""
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        return os.strerror(error.errno)
    # safetensors and tokenizers have their own exception types with the text or the number of the OS error;
    # torch's file writer does not give the cause.
    message = str(error)
    for code in DISK_ERRNOS:
        if os.strerror(code) in message or f"os error {code}" in message:
            return os.strerror(code)
    if not any(text in message for text in TORCH_TEXTS):
        return None
    if isinstance(error.__context__, OSError) and error.__context__.errno is not None:
        return os.strerror(error.__context__.errno)
    if _free_bytes(target) < FULL_BYTES:
        return os.strerror(errno.ENOSPC)
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return os.strerror(errno.EFBIG)
    return "the disk refused to write (a quota?)"


def _free_bytes(target: Path) -> int:
    existing = next((parent for parent in target.parents if parent.is_dir()), Path("/"))
    return shutil.disk_usage(existing).free


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
