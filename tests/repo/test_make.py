"""What the Makefile's targets cover."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PARTS = re.findall(r"^GPU_([a-z]+) :=", MAKEFILE, flags=re.MULTILINE)


def recipe(*arguments: str) -> str:
    """What `make` would run."""
    command = ["make", "--dry-run", "--no-print-directory", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_parts_of_the_gpu_tests_cover_every_file_once() -> None:
    found = [
        name for part in PARTS for name in re.findall(r"tests/gpu/\S+", recipe("gpu-test", f"PART={part}"))
    ]
    assert sorted(found) == sorted(f"tests/gpu/{path.name}" for path in ROOT.glob("tests/gpu/test_*.py"))
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(PARTS) >= 2 and all(f"PART={part}" in contributing for part in PARTS)


@pytest.mark.parametrize("arguments", [[], ["PART=everything"]], ids=str)
def test_a_part_that_there_is_not_is_told(arguments: list[str]) -> None:
    done = subprocess.run(
        ["make", "-C", str(ROOT), "gpu-test", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert all(f"PART={part}" in done.stdout for part in PARTS)


def test_contracts_run_on_two_instruction_sets() -> None:
    """A choice that hangs on rounding differs between them."""
    [line] = [line for line in recipe("test").splitlines() if "ATEN_CPU_CAPABILITY=default" in line]
    chosen = re.findall(r"tests/[\w/]+\.py", line)
    assert "tests/contracts/test_block_traps.py" in chosen
    assert all((ROOT / path).is_file() for path in chosen)
