"""The commands of `benchmarks`: each one starts, says how it is used, and refuses unknown arguments."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import shared
from idlm.errors import UserError

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
    with pytest.raises(UserError, match="IDLM-0107"):
        module.measure(["no_such_option=1"])


def test_help_prints_the_usage_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", "--help"])
    with pytest.raises(SystemExit) as ended:
        shared.start(lambda arguments: 1, "how it is used")
    assert ended.value.code == 0 and capsys.readouterr().out == "how it is used\n"


def test_a_library_that_fails_is_left_out_with_its_reason() -> None:
    absent: dict[str, str] = {}
    found = shared.run_arms({"a": 1, "b": 0}, lambda value: 1 / value, required={"a"}, absent=absent)
    assert found == {"a": 1.0} and absent == {"b": "ZeroDivisionError: division by zero"}
    with pytest.raises(ZeroDivisionError):
        shared.run_arms({"b": 0}, lambda value: 1 / value, required={"b"}, absent=absent)


def documented() -> list[str]:
    text = "\n".join(path.read_text("utf-8") for path in DOCUMENTS)
    return sorted(set(re.findall(r"(?:python -m |`)(benchmarks\.\w+)\b(?!/)", text)))


@pytest.mark.parametrize("name", documented())
def test_documented_commands_are_found(name: str) -> None:
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    assert '\nif __name__ == "__main__":' in Path(spec.origin).read_text("utf-8")
