"""Errors that tests expect: refusals of what users get wrong, and Ctrl-C.

A shell's background job, and some CI, starts with SIGINT ignored; Python then installs no handler of its own,
so a test that sends SIGINT has to ask for one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import ParamSpec

import pytest

from idlm.errors import UserError

P = ParamSpec("P")


def refused(match: str, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> UserError:
    """The UserError that the call raises, in which the pattern `match` is found, mostly its code."""
    with pytest.raises(UserError, match=match) as caught:
        call(*args, **kwargs)
    assert caught.value.fix
    return caught.value


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a terminal; also in processes that are started meanwhile."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
