"""Renders chat templates in a process of their own: a template is a program that comes with a checkpoint.

transformers' sandbox shields Python's objects from it, but a single operation of it may take minutes or all
memory. This process may use `RENDER_SECONDS` of CPU time a conversation and `MEMORY_BYTES` more than at its
start, and can open no file and no socket. One that the kernel ends is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

PROGRAM = ("-P", "-m", "idlm.infer.server.templates")
RENDER_SECONDS, MEMORY_BYTES = 1.0, 1 << 30
MAX_TEXT, MAX_ERROR = 1 << 24, 2000
"""Characters of a rendered conversation, and of the message of one that fails."""
ANSWER_SECONDS, STOP_SECONDS = 120.0, 5.0
"""Longest waits in seconds of real time, which may be long on a machine that is busy. The first answer comes
after the start."""
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
        return str(self._answer(question)["text"])

    def variables(self) -> frozenset[str]:
        """The variables that the tokenizer's templates read and do not set themselves. Raises as `apply`."""
        template = self._tokenizer.chat_template
        texts = [*template.values()] if isinstance(template, dict) else [template or ""]
        return frozenset(self._answer({"variables_of": texts})["variables"])

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            self._file.write(json.dumps(question, default=str).encode() + b"\n")
            self._file.flush()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("the process has ended")
        except OSError as error:
            self._stop()
            if not self._is_closed:
                self._start()
            raise TimeoutError(TOO_MUCH) from error
        answer: dict[str, Any] = json.loads(line)
        if "too_much" in answer:
            raise TimeoutError(answer["too_much"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

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
        ours.settimeout(ANSWER_SECONDS)
        self._connection, self._file = ours, ours.makefile("rwb")

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


def main() -> None:
    """Answer questions, a JSON object a line, until the other end of the socket is closed."""
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rwb") as file:
        for template in (*REHEARSAL, "".join(REHEARSAL), "{{ no.such.name }}", "{% no %}"):
            _answer({"conversations": [[{"content": ""}]], "chat_template": template})
            _answer({"variables_of": [template]})
        _confine()
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


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    from jinja2.meta import find_undeclared_variables
    from transformers.utils import chat_template_utils as chats

    try:
        if (texts := question.get("variables_of")) is not None:
            environment = chats._compile_jinja_template("").environment
            found = (find_undeclared_variables(environment.parse(text)) for text in texts)
            return {"variables": [*frozenset().union(*found)]}
        [text], _ = chats.render_jinja_template(**question)
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
