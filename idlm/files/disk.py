"""A disk that refuses to write, told by one error whatever library met it; files that one process holds."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from idlm.errors import UserError

DISK_CODE = "IDLM-0301"
"""Code of the UserError for a disk that does not take a file."""
DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
# safetensors and tokenizers report a full disk through their own exception types, with the text of the OS
# error; torch's file writer says nothing of the cause.
DISK_TEXTS = {
    "No space left on device": errno.ENOSPC,
    "os error 28": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "os error 122": errno.EDQUOT,
    "File too large": errno.EFBIG,
    "os error 27": errno.EFBIG,
    "Read-only file system": errno.EROFS,
}
TORCH_TEXTS = ("PytorchStreamWriter failed writing", "inline_container.cc")
FULL_BYTES = 1 << 20
"""A disk with less free than that right after a failed write is full."""
MANIFEST = "manifest.json"
"""In every published directory; see idlm.checkpoint."""
CHECKPOINT_PREFIX = "checkpoint-"
"""Of the checkpoints of a run, which stand beside each other."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
"""What a file system without locks says."""


@contextmanager
def translate_disk_errors(target: Path, *, written: Path | None = None) -> Iterator[None]:
    """Inside, a full, size-limited or read-only disk raises UserError IDLM-0301 about saving `target`,
    whatever library met it. `written`: the folder that is filled for `target`; its size is told.
    """
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
    """Write `target` whole, or leave it as it was. UserError IDLM-0301 as `translate_disk_errors`."""
    aside = target.with_suffix(".tmp")
    with translate_disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, target)


def lock_file(path: Path) -> int | None:
    """A descriptor of `path`, which is made where it is missing, with its exclusive lock: that ends when the
    descriptor is closed or the process dies, in whatever way. None while another one has it, and where the
    folder has gone.

    Raises OSError with an errno of NO_LOCKS on file systems without locks: there another one may have it.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last owner may have removed the file since it was opened here: the next one makes another,
            # which the lock of this one would not guard.
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def cannot_save(target: Path, reason: str, *, written: Path | None = None) -> UserError:
    """The error to raise, with the space that is left, and what is intact where there is anything."""
    done = "" if written is None else f", {_mib(_size_of(written))} of it were written"
    return UserError(
        DISK_CODE,
        f"cannot save {target}: {reason} ({_mib(_free_bytes(target))} free{done}){_intact(target)}",
        fix="free space or choose another path, then save again",
    )


def _intact(target: Path) -> str:
    """Which published directory there is to go on with: the one that `target` would have replaced, or the
    newest checkpoint of the same run.
    """
    if (target / MANIFEST).is_file():
        return "; what was published there before is intact"
    if not target.name.startswith(CHECKPOINT_PREFIX):
        return ""
    kept = [path.parent for path in target.parent.glob(f"{CHECKPOINT_PREFIX}*/{MANIFEST}")]
    return f"; {max(kept, key=lambda path: path.stat().st_mtime)} is intact" if kept else ""


def _disk_reason(error: Exception, target: Path) -> str | None:
    """Why the disk refused, or None when the error is not about the disk."""
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        return os.strerror(error.errno)
    told = str(error)
    code = next((code for text, code in DISK_TEXTS.items() if text in told), None)
    if code is not None:
        return os.strerror(code)
    if not any(text in told for text in TORCH_TEXTS):
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


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
