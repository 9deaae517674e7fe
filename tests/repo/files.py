"""The files of this repository as git lists them, and what Python files import."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("idlm", "infer", "train", "kernels")


@functools.cache
def listed(*folders: str, untracked: bool = True) -> tuple[str, ...]:
    """Names, relative to the root, of the files and links that are there."""
    others = ["--others", "--exclude-standard"] if untracked else []
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", *others, "-z", "--", *folders]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return tuple(sorted({name for name in names if name and os.path.lexists(ROOT / name)}))


def python_files(*folders: str) -> list[str]:
    return [name for name in listed(*folders) if name.endswith(".py")]


@functools.cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(text_of(name))


def imported(tree: ast.Module) -> list[str]:
    """Full dotted names that code imports anywhere: in functions and under TYPE_CHECKING too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found
