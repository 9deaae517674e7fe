"""What every command line shares: user errors without a traceback, Ctrl-C without noise."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from idlm.cli import imports
from idlm.errors import UserError, printable

HELP_FLAGS = frozenset({"-h", "--help", "--version"})
USER_ERROR_STATUS = 2
INTERRUPTED_STATUS, TERMINATED_STATUS = 130, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command like Ctrl-C: finished work is kept."""


def run(command: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """Return the exit status of `command` called with `argv` (None: those of the process); 2 for a UserError,
    which is printed to stderr."""
    # Commands load torch after this: a spinning OpenMP pool is four times slower next to a busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    warnings.showwarning = _print_warning
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    imports.owns_process |= argv is None
    try:
        status = command(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error {printable(str(error))}", file=sys.stderr)
        return USER_ERROR_STATUS
    except KeyboardInterrupt as signalled:
        is_terminated, cause = isinstance(signalled, Terminated), signalled.__cause__
        reason = "" if cause is None else f", after {type(cause).__name__}: {cause}"
        print(f"{'terminated' if is_terminated else 'interrupted'}{reason}", file=sys.stderr)
        return TERMINATED_STATUS if is_terminated else INTERRUPTED_STATUS
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has enough; the interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def asks_for_help(arguments: Sequence[str]) -> bool:
    return not HELP_FLAGS.isdisjoint(arguments)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _print_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Print only warnings for the user, without the position in the code."""
    if issubclass(category, UserWarning):
        print(f"warning: {printable(str(message))}", file=sys.stderr)
