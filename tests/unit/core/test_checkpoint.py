"""A checkpoint is the old one or the new one, whole, at every instant; nothing altered passes verify."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import idlm.publish as publishing
from idlm.checkpoint import MANIFEST, manifest_text, read_json, recover, verify
from idlm.errors import UserError
from idlm.publish import publish
from tests.errors import refused

FAULT_POINTS = ("mkdir", "open", "fsync", "rename", "link")
OLD, NEW = (
    {"model.bin": "old" * 50, "sub/extra.json": "{}"},
    {"model.bin": "new" * 60, "tokenizer.json": "[]"},
)


def write(directory: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)


def save(target: Path, content: dict[str, str]) -> None:
    with publish(target) as staging:
        assert list(staging.iterdir()) == []
        write(staging, content)


def content_of(target: Path) -> dict[str, str]:
    verify(target)
    files = (path for path in target.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(target).as_posix(): path.read_text() for path in files}


class Killed(BaseException):
    pass


class FaultAt:
    """Calls `on_fault` at the k-th call of any wrapped function of `os`, or of the exchange."""

    def __init__(self, k: int, on_fault: Callable[[], None]) -> None:
        self.left, self.on_fault = k, on_fault

    def wrap(self, function: Callable) -> Callable:
        def wrapped(*args: object, **kwargs: object) -> object:
            self.left -= 1
            if self.left == -1:
                self.on_fault()
            return function(*args, **kwargs)

        return wrapped


@contextlib.contextmanager
def faults(fault: FaultAt, *, has_exchange: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in FAULT_POINTS:
            patch.setattr(os, name, fault.wrap(getattr(os, name)))
        exchange = publishing._exchange if has_exchange else (lambda a, b: False)
        patch.setattr(publishing, "_exchange", fault.wrap(exchange))
        yield


@pytest.mark.sweep_but("False-True")
@pytest.mark.parametrize("has_exchange", [True, False])
@pytest.mark.parametrize("has_old", [True, False])
def test_raise_at_every_point_leaves_old_or_new(tmp_path: Path, has_exchange: bool, has_old: bool) -> None:
    def kill() -> None:
        raise Killed

    seen = []
    for k in range(200):
        target = tmp_path / str(k) / "model"
        if has_old:
            save(target, OLD)
        fault = FaultAt(k, kill)
        with contextlib.suppress(Killed), faults(fault, has_exchange=has_exchange):
            save(target, NEW)
        if target.exists() or has_old:
            seen.append(content_of(target))
            assert seen[-1] in (OLD, NEW)
        save(target, OLD)
        assert [path.name for path in target.parent.iterdir()] == ["model"]
        if fault.left >= 0:
            break
    assert fault.left >= 0 and k > 10, "the loop must pass every fault point"
    assert seen[-1] == NEW and (not has_old or OLD in seen)


@pytest.mark.sweep
def test_process_death_at_every_point_leaves_old_or_new(tmp_path: Path) -> None:
    seen, status = [], 1
    for k in range(200):
        target = tmp_path / str(k) / "model"
        save(target, OLD)
        child = os.fork()
        if child == 0:
            outcome = 1
            try:
                with faults(FaultAt(k, lambda: os._exit(9)), has_exchange=False):
                    save(target, NEW)
                outcome = 0
            finally:
                os._exit(outcome)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9)
        seen.append(content_of(target))
        assert seen[-1] in (OLD, NEW)
        save(target, OLD)
        assert [path.name for path in target.parent.iterdir()] == ["model"], (
            "leftovers of the dead are cleaned"
        )
        if status == 0:
            break
    assert status == 0 and k > 10
    assert seen[-1] == NEW and OLD in seen


def test_between_the_two_renames_a_loader_finds_the_new_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    save(target, OLD)
    real, looked = os.rename, []

    def rename(source: Path, final: Path) -> None:
        real(source, final)
        if not target.exists():
            looked.append(content_of(target))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "_exchange", lambda a, b: False)
        patch.setattr(os, "rename", rename)
        save(target, NEW)
    assert looked == [NEW] and content_of(target) == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_live_publisher_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with publish(target) as slow:
        write(slow, OLD)
        save(target, NEW)
        assert content_of(target) == NEW
        assert (slow / "model.bin").exists()
    assert content_of(target) == OLD


@pytest.mark.parametrize("name", ["mkdir", "open", "fsync", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_full_disk_is_a_user_error_and_keeps_the_old(tmp_path: Path, code: int, name: str) -> None:
    target = tmp_path / "model"
    save(target, OLD)
    real = getattr(os, name)

    def full(path: Path, *arguments: object, **options: object) -> object:
        if isinstance(path, int) or ".staging-" in str(path):
            raise OSError(code, os.strerror(code))
        return real(path, *arguments, **options)

    with pytest.raises(UserError, match=os.strerror(code)) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, full)
        patch.setattr(publishing, "_exchange", lambda a, b: False)
        save(target, NEW)
    assert caught.value.code == "IDLM-0301" and str(target) in caught.value.message
    assert content_of(target) == OLD
    save(target, NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_disks_and_parents_that_refuse_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="IDLM-0301"), publish(tmp_path / "model"):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="something else"), publish(tmp_path / "model"):
        raise RuntimeError("something else")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    refused("IDLM-0301", save, tmp_path / "file" / "model", NEW)


def test_other_files_of_the_folder_are_never_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "model"
    save(target, OLD)
    write(target, {"notes.txt": "mine", "state/step.json": "{}"})
    save(target, NEW)
    assert content_of(target) == NEW | {"notes.txt": "mine", "state/step.json": "{}"}
    for clash in ("notes.txt", "state", "notes.txt/deeper"):
        with pytest.raises(UserError, match="would overwrite") as caught:
            save(target, {clash: "theirs"} if "/" not in clash else {"notes.txt/x": "theirs"})
        assert caught.value.code == "IDLM-0306"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    write(foreign, NEW)
    refused(r"would overwrite.*model\.bin", save, foreign, NEW)
    refused("would overwrite", save, foreign / "model.bin", NEW)
    assert content_of(target) == NEW | {"notes.txt": "mine", "state/step.json": "{}"}


def test_every_flipped_bit_and_every_truncation_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "model"
    save(target, {"a.bin": "abc", "sub/b.json": "{}"})
    for path in [path for path in target.rglob("*") if path.is_file()]:
        good = path.read_bytes()
        flipped = (good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :] for i in range(len(good)))
        for bad in (*flipped, good[:-1], b"", good + b"x"):
            path.write_bytes(bad)
            error = refused(r"IDLM-030[23]", verify, target)
            assert str(path) in error.message, f"{bad=} must name the file"
        path.unlink()
        error = refused("missing", verify, target)
        assert str(path) in error.message
        path.write_bytes(good)
    verify(target)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../secret", "", ".", "a//b", "./a.bin", "nul\0"]
)
def test_names_that_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    target = tmp_path / "model"
    save(target, {"a.bin": "abc"})
    files = json.loads((target / MANIFEST).read_text())["files"]
    (target / MANIFEST).write_text(manifest_text(files | {name: files["a.bin"]}))
    error = refused("not a plain path", verify, target)
    assert error.code == "IDLM-0302"


@pytest.mark.parametrize("victim", ["a.bin", "sub", MANIFEST])
def test_symbolic_links_are_refused(tmp_path: Path, victim: str) -> None:
    target = tmp_path / "model"
    save(target, {"a.bin": "abc", "sub/b.json": "{}"})
    shutil.move(target / victim, tmp_path / "elsewhere")
    (target / victim).symlink_to(tmp_path / "elsewhere")
    refused("symbolic link", verify, target)


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    save(tmp_path / "real", OLD)
    (tmp_path / "latest").symlink_to("real")
    save(tmp_path / "latest", NEW)
    assert (tmp_path / "latest").is_symlink() and content_of(tmp_path / "real") == NEW
    verify(tmp_path / "latest")


def test_missing_manifest_or_directory(tmp_path: Path) -> None:
    recover(tmp_path / "nothing")
    refused("IDLM-0307", verify, tmp_path / "nothing", required=False)
    refused("IDLM-0302", verify, tmp_path)
    verify(tmp_path, required=False)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{\n "a": 1,\n}', "line 3"),
        (b"[1]", "expected an object, got list"),
        (b'{"a": ' + b"1" * 5000 + b"}", "integer string conversion"),
        (b"[" * 100_000, "recursion"),
        (b'{\n"\xff": 1}', "line 2: not UTF-8"),
    ],
)
def test_read_json_names_file_line_and_reason(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    error = refused(expected, read_json, path)
    assert error.code == "IDLM-0303" and str(path) in error.message
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
