"""What every command line shares: user errors without a traceback, Ctrl-C without noise, `key=value` plug-in
options.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TextIO

import yaml

from idlm.errors import UserError

# Before torch is loaded: a spinning OpenMP pool collapses four-fold beside a busy neighbour.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

USER_ERROR_STATUS = 2
INTERRUPTED_STATUS, TERMINATED_STATUS = 130, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command like Ctrl-C: what is finished is kept."""


def run(command: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """Call `command` with `argv`, None for the process's own; returns the exit status and prints a UserError
    to stderr.
    """
    warnings.showwarning = _print_warning
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    _take_any_text()
    try:
        status = command(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error {error}", file=sys.stderr)
        return USER_ERROR_STATUS
    except Terminated:
        print("terminated", file=sys.stderr)
        return TERMINATED_STATUS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError:
        reason = _why_stdout_is_stuck()
        if reason is None:
            raise
        told = UserError(
            "IDLM-0442",
            f"cannot write to standard output: {reason}",
            fix="free space, or choose another place",
        )
        print(f"error {told}", file=sys.stderr)
        return USER_ERROR_STATUS


def _take_any_text() -> None:
    """Write what the terminal's encoding lacks as escapes, and let bytes that are no text be refused where
    they are read, like those of arguments.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def _why_stdout_is_stuck() -> str | None:
    """Why standard output takes nothing more (a full disk), None if it takes a line end. What waits there is
    given up: the interpreter would complain about it when it ends.
    """
    try:
        number = sys.stdout.fileno()
    except (AttributeError, ValueError):
        return None
    try:
        sys.stdout.flush()
        os.write(number, b"\n")
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        return error.strerror
    return None


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Only what is meant for the user, without the place in the code."""
    if issubclass(category, UserWarning):
        print(f"warning: {message}", file=sys.stderr)


def split_plugin_options(
    arguments: Sequence[str], *, plugin: str, default: str | None
) -> tuple[str | None, dict[str, Any], list[str]]:
    """Take `plugin=name` and `plugin.option=value` out of command-line arguments.

    Plug-ins own their options (a dataclass in their file), so no schema elsewhere names them. Returns the
    name (or `default`), the options with YAML values, and the remaining arguments.
    """
    name, options, rest = default, {}, []
    for argument in arguments:
        key, equals, value = argument.lstrip("+").partition("=")
        if equals and key == plugin:
            name = value
        elif equals and key.startswith(f"{plugin}."):
            options[key.removeprefix(f"{plugin}.")] = _yaml(argument, value)
        else:
            rest.append(argument)
    return name, options, rest


def _yaml(argument: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(
            "IDLM-0104", f"cannot read the value of {argument!r}", fix="quote it as YAML"
        ) from error
