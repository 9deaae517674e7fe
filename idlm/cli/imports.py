"""Imports of libraries by commands, which are most of the time that a command takes to start."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

UNUSED = ("datasets", "peft", "scipy")
"""What transformers imports of its own accord where it is installed: two seconds."""
owns_process = False
"""Whether this process runs one command, so that no other code uses the libraries that it imports."""


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
