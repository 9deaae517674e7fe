"""Runs arms of libraries that may be absent or fail, and prints the reason of each that does not run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

Arm = TypeVar("Arm")
Result = TypeVar("Result")


def run_arms(
    arms: Mapping[str, Arm],
    function: Callable[[Arm], Result],
    *,
    required: Collection[str],
    absent: dict[str, str],
) -> dict[str, Result]:
    """Return `function` of each arm by name. An arm outside `required` that raises is left out, and `absent`
    gets the reason.
    """
    results = {}
    for name, arm in arms.items():
        try:
            results[name] = function(arm)
        except Exception as error:
            if name in required:
                raise
            first_line = str(error).strip().partition("\n")[0]
            absent[name] = f"{type(error).__name__}: {first_line}"
    return results


def print_absent(absent: Mapping[str, str]) -> None:
    """Print one line for each arm that was not measured."""
    for name, reason in absent.items():
        print(f"not measured: {name}: {reason}")
