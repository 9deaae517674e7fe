"""The process that `sandbox.py` starts: it builds the sandbox and is the checker inside.

Four processes: this one, on the host, gives the sandbox its users and waits; its child enters the namespaces
and makes the mounts; the child of that is process 1 inside, which runs the trusted test text, and which the
kernel protects from signals of the others; a child of that runs the candidate's text. Its functions are
called by messages of plain data (`sandbox_candidate.py`), so no object of the candidate takes part in a
comparison."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import sandbox_candidate as wire_format  # type: ignore[import-not-found]
import sandbox_namespaces as namespaces  # type: ignore[import-not-found]

MAX_REASON, MAX_REPLY = 2000, 1 << 23


class Timeout(BaseException):
    """The time is over; not an Exception, which a test might catch."""


class Candidate:
    def __init__(self, python: str, source: str, code: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [python, "-I", "-S", "-c", source],
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        self._wire = wire_format.Wire(self._exchange)
        self.call = self._wire.call
        reply = self._exchange({"code": code})
        if "error" in reply:
            raise wire_format.Lost(str(reply["error"])[:MAX_REASON])

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise wire_format.Lost("the program ended") from None
        line = self._process.stdout.readline(MAX_REPLY)
        if not line.endswith(b"\n"):
            raise wire_format.Lost(f"the program ended, or its answer has more than {MAX_REPLY} bytes")
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise wire_format.Lost("the program sent something else than an answer")
        return reply


def judge(request: dict[str, Any], python: str, source: str) -> dict[str, Any]:
    """Run the test text against the candidate; what it raises is the reason of a failure."""

    def expire(*_: object) -> NoReturn:
        raise Timeout

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        candidate = Candidate(python, source, request["code"])
        stubs = {
            name: lambda *args, _as=known_as, **kwargs: candidate.call(_as, args, kwargs)
            for name, known_as in request["functions"].items()
        }
        wire_format.run_text("test", request["test"], stubs)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Timeout:
        return {"passed": False, "reason": f"no result after {request['seconds']:g} s"}
    except wire_format.Lost as error:
        return {"passed": False, "reason": str(error)}
    except BaseException as error:
        notes = getattr(error, "__notes__", None) or [f"{type(error).__name__}: {error}"]
        return {"passed": False, "reason": notes[0][:MAX_REASON]}
    return {"passed": True, "reason": ""}


def report(result: dict[str, Any]) -> NoReturn:
    os.write(1, json.dumps(result).encode("utf-8", "replace") + b"\n")
    os._exit(0)


def build(request: dict[str, Any], source: str, ready: int, mapped: int) -> NoReturn:
    try:
        namespaces.die_with_parent()
        namespaces.enter_namespaces()
        os.write(ready, b"x")
        if not os.read(mapped, 1):
            os._exit(0)
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        namespaces.enter_root(namespaces.shown_paths(), scratch_bytes=request["scratch_bytes"])
        # Handles of the host must not reach process 1.
        os.closerange(3, 1024)
        inside = os.fork()
        if inside == 0:
            # A signal to the process group would reach the processes outside.
            os.setsid()
            namespaces.drop_privileges(request["limits"])
            report(judge(request, python, source))
    except OSError as error:
        report({"refused": error.strerror or str(error)})
    os.waitpid(inside, 0)
    os._exit(0)


def main() -> None:
    """Read a request from standard input; one line of JSON on standard output is the result."""
    request = json.loads(sys.stdin.buffer.read())
    with open(wire_format.__file__, encoding="utf-8") as file:
        source = file.read()
    ready, send_ready = os.pipe()
    mapped, send_mapped = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        os.close(send_mapped)
        build(request, source, send_ready, mapped)
    os.close(send_ready)
    if os.read(ready, 1):
        try:
            namespaces.map_ids(child)
        except OSError as error:
            os.kill(child, signal.SIGKILL)
            report({"refused": error.strerror or str(error)})
        os.write(send_mapped, b"x")
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
