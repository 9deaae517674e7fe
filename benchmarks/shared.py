"""What benchmarks share: arguments, the check for a GPU, rows on disk, libraries that may be absent.

A benchmark is a module with a docstring, which `--help` prints, a function `measure(arguments)`, and
`start(measure, __doc__)` at its end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from benchmarks.results import RESULTS, append_rows
from idlm.cli import command
from idlm.config.suggest import did_you_mean
from idlm.errors import UserError

Arm = TypeVar("Arm")
Result = TypeVar("Result")


def start(measure: Callable[[list[str]], int], usage: str | None) -> NoReturn:
    """Run a benchmark with the arguments of the process; `-h` and `--help` print `usage`."""
    if command.asks_for_help(sys.argv[1:]):
        print(usage)
        sys.exit(0)
    sys.exit(command.run(measure))


def defaults(text: str, **more: str) -> dict[str, str]:
    """Options as "rounds=9 record=false", and `results`, the folder of the rows."""
    words = (word.partition("=") for word in text.split())
    return {**{key: value for key, _, value in words}, **more, "results": str(RESULTS)}


def parse_options(
    arguments: Sequence[str], defaults: Mapping[str, str], *, needs_gpu: str = ""
) -> dict[str, str]:
    """Merge `key=value` arguments into `defaults`; an unknown key raises UserError IDLM-0107.

    Without a CUDA device UserError IDLM-0543 names the benchmark `needs_gpu`, unless `device=cpu` is given.
    """
    options = dict(defaults)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in options:
            raise UserError(
                "IDLM-0107",
                f"unknown argument {argument!r}{did_you_mean(key, options)}",
                fix=f"use some of {sorted(options)}, as key=value",
            )
        options[key] = value
    if needs_gpu and options.get("device", "cuda").startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            fix = f"run benchmarks.{needs_gpu} on a GPU" + ", or give device=cpu" * ("device" in options)
            raise UserError("IDLM-0543", "no CUDA device", fix=fix)
    return options


def save(bench: str, rows: Iterable[dict[str, Any]], options: Mapping[str, str]) -> None:
    """Append rows to the results where `record=true`."""
    if options["record"] == "true":
        append_rows(bench, rows, results=Path(options["results"]))


def numbers(text: str) -> list[int]:
    """Numbers of a comma-separated option."""
    return [int(part) for part in text.split(",")]


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
