"""One run per output_dir for the life of the run."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest

from idlm.errors import UserError
from idlm.train.checkpoint.resume import exclusive_output


def test_a_second_run_in_one_output_dir_is_refused_and_names_the_first(tmp_path: Path) -> None:
    output, link = tmp_path / "deep" / "out", tmp_path / "link"
    with exclusive_output(str(output)):
        link.symlink_to(output)
        for name in (output, link, output / ".." / "out"):
            shown = f"IDLM-0525.*process {os.getpid()} on {socket.gethostname()}, started 2"
            with pytest.raises(UserError, match=shown), exclusive_output(str(name)):
                pytest.fail("two runs have it")
        with exclusive_output(str(tmp_path / "other")):
            pass
    with exclusive_output(str(output)):
        pass
    assert list(output.parent.iterdir()) == [], "the lock file is gone, and output_dir is not made"


def test_the_lock_holds_while_output_dir_is_replaced(tmp_path: Path) -> None:
    """Publishing swaps the whole folder, so that a lock inside it would guard nothing."""
    output = tmp_path / "out"
    output.mkdir()
    with exclusive_output(str(output)):
        output.rename(tmp_path / "old")
        output.mkdir()
        with pytest.raises(UserError, match="IDLM-0525"), exclusive_output(str(output)):
            pytest.fail("two runs have it")


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.warns(UserWarning, match="output_dir=.*make sure that no other run uses it"),
        exclusive_output(str(tmp_path / "out")),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="IDLM-0301"), exclusive_output(str(tmp_path / "file" / "out")):
        pytest.fail("there is no such folder")
