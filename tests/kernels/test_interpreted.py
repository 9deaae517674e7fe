"""All kernels in Triton's interpreter against their references: the files of tests/kernels/interpreted.

One process runs them all, because Triton chooses between interpreter and compiler when it is imported, and an
import costs as much as a file of checks. tests/gpu/kernels runs the kernels on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.interpreter import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*.py")
    if "\ndef test_" in path.read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    """What pytest says of every check of every file, by the markers that were run."""
    return {}


def check(name: str, markers: str, reports: dict[str, str]) -> None:
    if markers not in reports:
        reports[markers] = "it did not end"
        files = (f"interpreted/{name}" for name in FILES)
        reports[markers] = run_interpreted(*files, "-m", markers, must_pass=False, timeout_s=1700)
    # The summary of warnings names checks again.
    results = reports[markers].partition("warnings summary")[0]
    checks = [line for line in results.splitlines() if line.startswith(f"tests/kernels/interpreted/{name}::")]
    assert checks and all(" PASSED" in line for line in checks), reports[markers][-6000:]


@pytest.mark.parametrize("name", FILES)
def test_interpreted_kernels_equal_the_references(name: str, reports: dict[str, str]) -> None:
    check(name, "not sweep", reports)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in FILES if "mark.sweep" in (FOLDER / name).read_text()])
def test_interpreted_kernels_of_more_sizes_equal_the_references(name: str, reports: dict[str, str]) -> None:
    check(name, "sweep", reports)


def test_all_kernels_are_interpreted() -> None:
    assert len(FILES) >= 7
