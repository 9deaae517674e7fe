"""Atomic publication of a checkpoint directory, and its verification by a sha256 manifest.

A publisher writes into a staging directory next to the target; the directory is hashed, flushed to disk and
swapped in as a whole. A reader finds the old checkpoint or the new one, never a mixture and never nothing.
Layout while publishing: `.<name>.staging-XXXX/{lock, files/}`; the publisher holds `lock` (flock) as long as
it lives, so that the next publisher can tell the leftovers of a dead one from the work of a live one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from idlm.errors import UserError
from idlm.files.disk import DISK_ERRNOS, MANIFEST, NO_LOCKS, cannot_save, lock_file, translate_disk_errors

HASHING_THREADS = 8
FORMAT = "idlm-manifest-1"


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """Yield an empty staging directory; when the body succeeds it becomes `target`, atomically and durably.

    An existing `target` is replaced. Its files that are not in its own manifest (logs, training state) are
    kept; if one of them has the name of a new file, UserError IDLM-0306 is raised. On any exception the
    staging directory is removed and `target` stays as it was. A full, quota-limited or read-only disk raises
    UserError IDLM-0301.
    """
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
                _keep_foreign_files(target, staging)
                _open_to_readers(staging)
                _fsync_tree(staging)
                _swap(root, target)
    except OSError as error:
        if is_staged:
            raise
        raise cannot_save(target, error.strerror or str(error)) from error


def recover(target: Path) -> None:
    """Finish the swap of a publisher that died between its two renames, if there is one."""
    target = Path(target).resolve()
    if os.path.lexists(target):
        return
    for ready in sorted(target.parent.glob(f"{_staging_pattern(target)}/ready")):
        # Another process may finish the same swap at the same time: either is right.
        with contextlib.suppress(FileNotFoundError):
            os.rename(ready, target)
            _fsync(target.parent)
            return


def verify(directory: Path, *, required: bool = True, sealed: bool = False) -> None:
    """Check size and sha256 of every file in the manifest of `directory`, after finishing an interrupted
    swap.

    Mismatches, missing files, links and names outside the directory raise UserError IDLM-0302 with the file.
    A missing manifest is an error unless `required` is False. With `sealed`, files that the manifest does not
    name are errors too; otherwise they are ignored.
    """
    directory = Path(directory)
    recover(directory)
    if not directory.is_dir():
        raise UserError("IDLM-0307", f"there is no checkpoint directory at {directory}", fix="check the path")
    if not os.path.lexists(directory / MANIFEST):
        if required:
            raise _mismatch(directory / MANIFEST, "the file is missing")
        return
    files = _read_manifest(directory)
    if sealed:
        _refuse_strangers(directory, files.keys() | {MANIFEST})
    for name, entry in files.items():
        path = directory / name
        inside = [path, *(parent for parent in path.parents if directory in parent.parents)]
        if any(link.is_symlink() for link in inside):
            raise _mismatch(path, "it is reached through a symbolic link")
        if not path.is_file():
            raise _mismatch(path, "the file is missing")
        size = path.stat().st_size
        if size != entry["size"]:
            raise _mismatch(path, f"it has {size} bytes, the manifest says {entry['size']}")
    for name, digest in zip(files, _sha256_of([directory / name for name in files]), strict=True):
        if digest != files[name]["sha256"]:
            raise _mismatch(directory / name, "its sha256 differs from the manifest")


def clear_stale(directory: Path) -> None:
    """Remove the leftovers of dead publishers in `directory`, after finishing their swaps."""
    names = {path.name[1:].rpartition(".staging-")[0] for path in Path(directory).glob(".*.staging-*")}
    for name in sorted(names):
        recover(Path(directory) / name)
        _remove_stale(Path(directory).resolve() / name)


def _refuse_strangers(directory: Path, known: Set[str]) -> None:
    for path in sorted(directory.rglob("*")):
        if (path.is_symlink() or not path.is_dir()) and path.relative_to(directory).as_posix() not in known:
            raise _mismatch(path, "its manifest does not name this file")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; otherwise UserError IDLM-0303 with file, line and reason."""
    path, fix = Path(path), "restore the file from its source"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("IDLM-0303", f"cannot read {path}: {error.strerror}", fix="check the path") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError("IDLM-0303", f"{path}, line {line}: not UTF-8 text", fix=fix) from error
    except json.JSONDecodeError as error:
        raise UserError("IDLM-0303", f"{path}, line {error.lineno}: {error.msg}", fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise UserError("IDLM-0303", f"{path}: {error}", fix=fix) from error
    if not isinstance(content, dict):
        raise UserError(
            "IDLM-0303", f"{path}, line 1: expected an object, got {type(content).__name__}", fix=fix
        )
    return content


def _read_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    path = directory / MANIFEST
    if path.is_symlink():
        raise _mismatch(path, "it is a symbolic link")
    manifest = read_json(path)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict):
        raise _mismatch(path, f"it is not a manifest of format {FORMAT!r}")
    for name, entry in files.items():
        pure = PurePosixPath(name)
        if not pure.parts or "\0" in name or pure.is_absolute() or ".." in pure.parts or str(pure) != name:
            raise _mismatch(path, f"the name {name!r} is not a plain path inside the checkpoint")
        if not isinstance(entry, dict) or entry.keys() != {"sha256", "size"}:
            raise _mismatch(path, f"its entry for {name!r} is malformed")
    if path.read_text(encoding="utf-8") != _manifest_text(files):
        raise _mismatch(path, "it was altered after publication")
    return files


