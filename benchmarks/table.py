"""Tables of README.md, docs/ and RESULTS.md from result rows: `python -m benchmarks.table` writes them; with
`--check` it only compares.

A table stands between `<!-- results:NAME -->` and `<!-- /results:NAME -->`, has one line per case and one
column per metric, and holds the newest row of each; NAME is a bench, or BENCH:METRIC for one column, or
BENCH:METRIC:caption for the line under a chart of that column. BENCH:METRIC:KEY-KEY has a column for every
value of these keys, of the rows that have them. A last part KEY=VALUE,.. leaves out rows of other cases. Rows
whose parity gate failed are never printed."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, read_rows

SPEEDS = ("tokens/s",)
ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "RESULTS.md")
_OPEN = r"(?P<open><!-- results:(?P<name>[\w:=.,-]+) -->\n)"
_SECTION = re.compile(_OPEN + r"(?P<body>.*?)(?P<close><!-- /results:)", re.DOTALL)
Row = dict[str, Any]


def main(
    arguments: list[str] | None = None, *, pages: Iterable[Path] = PAGES, results: Path = RESULTS
) -> int:
    """Regenerate every marked section of `pages`; --check writes nothing and returns 1 when one is stale."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a table is stale")
    is_check = parser.parse_args(arguments).check
    status = 0
    for page in pages:
        text = page.read_text(encoding="utf-8")
        stale = [
            found["name"]
            for found in _SECTION.finditer(text)
            if section(found["name"], results) != found["body"]
        ]
        if stale and is_check:
            status = 1
            names = ", ".join(stale)
            print(f"{page.name} has figures without a result row in: {names}; run python -m benchmarks.table")
        elif stale:
            fresh = _SECTION.sub(
                lambda found: found["open"] + section(found["name"], results) + found["close"], text
            )
            page.write_text(fresh, encoding="utf-8")
    return status


def section(name: str, results: Path) -> str:
    """The Markdown of one bench, or of one of its metrics: a table per machine and command, newest rows.

    Empty without rows. With `:caption` after the metric, the lines under the tables alone."""
    bench, _, rest = name.partition(":")
    metric, _, rest = rest.partition(":")
    part, _, given = rest.partition(":")
    keys = part.split("-") if part not in ("", "caption") else []
    wanted = dict(each.split("=") for each in given.split(",") if each)
    newest: dict[tuple[str, ...], Row] = {}
    for row in read_rows(bench, results=results):
        case = {key: str(value) for key, value in row["case"].items()}
        is_shown = metric in ("", row["metric"]) and case.keys() >= set(keys)
        is_shown = is_shown and case.items() >= wanted.items()
        if is_shown and row["gate_passed"] is not False:
            key = (_machine(row), row["command"], json.dumps(row["case"], sort_keys=True), row["metric"])
            newest[key] = row
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in newest.values():
        groups.setdefault((_machine(row), row["command"]), []).append(row)
    if part == "caption":
        return "\n".join(map(_caption, groups.values()))
    return "\n".join(_tables(rows, keys) for rows in groups.values())


def _tables(rows: list[Row], keys: list[str]) -> str:
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["case"]:
            kinds.setdefault(tuple(row["case"]), []).append(row)
    return "\n".join([*(_table(kind, keys) for kind in kinds.values()), _caption(rows)])


def _caption(rows: list[Row]) -> str:
    last = max(rows, key=lambda row: row["date"])
    single = "".join(f", {_words(row['metric'])} {_cell(row)}" for row in rows if not row["case"])
    return f"`{last['command']}` on {_machine(last)}, {_origin(rows)}{single}.\n"


def _table(rows: list[Row], keys: list[str]) -> str:
    def column(row: Row) -> str:
        return ", ".join([row["metric"], *(f"{key} {row['case'][key]}" for key in keys)])

    columns = list(dict.fromkeys(map(column, rows)))
    cases: dict[str, list[Row]] = {}
    for row in rows:
        case = {key: value for key, value in row["case"].items() if key not in keys}
        cases.setdefault(json.dumps(case, sort_keys=True), []).append(row)
    shown = [key for key in _varying_keys(row["case"] for row in rows) if key not in keys]
    lines = []
    for members in sorted(cases.values(), key=lambda members: _order(members[0]["case"], shown)):
        cells = {column(row): _cell(row) for row in members}
        label = [str(members[0]["case"].get(key, "")) for key in shown]
        lines.append([*label, *(cells.get(name, "") for name in columns)])
    head = [*map(_words, shown), *map(_words, columns)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


def _order(case: dict[str, Any], shown: list[str]) -> list[float]:
    """Sort key of a line: the numbers of its case, last key first; other lines keep their order."""
    return [float(case[key]) for key in reversed(shown) if isinstance(case.get(key), int | float)]


def _varying_keys(cases: Iterable[dict[str, Any]]) -> list[str]:
    listed = list(cases)
    keys = list(dict.fromkeys(key for case in listed for key in case))
    return [key for key in keys if len({json.dumps(case.get(key)) for case in listed}) > 1] or keys[:1]


def _cell(row: Row) -> str:
    value, unit = row["value"], row["unit"]
    if unit == "share":
        text = f"{100 * value:.1f} %"
    else:
        digits = 0 if abs(value) >= 100 or float(value).is_integer() else 3 if abs(value) < 0.1 else 2
        text = f"{value:,.{digits}f}" + ("" if unit in ("tokens", "") else f" {unit}")
        if unit in SPEEDS and row["ratio"] is not None:
            text += f" ({row['ratio']:.2f}x)"
        if row["share_of_floor"] is not None:
            text += f" ({row['share_of_floor']:.0%} of the limit)"
    return f"{text} (lossy)" if row["class"] == "lossy" else text


def _origin(rows: list[Row]) -> str:
    """Commit and day if all rows have one commit without changes, else the first day and the last."""
    commits, days = {row["commit"] for row in rows}, sorted({row["date"][:10] for row in rows})
    dates = " to ".join(dict.fromkeys((days[0], days[-1])))
    commit = commits.pop() if len(commits) == 1 else None
    return dates if commit is None or commit.endswith("-dirty") else f"commit {commit[:12]}, {dates}"


def _machine(row: Row) -> str:
    return "CPU" if row["gpu"] is None else f"{row['num_gpus']} x {row['gpu']}"


def _words(name: str) -> str:
    return name.replace("_", " ")


if __name__ == "__main__":
    sys.exit(main())
