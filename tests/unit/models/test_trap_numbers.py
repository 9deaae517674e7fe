"""The 28 traps of model families, mistakes in loading that fail silently: each has a test with its number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
NUM_TRAPS = 28
NAME = re.compile(r"test_traps?_((?:\d\d_(?:and_|to_)?)+)[a-z]")


def numbers(name: str) -> set[int]:
    """`test_traps_02_20_and_24_x`: 2, 20 and 24; `test_traps_09_to_11_x`: 9, 10 and 11."""
    found = NAME.match(name)
    words = found[1].rstrip("_").split("_") if found else []
    if "to" in words:
        return set(range(int(words[0]), int(words[-1]) + 1))
    return {int(word) for word in words if word != "and"}


def names() -> Iterator[str]:
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_trap"):
                yield node.name


def test_names_are_read_right() -> None:
    assert numbers("test_trap_04_a_thing") == {4}
    assert numbers("test_traps_02_20_and_24_things") == {2, 20, 24}
    assert numbers("test_traps_09_to_11_things") == {9, 10, 11}
    assert numbers("test_trapdoors") == numbers("test_trap_4_x") == set()


def test_every_trap_has_a_test() -> None:
    marked = list(names())
    assert not [name for name in marked if not numbers(name)]
    assert set().union(*map(numbers, marked)) == set(range(1, NUM_TRAPS + 1))
