"""A disk that refuses to write, told by one error whatever library met it; files that one process holds."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from idlm.errors import UserError

DISK_CODE = "IDLM-0301"
"""Code of the UserError for a disk that does not take a file."""
DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
# safetensors, tokenizers and torch's file writer report a full disk through their own exception types; the
# first two with the text of the OS error, torch with a complaint about its position in the file.
DISK_TEXTS = (
    "No space left on device",
    "os error 28",
    "Disk quota exceeded",
    "os error 122",
    "File too large",
    "os error 27",
    "Read-only file system",
    "PytorchStreamWriter failed writing",
    "inline_container.cc",
)
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
"""What a file system without locks says."""


@contextmanager
def telling_of_disk(target: Path) -> Iterator[None]:
    """Inside, a full, size-limited or read-only disk raises UserError IDLM-0301 about saving `target`,
    whatever library met it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = _disk_reason(error)
        if reason is None:
            raise
        raise cannot_save(target, reason) from error


def replace_text(target: Path, text: str) -> None:
    """Write `target` whole, or leave it as it was. UserError IDLM-0301 as `telling_of_disk`."""
    aside = target.with_suffix(".tmp")
    with telling_of_disk(target):
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


def cannot_save(target: Path, reason: str) -> UserError:
    """The error to raise, with the space that is left."""
    return UserError(
        DISK_CODE,
        f"cannot save {target}: {reason} ({_free_space(target)} free); an old checkpoint is intact",
        fix="free space or choose another path, then save again",
    )


def _disk_reason(error: Exception) -> str | None:
    """Why the disk refused, or None when the error is not about the disk."""
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        return error.strerror or str(error)
    return str(error) if any(text in str(error) for text in DISK_TEXTS) else None


def _free_space(target: Path) -> str:
    existing = next((parent for parent in target.parents if parent.is_dir()), Path("/"))
    return f"{shutil.disk_usage(existing).free / 2**20:,.0f} MiB"
