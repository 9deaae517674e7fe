"""Standard streams that take less than they should: a command ends in words, not in a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from idlm.cli import command
from idlm.errors import UserError

def work(arguments):
    {work}
    return 0

sys.exit(command.run(work))
"""


def _run(work: str, *, flags: tuple[str, ...] = (), **options: Any) -> subprocess.CompletedProcess[bytes]:
    arguments = [sys.executable, *flags, "-c", PROGRAM.format(work=work)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **options.pop("environment", {})}
    return subprocess.run(arguments, env=environment, check=False, stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("work", ["print('x' * 9)", "print('x' * 99_999)", "print('x', flush=True)"])
def test_a_full_disk_under_standard_output_is_told(flags: tuple[str, ...], work: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = _run(work, flags=flags, stdout=full)
    told = done.stderr.decode()
    assert done.returncode == 2
    assert told.startswith("error IDLM-0442: cannot write to standard output: No space left"), told
    assert len(told.splitlines()) == 2, told


def test_an_error_of_another_file_keeps_its_traceback() -> None:
    done = _run("open('/nowhere/at/all')", stdout=subprocess.PIPE)
    assert done.returncode == 1
    assert b"FileNotFoundError" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_terminal_cannot_show_is_escaped(encoding: str) -> None:
    environment = {"PYTHONIOENCODING": encoding}
    done = _run(r"print('a\u6f22 \u00e9', flush=True)", environment=environment, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (rb"a\u6f22 \xe9" if encoding == "ascii" else b"a\\u6f22 \xe9") + b"\n"


def test_bytes_that_are_no_text_reach_the_check_of_texts() -> None:
    done = _run(
        "print(ascii(sys.stdin.read()))",
        input=b"a\xff",
        stdout=subprocess.PIPE,
        environment={"PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"},
    )
    assert (done.returncode, done.stdout) == (0, rb"'a\udcff'" + b"\n"), done.stderr
