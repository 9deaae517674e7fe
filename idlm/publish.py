"""Atomic publication of a checkpoint directory, with a sha256 manifest that `idlm.checkpoint.verify` reads.

A publisher writes into a staging directory next to the target; the directory is hashed, flushed to disk and
swapped in as a whole. A reader gets the old checkpoint or the new one, never a mixture and never nothing.
The publisher holds a lock (flock) in its staging directory as long as it lives, so that the next publisher
can distinguish the leftovers of a dead one from the work of a live one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from idlm.checkpoint import fsync, manifest_text, own_files, recover, sha256_of, staging_pattern
from idlm.errors import UserError
from idlm.files.disk import DISK_ERRNOS, MANIFEST, NO_LOCKS, cannot_save, lock_file, translate_disk_errors


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """Yield an empty staging directory; when the body succeeds it becomes `target`, atomically and durably.

    An existing `target` is replaced. Its files that are not in its own manifest (logs, training state) are
    retained; if one of them has the name of a new file, UserError IDLM-0306 is raised. On any exception the
    staging directory is removed and `target` stays as it was. A full, quota-limited or read-only disk raises
    UserError IDLM-0301."""
    target = Path(target).resolve()
    is_staged = False
    try:
        with translate_disk_errors(target), contextlib.ExitStack() as stack:
            target.parent.mkdir(parents=True, exist_ok=True)
            recover(target)
            _remove_stale(target)
            root = stack.enter_context(_staging_root(target))
            staging = root / "files"
            os.mkdir(staging)
            is_staged = True
            # Translate while the staging directory still exists, so that the message gives its size.
            with translate_disk_errors(target, written=staging):
                yield staging
                _write_manifest(staging)
                _copy_foreign_files(target, staging)
                _open_to_readers(staging)
                _fsync_tree(staging)
                _swap(root, target)
    except OSError as error:
        if is_staged:
            raise
        raise cannot_save(target, error.strerror or str(error)) from error


def clear_stale(directory: Path) -> None:
    """Remove the leftovers of dead publishers in `directory`, after finishing their swaps."""
    names = {path.name[1:].rpartition(".staging-")[0] for path in Path(directory).glob(".*.staging-*")}
    for name in sorted(names):
        recover(Path(directory) / name)
        _remove_stale(Path(directory).resolve() / name)


def _write_manifest(staging: Path) -> None:
    paths = sorted(staging.rglob("*"))
    for path in paths:
        assert not path.is_symlink(), f"a checkpoint holds files, not links: {path=}"
    paths = [path for path in paths if path.is_file()]
    files = {
        path.relative_to(staging).as_posix(): {"sha256": digest, "size": path.stat().st_size}
        for path, digest in zip(paths, sha256_of(paths), strict=True)
    }
    (staging / MANIFEST).write_text(manifest_text(files), encoding="utf-8")


def _copy_foreign_files(target: Path, staging: Path) -> None:
    """Hard-link (or copy) the files of `target` that its manifest does not name into `staging`."""
    if not target.exists():
        return
    ours = own_files(target)
    found = [target] if not target.is_dir() else [path for path in target.rglob("*") if path not in ours]
    clashes = []
    for path in found:
        copied = staging / path.relative_to(target)
        is_directory = path.is_dir() and not path.is_symlink()
        # New files may have the name of the copied one, or of a folder above it.
        names = [] if is_directory else [copied]
        names += [one for one in (copied, *copied.parents) if staging in one.parents and not one.is_dir()]
        if any(map(os.path.lexists, names)):
            clashes.append(str(path))
        elif is_directory:
            copied.mkdir(parents=True, exist_ok=True)
        else:
            copied.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, copied)
    if clashes:
        raise UserError(
            "IDLM-0306",
            f"saving to {target} would overwrite what idlm did not write: {', '.join(clashes[:5])}",
            fix="choose another path, or move these files away",
        )


def _link_or_copy(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError as error:
        if error.errno in DISK_ERRNOS:
            raise
        shutil.copy2(source, copy, follow_symlinks=False)


def _swap(root: Path, target: Path) -> None:
    """Replace `target` by `root/files`. The old directory, if any, ends up inside `root`."""
    staging = root / "files"
    if not target.exists():
        os.rename(staging, target)
    elif not _exchange(staging, target):
        # From here to the last rename a crash leaves `ready`, from which `recover` finishes.
        os.rename(staging, root / "ready")
        fsync(root)
        os.rename(target, root / "old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(root / "ready", target)
    fsync(target.parent)
    fsync(root)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two paths in one atomic step; False if the kernel, C library or file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    at_cwd, exchange_flag = -100, 2
    if renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange_flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))


@contextmanager
def _staging_root(target: Path) -> Iterator[Path]:
    """Yield a fresh locked directory next to `target`; remove it at the end, once the swap is finished."""
    lock = None
    while lock is None:
        root = target.parent / f".{target.name}.staging-{secrets.token_hex(4)}"
        try:
            os.mkdir(root)
            lock = lock_file(root / "lock")
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            lock = os.open(root, os.O_RDONLY)
        finally:
            if lock is None:
                shutil.rmtree(root, ignore_errors=True)
    try:
        yield root
    finally:
        _discard(root, target, lock)


def _discard(root: Path, target: Path, lock: int) -> None:
    """Remove a staging directory. Its owner may have died in the middle of its swap, which is finished."""
    try:
        recover(target)
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(lock)


def _remove_stale(target: Path) -> None:
    for root in target.parent.glob(staging_pattern(target)):
        try:
            lock = lock_file(root / "lock")
        except OSError:
            continue
        if lock is not None:
            _discard(root, target, lock)


def _open_to_readers(directory: Path) -> None:
    """Give files the mode of any new file, as the manifest is one: those of safetensors are readable by their
    owner alone."""
    mode = (directory / MANIFEST).stat().st_mode & 0o666
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:
            path.chmod(mode)


def _fsync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            fsync(path)
    fsync(directory)
