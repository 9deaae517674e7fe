"""What benchmarks share: arguments, the check for a GPU, rows, libraries that may be absent.

A benchmark is a module with a docstring, which `--help` prints, a function `measure(arguments)`, and
`start(measure, __doc__)` at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from benchmarks.results import RESULTS, append_rows, result_row
from idlm.cli import command
from idlm.config.suggest import did_you_mean
from idlm.errors import UserError

Arm = TypeVar("Arm")
Result = TypeVar("Result")


def start(measure: Callable[[list[str]], int], usage: str | None) -> NoReturn:
    """Run a benchmark with the arguments of the process; `-h` and `--help` print `usage`."""
    if command.has_help_flag(sys.argv[1:]):
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

        # Devices are counted only: a context of this process may take memory that is measured.
        if not torch.cuda.device_count():
            fix = f"run benchmarks.{needs_gpu} on a GPU" + ", or give device=cpu" * ("device" in options)
            raise UserError("IDLM-0543", "no CUDA device", fix=fix)
    return options


def chosen(options: Mapping[str, str], key: str, known: Collection[str]) -> list[str]:
    """Words of a comma-separated option; UserError IDLM-0107 for one that is not `known`."""
    words = [word for word in options[key].split(",") if word]
    for word in words:
        if word not in known:
            text = f"{key}={word}{did_you_mean(word, known)}"
            raise UserError("IDLM-0107", text, fix=f"use some of {', '.join(known)}")
    return words


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def save(bench: str, rows: Iterable[dict[str, Any]], options: Mapping[str, str]) -> None:
    """Append rows to the results where `record=true`."""
    if options["record"] == "true":
        append_rows(bench, rows, results=Path(options["results"]))


class Report:
    """Rows of a run, printed and (where `record=true`) recorded at once: a run that ends early loses none.
    `command`: what the rows name, if not the benchmark alone."""

    def __init__(self, bench: str, options: Mapping[str, str], command: str | None = None) -> None:
        self.bench, self.options, self.command = bench, options, command
        self.rows: list[dict[str, Any]] = []

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
        """Add one result row (see `result_row`)."""
        row = result_row(self.bench, case, metric, value, unit, **{"command": self.command, **more})
        self.rows.append(row)
        save(self.bench, [row], self.options)
        print(line_of(row), flush=True)
        return row

    @property
    def status(self) -> int:
        return int(any(row["gate_passed"] is False for row in self.rows))


def line_of(row: Mapping[str, Any]) -> str:
    case = " ".join(f"{key}={value}" for key, value in row["case"].items())
    facts = [
        "" if row["baseline"] is None else f"baseline {row['baseline']:.4g}",
        "" if row["ratio"] is None else f"{row['ratio']:.3f}x",
        "" if row["share_of_floor"] is None else f"{row['share_of_floor']:.1%} of the limit",
        "FAILED" if row["gate_passed"] is False else "",
    ]
    value = f"{row['metric']:28s} {row['value']:10.5g} {row['unit']:9s}"
    return "  ".join(filter(None, [value, *facts, case]))


def run_arms(
    arms: Mapping[str, Arm],
    function: Callable[[Arm], Result],
    *,
    required: Collection[str],
    absent: dict[str, str],
) -> dict[str, Result]:
    """Return `function` of each arm by name. An arm outside `required` that raises is left out, and `absent`
    gets the reason."""
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
    for name, reason in absent.items():
        print(f"not measured: {name}: {reason}")
