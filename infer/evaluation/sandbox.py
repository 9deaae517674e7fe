"""Run a program that a model wrote against tests, in a sandbox that it cannot leave (arXiv 2604.11035,
appendix H.4): without network, files of the host but Python's own, or other processes, and with limits of
time, memory, processes and files (`sandbox_namespaces.py`). `sandbox_child.py` judges."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from idlm.errors import UserError

CHILD = Path(__file__).with_name("sandbox_child.py")
GRACE_SECONDS = 20.0
"""Beyond the program's own time, before everything is killed from outside."""
MAX_REPORT = 1 << 16
PROBE_SECONDS = 60.0
"""For the empty program: long, so that a busy machine is not taken for one without a sandbox."""
MIN_LINUX = [5, 14]
"""Since it, RLIMIT_NPROC counts within a user namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """What a program may use; sizes in bytes. `memory` is of one process, of `processes` with the checker."""

    seconds: float = 10.0
    memory: int = 512 << 20
    processes: int = 8
    file_size: int = 16 << 20
    scratch: int = 64 << 20

    def as_rlimits(self) -> dict[str, int]:
        return {
            "AS": self.memory,
            "CPU": int(self.seconds) + 1,
            "NPROC": self.processes,
            "FSIZE": self.file_size,
            "NOFILE": 64,
            "CORE": 0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`code` is not trusted. `test` passes if it raises nothing; `functions` maps names in it to the
    candidate's."""

    code: str
    test: str
    functions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutcome:
    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Runs programs. Building one runs an empty program: UserError IDLM-0480 where that fails."""

    limits: ProgramLimits = ProgramLimits()

    def __post_init__(self) -> None:
        tried = self.run(Program(code="", test="", functions={}), seconds=PROBE_SECONDS)
        if not tried.passed:
            _refuse(tried.reason)

    def run(self, program: Program, *, seconds: float | None = None) -> ProgramOutcome:
        """Run one program, for the seconds of the limits or others. Threads may call it at the same time."""
        if sys.platform != "linux" or platform.machine() != "x86_64":
            _refuse("it is made of namespaces and system calls of Linux on x86-64")
        if [int(number) for number in re.findall(r"\d+", platform.release())[:2]] < MIN_LINUX:
            _refuse(f"Linux {platform.release()} counts all processes of a user as those of a sandbox")
        seconds = self.limits.seconds if seconds is None else seconds
        request = {
            **dataclasses.asdict(program),
            "seconds": seconds,
            "scratch_bytes": self.limits.scratch,
            "limits": self.limits.as_rlimits(),
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
        )
        try:
            out, err = process.communicate(json.dumps(request).encode(), timeout=seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return ProgramOutcome(passed=False, reason=f"no result after {seconds:g} s")
        finally:
            # Its child dies with it, and with that everything inside.
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=GRACE_SECONDS)
        return _outcome(out[:MAX_REPORT], err)


def _outcome(out: bytes, err: bytes) -> ProgramOutcome:
    try:
        result = json.loads(out)
    except ValueError:
        if err:
            _refuse(err.decode(errors="replace").strip().splitlines()[-1])
        return ProgramOutcome(passed=False, reason="the checker was killed (memory or CPU time)")
    if "refused" in result:
        _refuse(result["refused"])
    return ProgramOutcome(passed=result["passed"] is True, reason=result["reason"])


def _refuse(why: str) -> NoReturn:
    raise UserError(
        "IDLM-0480",
        f"programs are not run, because the sandbox for them cannot be built here: {why}",
        fix="allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; in Docker, a seccomp profile "
        "that permits unshare and mount), use Linux 5.14 or newer on x86-64, or take another task",
    )
