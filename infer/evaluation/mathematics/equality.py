"""Equality of mathematical answers by math-verify, in a process with limits of time and memory."""

from __future__ import annotations

import atexit
import importlib.util
import json
import select
import subprocess
import sys
import threading
from pathlib import Path

from idlm.config.project import install_command
from idlm.errors import UserError

CHILD = Path(__file__).with_name("child.py")
START_SECONDS = 120.0
SECONDS = 40.0
"""Of one comparison. math-verify ends each of its parts after five seconds, where a signal reaches it."""


class MathVerify:
    """One process, started by the first comparison and after one that it does not survive. For several
    threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def are_equal(self, given: str, expected: str) -> bool:
        """Whether two answers are equal, in bounded time and memory. UserError IDLM-0488."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()
            process = self._process or self._start()
            assert process.stdin is not None
            reply = b""
            try:
                process.stdin.write(json.dumps([given, expected]).encode() + b"\n")
                process.stdin.flush()
                reply = _line(process, SECONDS)
            except BrokenPipeError:
                pass
            finally:
                # A reply left unread, by an interrupt too, would be taken for that of the next comparison.
                if not reply:
                    self._stop()
            return reply == b"true\n"

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        require_math_verify()
        pipe = subprocess.PIPE
        # -P: files of this folder have names of libraries.
        command = [sys.executable, "-P", str(CHILD)]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        self._process = process
        if _line(process, START_SECONDS) != b"ready\n":
            process.kill()
            lines = process.communicate()[1].decode(errors="replace").strip().splitlines()
            self._process = None
            raise _missing(f"math-verify cannot be used: {lines[-1] if lines else 'its process ended'}")
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise _missing("answers of mathematics are compared by math-verify, which is not installed")


def _missing(problem: str) -> UserError:
    return UserError("IDLM-0488", problem, fix=f"install the extra math: {install_command('math')}")


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next line of its output; empty when it ended or needs longer."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else b""


MATH_VERIFY = MathVerify()
atexit.register(MATH_VERIFY.close)
