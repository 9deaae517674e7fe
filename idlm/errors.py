"""The exception for mistakes of users: a code, what was given and what is allowed, and how to correct it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

MAX_NAMED = 8
ROOT = Path(__file__).resolve().parents[1]
"""The clone; of an installed wheel, the folder of all packages."""


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


def install_command(extra: str) -> str:
    """The command that installs an extra: from the clone, or the packages of the extra for a wheel, since
    idlm is on no package index."""
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{ROOT}[{extra}]'"
    return " ".join(["pip install", *(f"'{package}'" for package in packages_of(extra))])


def packages_of(extra: str) -> list[str]:
    """What an extra needs on this system, by the metadata of the installed package."""
    from packaging.requirements import Requirement

    found: list[str] = []
    for requirement in map(Requirement, metadata.requires("idlm") or ()):
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        requirement.marker = None
        if requirement.name == "idlm":
            found += [package for other in requirement.extras for package in packages_of(other)]
        else:
            found.append(str(requirement))
    return found
