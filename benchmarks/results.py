"""Result rows: one validated JSON object per measurement, appended to `benchmarks/results/<bench>.jsonl`.

A row holds the measurement, its baseline, whether its parity gate passed, whether the configuration is exact
or lossy, and hardware and commit. README tables are generated from rows only (`python -m benchmarks.table`).
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from idlm.errors import UserError
from idlm.fingerprint import run_fingerprint

RESULTS = Path(__file__).resolve().parent / "results"
CLASSES = ("exact", "lossy")
LOWER_IS_BETTER = frozenset({"s", "ms", "us", "bytes", "MB", "KiB", "MiB", "GiB"})
_NUMBER = (int, float)
FIELDS: dict[str, tuple[type, ...]] = {
    "bench": (str,),
    "case": (dict,),
    "metric": (str,),
    "value": _NUMBER,
    "unit": (str,),
    "baseline": (*_NUMBER, type(None)),
    "ratio": (*_NUMBER, type(None)),
    "floor": (*_NUMBER, type(None)),
    "share_of_floor": (*_NUMBER, type(None)),
    "gate_passed": (bool, type(None)),
    "class": (str,),
    "gpu": (str, type(None)),
    "num_gpus": (int,),
    "torch": (str,),
    "triton": (str, type(None)),
    "commit": (str, type(None)),
    "date": (str,),
    "command": (str,),
}


def result_row(
    bench: str,
    case: dict[str, Any],
    metric: str,
    value: float,
    unit: str,
    *,
    baseline: float | None = None,
    floor: float | None = None,
    gate_passed: bool | None = None,
    exactness: str = "exact",
    command: str | None = None,
) -> dict[str, Any]:
    """Build and validate a row. `baseline`: the same metric of the strongest baseline of the same run.
    `floor`: the best that hardware allows (same unit). `gate_passed`: the parity gate (None: the metric has
    none).

    `ratio` is above 1 when ours is better, `share_of_floor` 1 at the limit: value over the other figure, or
    the other way round for times and sizes."""
    print_of = _fingerprint()
    row = {
        "bench": bench,
        "case": case,
        "metric": metric,
        "value": value,
        "unit": unit,
        "baseline": baseline,
        "ratio": _goodness(value, baseline, unit),
        "floor": floor,
        "share_of_floor": _goodness(value, floor, unit),
        "gate_passed": gate_passed,
        "class": exactness,
        **{key: print_of[key] for key in ("gpu", "num_gpus", "torch", "triton")},
        "commit": f"{print_of['commit']}-dirty"
        if print_of["commit"] and print_of["dirty"]
        else print_of["commit"],
        "date": print_of["date"],
        "command": command or f"python -m benchmarks.{bench}",
    }
    check_row(row)
    return row


def _goodness(value: float, other: float | None, unit: str) -> float | None:
    """How many times better `value` is than `other`; None without `other` or if the divisor is zero."""
    if other is None:
        return None
    ours, theirs = (other, value) if unit in LOWER_IS_BETTER else (value, other)
    return ours / theirs if theirs else None


def check_row(row: Any, where: str = "result row") -> None:
    """Raise UserError IDLM-0310 naming every field that is missing, unknown, mistyped or not finite."""
    if not isinstance(row, dict):
        raise _refused(where, [f"expected an object, got {type(row).__name__}"])
    problems = [f"unknown field {key!r}" for key in row if key not in FIELDS]
    for key, types in FIELDS.items():
        value = row.get(key)
        if key not in row:
            problems.append(f"missing field {key!r}")
        elif not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            problems.append(f"{key}={value!r} has a wrong type")
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{key}={value} is not finite")
    if not problems and row["class"] not in CLASSES:
        problems.append(f"class={row['class']!r} is not one of {CLASSES}")
    if problems:
        raise _refused(where, problems)


def append_rows(bench: str, rows: Iterable[dict[str, Any]], *, results: Path = RESULTS) -> Path:
    """Append `rows`, all of `bench`, in one write; nothing is written when one of them is malformed."""
    checked = list(rows)
    for row in checked:
        check_row(row)
        assert row["bench"] == bench, f"{row['bench']=} {bench=}"
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{bench}.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in checked)
    with path.open("ab") as file:
        file.write(text.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())
    return path


def read_rows(bench: str, *, results: Path = RESULTS) -> list[dict[str, Any]]:
    """All rows of `bench`, oldest first; a malformed line raises UserError IDLM-0310 with file and line."""
    path = results / f"{bench}.jsonl"
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise _refused(where, [error.msg]) from error
        check_row(row, where)
        rows.append(row)
    return rows


def save_svg(figure: Any, path: Path) -> Path:
    """Write a matplotlib figure without dates and with names that do not vary; returns the path."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasSVG(figure)
    with rc_context({"svg.hashsalt": "idlm", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    return path


def _refused(where: str, problems: list[str]) -> UserError:
    return UserError(
        "IDLM-0310", f"{where}: {'; '.join(problems)}", fix="see benchmarks/results.py for the fields"
    )


@functools.cache
def _fingerprint() -> dict[str, Any]:
    return run_fingerprint()
