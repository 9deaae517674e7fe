"""The commands of `benchmarks`: each one starts, says how it is used, and refuses unknown arguments. Their
rows are complete or refused, and a README figure without a row is found."""

from __future__ import annotations

import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import FIELDS, append_rows, read_rows, result_row
from benchmarks.table import main as table_main
from tests.errors import refused

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "\n    start(measure, __doc__)\n" in path.read_text("utf-8")
)
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(
        path
        for folder in ("docs", "recipes", "kernels", "benchmarks")
        for path in (ROOT / folder).rglob("*.md")
    ),
    *(ROOT / "recipes").glob("*.yaml"),
    *(ROOT / "benchmarks" / "results").glob("*.jsonl"),
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_shows_its_usage_and_names_its_options(name: str) -> None:
    module = import_module(name)
    assert f"python -m benchmarks.{name.rpartition('.')[2]}" in module.__doc__
    refused("IDLM-0107", module.measure, ["no_such_option=1"])


def documented() -> list[str]:
    text = "\n".join(path.read_text("utf-8") for path in DOCUMENTS)
    return sorted(set(re.findall(r"(?:python -m |`)(benchmarks\.\w+)\b(?!/)", text)))


@pytest.mark.parametrize("name", documented())
def test_documented_commands_are_found(name: str) -> None:
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    assert '\nif __name__ == "__main__":' in Path(spec.origin).read_text("utf-8")


README = "# x\n<!-- results:demo -->\n<!-- /results:demo -->\nend\n"


def demo_row(decoder: str, value: float, **options: Any) -> dict[str, Any]:
    return result_row(
        "demo", {"decoder": decoder, "num": 9}, "tokens_per_forward", value, "tokens", **options
    )


def test_a_row_has_exactly_the_agreed_fields() -> None:
    row = result_row("demo", {}, "latency", 4.0, "ms", baseline=8.0, floor=1.0, gate_passed=True)
    assert list(row) == list(FIELDS)
    assert (row["ratio"], row["share_of_floor"]) == (2.0, 0.25)
    assert demo_row("isd", 3.0, baseline=1.0)["ratio"] == 3.0
    assert demo_row("isd", 3.0, baseline=0.0)["ratio"] is None


def test_rows_come_back_and_bad_lines_are_named(tmp_path: Path) -> None:
    rows = [demo_row("ar", 1.0), demo_row("isd", 3.0)]
    path = append_rows("demo", rows[:1], results=tmp_path)
    append_rows("demo", rows[1:], results=tmp_path)
    assert read_rows("demo", results=tmp_path) == json.loads(json.dumps(rows))
    path.write_text(path.read_text() + "{oops\n")
    refused("line 3", read_rows, "demo", results=tmp_path)


def test_tables_hold_the_newest_rows_whose_gate_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README)
    rows = [demo_row("ar", 1.0), demo_row("isd", 2.5), demo_row("isd", 3.25, exactness="lossy")]
    append_rows("demo", [*rows, demo_row("isd", 99.0, gate_passed=False)], results=tmp_path)
    assert table_main([], pages=[readme], results=tmp_path) == 0
    text = readme.read_text()
    assert "| decoder | tokens per forward |" in text
    assert "| isd | 3.25 (lossy) |" in text
    assert "| 2.50" not in text
    assert "| 99" not in text
    assert text.startswith("# x\n")
    assert text.endswith("<!-- /results:demo -->\nend\n")
    assert table_main(["--check"], pages=[readme], results=tmp_path) == 0
    page = tmp_path / "page.md"
    page.write_text("<!-- results:demo:latency -->\n<!-- /results:demo:latency -->\n")
    append_rows("demo", [demo_row("ar", 1.5), result_row("demo", {}, "latency", 4.5, "ms")], results=tmp_path)
    assert table_main([], pages=[page], results=tmp_path) == 0
    assert "latency 4.50 ms" in page.read_text()
    assert "1.50" not in page.read_text()
    name = "results:demo:tokens_per_forward:num:decoder=isd"
    page.write_text(f"<!-- {name} -->\n<!-- /{name} -->\n")
    assert table_main([], pages=[page], results=tmp_path) == 0
    assert "3.25" in page.read_text() and "1.50" not in page.read_text()
    readme = tmp_path / "README.md"
    invented = README.replace("demo -->\n", "demo -->\n| isd | 3.9 |\n", 1)
    readme.write_text(invented)
    assert table_main(["--check"], pages=[readme], results=tmp_path) == 1
    assert "demo" in capsys.readouterr().out
    assert readme.read_text() == invented
