"""All kernels in Triton's interpreter against their references: the files of tests/kernels/interpreted.

One process runs them all, because Triton chooses between interpreter and compiler when it is imported, and an
import costs as much as a file of checks. tests/gpu/kernels runs the kernels on a GPU.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.kernels.interpreter import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*.py")
    if "\ndef test_" in path.read_text(encoding="utf-8")
)


@functools.cache
def report(markers: str) -> str:
    """What pytest says of every check of every file with these markers."""
    files = (f"interpreted/{name}" for name in FILES)
    return run_interpreted(*files, "-m", markers, must_pass=False, timeout_s=900)


def check(name: str, markers: str) -> None:
    # The summary of warnings names checks again.
    results = report(markers).partition("warnings summary")[0]
    checks = [line for line in results.splitlines() if line.startswith(f"tests/kernels/interpreted/{name}::")]
    assert checks and all(" PASSED" in line for line in checks), report(markers)[-6000:]


@pytest.mark.parametrize("name", FILES)
def test_interpreted_kernels_equal_the_references(name: str) -> None:
    check(name, "not sweep")


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in FILES if "mark.sweep" in (FOLDER / name).read_text()])
def test_interpreted_kernels_of_more_sizes_equal_the_references(name: str) -> None:
    check(name, "sweep")


def test_all_kernels_are_interpreted() -> None:
    assert len(FILES) >= 7


@pytest.mark.sweep
def test_many_random_steps_of_paged_attention() -> None:
    """python -m pytest tests/kernels/test_interpreted.py -m sweep"""
    run_interpreted(
        "interpreted/paged_attention.py", "-k", "random_steps", timeout_s=None, RANDOM_STEPS="100"
    )
