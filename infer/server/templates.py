"""Renders chat templates in a process of their own: a template is a program that comes with a checkpoint.

transformers' sandbox shields Python's objects from it, but a single operation of it may take minutes or all
memory. This process may use `RENDER_SECONDS` of CPU time a conversation and `MEMORY_BYTES` more than at its
start, and can open no file and no socket. One that the kernel ends is replaced."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

PROGRAM = ("-P", "-m", "idlm.infer.server.templates")
RENDER_SECONDS, MEMORY_BYTES = 1.0, 1 << 30
MAX_TEXT, MAX_ERROR = 1 << 24, 2000
"""Characters of a rendered conversation, and of the message of one that fails."""
START_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 120.0, 60.0, 5.0
"""Longest waits in seconds of real time, which may be long on a machine that is busy."""
NUM_PROCESSES, LOOK_SECONDS = 2, 0.05
REHEARSAL = (
    r"{% macro m(a) %}{{ '\\n\u00e9' ~ a | trim | tojson }}{% endmacro %}{% set n = namespace(a=m(1)) %}",
    r"{% generation %}{{ n.a | pprint ~ lipsum(1) ~ strftime_now('%d %b %Y') }}{% endgeneration %}",
    r"{% for a in 'é'.encode('utf-8') %}{% break %}{% endfor %}{{ 'a b' | urlize | wordwrap | title }}",
    r"{{ raise_exception('') }}",
)
"""Uses what imports a module at its first use, which the confined process cannot."""
TOO_MUCH = f"it takes more than {RENDER_SECONDS:g} s or {MEMORY_BYTES >> 30} GiB"


class TemplateProcess:
    """The front end's side of a process. One thread uses it at a time; `close` may come from another."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_closed = False
        self._start()

    def apply(self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = False, **names: Any) -> str:
        """Stands for the tokenizer's `apply_chat_template`; `names` are what the template sees. Raises
        ValueError if the template fails, and TimeoutError if it uses too much."""
        assert not tokenize
        conversation = [{key: value for key, value in one.items() if value is not None} for one in messages]
        question = {**self._tokenizer.special_tokens_map, **names, "conversations": [conversation]}
        question["chat_template"] = self._tokenizer.get_chat_template(None, names.get("tools"))
        try:
            answer = self._exchange(json.dumps(question, default=str).encode())
        except OSError as error:
            self._stop()
            if not self._is_closed:
                self._start()
            raise TimeoutError(TOO_MUCH) from error
        if "too_much" in answer:
            raise TimeoutError(answer["too_much"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["text"])

    def is_ready(self) -> bool:
        """Whether it has started and accepts questions, or has ended, which the next question shows."""
        if self._is_ready or self._is_closed:
            return True
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """End the process; a thread that waits for it gets an error."""
        self._is_closed = True
        self._stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._connection, self._is_ready = ours, False
        self._file = ours.makefile("rwb")

    def _exchange(self, question: bytes) -> dict[str, Any]:
        if not self._is_ready:
            # It started during other work; its first line shows that it is ready.
            self._connection.settimeout(START_SECONDS)
            self._read()
            self._connection.settimeout(ANSWER_SECONDS)
            self._is_ready = True
        self._file.write(question + b"\n")
        self._file.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the process has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stop(self) -> None:
        self._process.kill()
        # What is left to send is lost, and what waits in a driver is left to the system.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._file.close()
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)


class TemplateProcesses:
    """Processes that several threads share. One of them is ready while another starts again, or is slow."""

    def __init__(self, tokenizer: Any) -> None:
        self._idle = [TemplateProcess(tokenizer) for _ in range(NUM_PROCESSES)]
        self._all, self._change = tuple(self._idle), threading.Condition()

    def apply(self, *given: Any, **names: Any) -> str:
        with self._change:
            process = self._ready()
            self._idle.remove(process)
        try:
            return process.apply(*given, **names)
        finally:
            with self._change:
                self._idle.append(process)
                self._change.notify()

    def close(self) -> None:
        for process in self._all:
            process.close()

    def _ready(self) -> TemplateProcess:
        """An idle process that accepts questions; after a time one that has not started."""
        for num_looks in itertools.count():
            late = self._idle if num_looks >= START_SECONDS / LOOK_SECONDS else []
            if found := [process for process in self._idle if process.is_ready()] or late:
                break
            self._change.wait(LOOK_SECONDS)
        return found[0]


def main() -> None:
    """Answer questions, a JSON object a line, until the other end of the socket is closed."""
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rwb") as file:
        for template in (*REHEARSAL, "".join(REHEARSAL), "{{ no.such.name }}", "{% no %}"):
            _answer({"conversations": [[{"content": ""}]], "chat_template": template})
        _confine()
        file.write(b"{}\n")
        file.flush()
        for line in file:
            # A copy of this process answers: one that is ended costs no start, which takes seconds.
            copied = os.fork()
            if not copied:
                # CPU time, not time of day: a busy machine makes no template late. The signal ends the copy.
                signal.setitimer(signal.ITIMER_PROF, RENDER_SECONDS)
                answer = json.dumps(_answer(json.loads(line))).encode()
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.sendall(answer + b"\n")
                os._exit(0)
            if os.waitpid(copied, 0)[1]:
                connection.sendall(json.dumps({"too_much": TOO_MUCH}).encode() + b"\n")


def _answer(question: dict[str, Any]) -> dict[str, str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        [text], _ = render_jinja_template(**question)
    # Templates raise jinja2's errors, and others for messages they do not expect.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR]}
    if len(text) > MAX_TEXT:
        return {"error": f"its text has {len(text)} characters, at most {MAX_TEXT} are allowed"}
    return {"text": text}


def _confine() -> None:
    """Let this process open nothing any more, and bound its memory."""
    import resource

    limits = {resource.RLIMIT_NOFILE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = in_use + MEMORY_BYTES
    for kind, maximum in limits.items():
        resource.setrlimit(kind, (maximum, maximum))


if __name__ == "__main__":
    main()
