"""The exception for mistakes of users: a code, what was given and what is allowed, and how to correct it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def naming(
    code: str, what: str, *, fix: str, of: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Inside, an exception `of` these types becomes UserError `code`: `what`, with the exception. Those of
    libraries and models have no common base class."""
    try:
        yield
    except UserError:
        raise
    except of as error:
        raise UserError(code, f"{what}: {type(error).__name__}: {error}", fix=fix) from error


def some_of(names: Sequence[str]) -> str:
    """Return the first names of a list for a message, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
