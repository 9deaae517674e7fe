"""What every command line shares: user errors without a traceback, Ctrl-C without noise, and imports of
libraries, which are most of the time that a command takes to start."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from idlm.errors import UserError

HELP_FLAGS = frozenset({"-h", "--help", "--version"})
HIDDEN = ("Cc", "Cf", "Cs")
"""Categories of Unicode: controls, formats (such as the direction of writing) and halves of pairs."""
USER_ERROR_STATUS = 2
INTERRUPTED_STATUS, TERMINATED_STATUS = 130, 143
UNUSED = ("datasets", "peft", "scipy")
"""What transformers imports of its own accord where it is installed: two seconds."""
owns_process = False
"""Whether this process runs one command, so that no other code uses the libraries that it imports."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command like Ctrl-C: finished work is saved."""


def run(command: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """Return the exit status of `command` called with `argv` (None: those of the process); 2 for a UserError,
    which is printed to stderr."""
    global owns_process
    # Commands load torch after this: a spinning OpenMP pool is four times slower next to a busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    warnings.showwarning = _print_warning
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    owns_process |= argv is None
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


def printable(text: str) -> str:
    """Return a text for a terminal: characters that control it, which files may hold, are escaped."""
    is_shown = [char in "\n\t" or unicodedata.category(char) not in HIDDEN for char in text]
    return "".join(char if shown else ascii(char)[1:-1] for char, shown in zip(text, is_shown, strict=True))


def has_help_flag(arguments: Sequence[str]) -> bool:
    return not HELP_FLAGS.isdisjoint(arguments)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _print_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Print only warnings for the user, without the position in the code."""
    if issubclass(category, UserWarning):
        print(f"warning: {printable(str(message))}", file=sys.stderr)


@contextmanager
def importing() -> Iterator[None]:
    """Inside, the process of a command collects no garbage: it would look through all that is imported."""
    if not owns_process or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        # What is imported stays to the end: later collections need not look at it either.
        gc.freeze()


def leave_out_unused() -> None:
    """Have transformers import none of `UNUSED` in the process of a command. It looks once whether a library
    is installed: does nothing where it may have done so already."""
    if not owns_process or "transformers" in sys.modules:
        return
    with absent(*UNUSED):
        import transformers.utils as theirs

        for name in UNUSED:
            getattr(theirs, f"is_{name}_available")()


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """Inside, the libraries `names` seem not to be installed, but for those that are imported already."""
    modules: dict[str, Any] = sys.modules
    hidden = dict.fromkeys(name for name in names if name not in modules)
    # To Python, None is a module that cannot be imported and has no specification.
    modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            modules.pop(name, None)
