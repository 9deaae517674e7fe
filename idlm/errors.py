"""The exception for mistakes of users: a code, what was given and what is allowed, and how to correct it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

MAX_NAMED = 8


class UserError(ValueError):
    """A mistake in input or configuration, raised where the value enters. `code` is stable and names one
    cause, `fix` is an instruction. Command lines print it without a traceback and exit with status 2."""

    def __init__(self, code: str, message: str, *, fix: str) -> None:
        super().__init__(f"{code}: {message}\n  fix: {fix}")
        self.code = code
        self.message = message
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        """Of what it was made: processes of a pool send exceptions."""
        return partial(type(self), fix=self.fix), (self.code, self.message)


def some_of(names: Sequence[str]) -> str:
    """Return the first names of a list for a message, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
