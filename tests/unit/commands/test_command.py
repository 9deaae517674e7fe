"""How a command ends: in words for a user, in a traceback for a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def _run(work: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    arguments = [sys.executable, "-c", PROGRAM.format(work=work)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(arguments, env=environment, check=False, stderr=subprocess.PIPE, **options)


def test_a_user_error_is_printed_without_a_traceback() -> None:
    done = _run("raise UserError('IDLM-0001', 'wrong', fix='mend it')", stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (2, b"error IDLM-0001: wrong\n  fix: mend it\n")


def test_a_reader_that_has_enough_is_no_error() -> None:
    """As `idlm-generate ... | head -1` reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = _run("print('x' * 99_999)", stdout=closed)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_error_of_another_file_keeps_its_traceback() -> None:
    done = _run("open('/nowhere/at/all')", stdout=subprocess.PIPE)
    assert done.returncode == 1
    assert b"FileNotFoundError" in done.stderr
