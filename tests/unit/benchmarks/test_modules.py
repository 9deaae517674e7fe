"""Modules of `benchmarks`: one name for each import, and every documented command is found."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(path for folder in ("benchmarks", "tests") for path in (ROOT / folder).rglob("*.py"))
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*.md")),
    *(ROOT / "benchmarks" / "results").glob("*.jsonl"),
    *(ROOT / "benchmarks").rglob("*.py"),
]


def imported_names(text: str) -> set[str]:
    """Modules below `benchmarks` that the source imports: `a` of `import a`, `a.b` of `from a import b`."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("benchmarks.")}


def is_short(name: str) -> bool:
    """Whether `name` is a module that only the extended search path of `benchmarks` finds."""
    parts = name.split(".")[:2]
    path = ROOT.joinpath(*parts)
    found = any((folder / f"{parts[1]}.py").is_file() for folder in (ROOT / "benchmarks").iterdir())
    return found and not path.is_dir() and not path.with_suffix(".py").is_file()


def test_imports_use_the_full_path() -> None:
    """A module under two names (benchmarks.decode, benchmarks.engine.decode) would exist twice."""
    found = {
        path: names
        for path in SOURCES
        if "benchmarks" in (text := path.read_text("utf-8"))
        if (names := {name for name in imported_names(text) if is_short(name)})
    }
    assert not found, found


def test_the_check_finds_a_short_name() -> None:
    [name] = imported_names("from benchmarks.decode import main") - {"benchmarks.decode.main"}
    assert is_short(name) and not is_short("benchmarks.engine.decode") and not is_short("benchmarks.results")


def documented() -> list[str]:
    text = "\n".join(path.read_text("utf-8") for path in DOCUMENTS)
    return sorted(set(re.findall(r"python -m (benchmarks\.\w+)", text)))


@pytest.mark.parametrize("name", documented())
def test_documented_commands_are_found(name: str) -> None:
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    assert '\nif __name__ == "__main__":' in Path(spec.origin).read_text("utf-8")
