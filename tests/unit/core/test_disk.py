"""What a user reads of a disk that refuses a file: cause, space, and what is intact."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from idlm.errors import UserError
from idlm.files import disk
from idlm.files.disk import lock_file, translate_disk_errors
from idlm.publish import publish

NO_SPACE = "No space left on device"


def save(target: Path) -> None:
    with publish(target) as staging:
        (staging / "model.bin").write_bytes(b"x" * 2**20)


def reported_for(target: Path, error: Exception) -> str:
    with pytest.raises(UserError, match="IDLM-0301") as caught, publish(target) as staging:
        (staging / "model.bin").write_bytes(b"x" * 3 * 2**20)
        raise error
    return caught.value.message


def test_an_old_checkpoint_is_named_only_where_there_is_one(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, NO_SPACE)
    output, first, second = (tmp_path / name for name in ("out", "checkpoint-4", "checkpoint-8"))
    assert "intact" not in reported_for(output, full)
    assert "intact" not in reported_for(second, full)
    save(first)
    assert f"{first} is intact" in reported_for(second, full)
    assert "intact" not in reported_for(output, full), "a neighbour is no checkpoint of this one"
    save(output)
    assert "what was published there before is intact" in reported_for(output, full)


@pytest.mark.parametrize("damage", ["short", "missing", "manifest"])
def test_a_damaged_checkpoint_is_not_called_intact(tmp_path: Path, damage: str) -> None:
    full, older, newer = OSError(errno.ENOSPC, NO_SPACE), tmp_path / "checkpoint-4", tmp_path / "checkpoint-8"
    save(older)
    save(newer)
    if damage == "short":
        os.truncate(newer / "model.bin", 7)
    elif damage == "missing":
        (newer / "model.bin").unlink()
    else:
        (newer / "manifest.json").write_text("[")
    assert f"{older} is intact" in reported_for(tmp_path / "checkpoint-12", full)
    assert "intact" not in reported_for(tmp_path / "out", full)


def test_the_error_has_the_cause_the_path_and_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space is measured before the half-written files are removed, which frees theirs."""

    def usage(path: Path) -> SimpleNamespace:
        is_staged = any(tmp_path.glob(".out.staging-*/files/model.bin"))
        return SimpleNamespace(free=0 if is_staged else 3 * 2**20)

    monkeypatch.setattr(disk.shutil, "disk_usage", usage)
    shown = reported_for(tmp_path / "out", OSError(errno.ENOSPC, NO_SPACE))
    assert f"cannot save {tmp_path / 'out'}: {NO_SPACE} (0.0 MiB free, 3.0 MiB of it were written)" in shown


def test_an_error_hidden_by_torch_is_reported_by_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save says "unexpected pos 704 vs 598" of every disk that refuses."""
    target = tmp_path / "optimizer.pt"
    target.symlink_to("/dev/full")

    def shown() -> str:
        with pytest.raises(UserError, match="IDLM-0301") as caught, translate_disk_errors(target):
            torch.save({"a": torch.zeros(1000)}, target)
        assert "inline_container" not in caught.value.message and "pos" not in caught.value.message
        return caught.value.message

    free = SimpleNamespace(free=1000)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: free)
    assert NO_SPACE in shown()
    free.free = 2**40
    assert "a quota?" in shown()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**20, 2**20))
    assert "File too large" in shown()


def test_a_stream_that_torch_writes_names_its_own_cause(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=NO_SPACE), translate_disk_errors(tmp_path / "a.pt"):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")  # noqa: B904


def test_the_lock_is_that_of_the_file_at_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last owner removes the file after it was opened here, and a third run makes it anew."""
    path, calls = tmp_path / "lock", []
    flock = fcntl.flock

    def locking(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()
            path.touch()

    monkeypatch.setattr(fcntl, "flock", locking)
    lock = lock_file(path)
    assert lock is not None and len(calls) == 2
    assert os.path.samestat(os.fstat(lock), path.stat())
    assert lock_file(path) is None
    os.close(lock)
