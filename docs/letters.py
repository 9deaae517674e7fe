"""Shape letters of tensor names by the legends of module docstrings: `python -m docs.letters` lists them.

A legend is a run of `LETTER meaning` in a module's docstring, as in "B sequences, R rows, K KV heads"."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("idlm", "train", "infer", "kernels", "benchmarks")
ITEM = r"[A-Za-z] (?:of them )?(?:[a-z0-9=]|KV\b|MASK\b)[^,.;:()]*(?:\([^)]*\))?"
LEGEND = re.compile(rf"(?:(?:Shapes|Shape letters): |(?<=[.] )|^)({ITEM}(?:(?:, and |, | and ){ITEM})+)")
LABELLED = re.compile(rf"(?:Shapes|Shape letters): ({ITEM}(?:(?:, and |, | and ){ITEM})*)")
PART = re.compile(r"(?:^|, and |, | and )([A-Za-z]) (?=[a-z0-9=]|KV\b|MASK\b)")


def legend(text: str) -> list[tuple[str, str]]:
    """Letters and meanings of one docstring, in order."""
    text = " ".join(text.split())
    found = LABELLED.search(text) or next(
        (match for match in LEGEND.finditer(text) if not match[1].startswith(("A ", "a "))), None
    )
    if found is None:
        return []
    pieces = PART.split(found[1])[1:]
    return [(letter, meaning.strip()) for letter, meaning in zip(pieces[::2], pieces[1::2], strict=True)]


@functools.cache
def legends() -> dict[str, list[tuple[str, str]]]:
    """The legend of every file that has one."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue
            if read := legend(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""):
                found[path.relative_to(ROOT).as_posix()] = read
    return found


def meanings() -> dict[str, Counter[str]]:
    """Meanings of each letter, by the number of files."""
    counted: dict[str, Counter[str]] = {}
    for read in legends().values():
        for letter, meaning in read:
            counted.setdefault(letter, Counter())[meaning] += 1
    return counted


if __name__ == "__main__":
    for letter, counter in sorted(meanings().items()):
        print(letter, "; ".join(f"{meaning} ({count})" for meaning, count in counter.most_common()))