def _mismatch(path: Path, reason: str) -> UserError:
    return UserError(
        "IDLM-0302",
        f"{path} is not what was published: {reason}",
        fix="copy or download the checkpoint again; never edit it in place",
    )


def _write_manifest(staging: Path) -> None:
    paths = sorted(staging.rglob("*"))
    for path in paths:
        assert not path.is_symlink(), f"a checkpoint holds files, not links: {path=}"
    paths = [path for path in paths if path.is_file()]
    files = {
        path.relative_to(staging).as_posix(): {"sha256": digest, "size": path.stat().st_size}
        for path, digest in zip(paths, _sha256_of(paths), strict=True)
    }
    (staging / MANIFEST).write_text(_manifest_text(files), encoding="utf-8")


def foreign_files(target: Path, names: Iterable[str]) -> list[str]:
    """Return those of `names` that `target` has but not its manifest: `publish` refuses to replace them."""
    ours = _own_files(target)
    return [name for name in names if os.path.lexists(target / name) and target / name not in ours]


def _own_files(target: Path) -> set[Path]:
    if target.is_dir() and (target / MANIFEST).exists():
        return {target / name for name in (MANIFEST, *_read_manifest(target))}
    return set()


def _keep_foreign_files(target: Path, staging: Path) -> None:
    """Hard-link (or copy) the files of `target` that its manifest does not name into `staging`."""
    if not target.exists():
        return
    ours = _own_files(target)
    found = [target] if not target.is_dir() else [path for path in target.rglob("*") if path not in ours]
    clashes = []
    for path in found:
        kept = staging / path.relative_to(target)
        is_directory = path.is_dir() and not path.is_symlink()
        # New files may have the name of the kept one, or of a folder above it.
        names = [] if is_directory else [kept]
        names += [one for one in (kept, *kept.parents) if staging in one.parents and not one.is_dir()]
        if any(map(os.path.lexists, names)):
            clashes.append(str(path))
        elif is_directory:
            kept.mkdir(parents=True, exist_ok=True)
        else:
            kept.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, kept)
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
        _fsync(root)
        os.rename(target, root / "old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(root / "ready", target)
    _fsync(target.parent)
    _fsync(root)


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
        try:
            recover(target)
            shutil.rmtree(root, ignore_errors=True)
        finally:
            os.close(lock)


def _remove_stale(target: Path) -> None:
    for root in target.parent.glob(_staging_pattern(target)):
        try:
            lock = lock_file(root / "lock")
        except OSError:
            continue
        if lock is None:
            continue
        try:
            # The owner may have died in the middle of its swap after the caller looked.
            recover(target)
            shutil.rmtree(root, ignore_errors=True)
        finally:
            os.close(lock)


def _staging_pattern(target: Path) -> str:
    return f".{glob.escape(target.name)}.staging-*"


def _open_to_readers(directory: Path) -> None:
    """Give files the mode of any new file: those of safetensors are readable by their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:
            path.chmod(0o666 & ~mask)


def _fsync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            _fsync(path)
    _fsync(directory)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a directory; their own rename is durable.
        if not (error.errno in (errno.EINVAL, errno.ENOTSUP) and stat.S_ISDIR(os.fstat(descriptor).st_mode)):
            raise
    finally:
        os.close(descriptor)


def _manifest_text(files: dict[str, dict[str, Any]]) -> str:
    # The digest tells a damaged manifest from a damaged file.
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"format": FORMAT, "files": files, "digest": digest}, indent=1) + "\n"


def _sha256_of(paths: list[Path]) -> list[str]:
    """Return digests in the order of `paths`, reading files in parallel: a core reads about 1 GB/s, a disk
    more.
    """
    with ThreadPoolExecutor(max_workers=HASHING_THREADS) as pool:
        return list(pool.map(_sha256, paths))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
