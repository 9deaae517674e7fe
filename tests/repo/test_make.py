"""What the Makefile's targets cover."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = sorted(path.name for path in (ROOT / "tests" / "gpu").iterdir() if list(path.glob("test_*.py")))


def recipe(*arguments: str) -> str:
    """What `make` would run."""
    command = ["make", "--dry-run", "--no-print-directory", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_every_gpu_test_is_in_a_part_that_make_knows() -> None:
    assert len(PARTS) >= 2 and not list(ROOT.glob("tests/gpu/test_*.py"))
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for part in PARTS:
        assert recipe("gpu-test", f"PART={part}").rstrip().endswith(f"tests/gpu/{part}")
        assert f"PART={part}" in contributing


@pytest.mark.parametrize("arguments", [[], ["PART=everything"]], ids=str)
def test_an_unknown_part_is_refused(arguments: list[str]) -> None:
    done = subprocess.run(
        ["make", "-C", str(ROOT), "gpu-test", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert all(f"PART={part}" in done.stdout for part in PARTS)


def test_imports_are_compiled_once() -> None:
    """pip does not compile them, and an environment may ask Python not to keep what it compiled."""
    command = [
        "make",
        "-C",
        str(ROOT),
        "--eval",
        "shown:; @echo bytecode=$$PYTHONDONTWRITEBYTECODE.",
        "shown",
    ]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "bytecode=." in done.stdout.splitlines()


def test_choices_are_compared_on_two_instruction_sets() -> None:
    """A choice that hangs on rounding differs between them."""
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    marked = {name for name in files if "mark.decides\n" in (ROOT / name).read_text(encoding="utf-8")}
    assert "tests/contracts/block/test_block_traps.py" in marked and len(marked) >= 15
    [line] = [one for one in recipe("test-all").splitlines() if one.startswith("ATEN_CPU_CAPABILITY=default")]
    assert {name for name in line.split() if name.endswith(".py")} == marked


def test_both_commands_run_each_test_once() -> None:
    lines = [line for line in recipe("test", "test-all").splitlines() if " -m pytest " in line]
    chosen = [re.search(r'-m "([^"]*)"', line) for line in lines]
    rest = "not gpu and not multigpu"
    assert [found and found.group(1) for found in chosen] == [
        f"not sweep and {rest}",
        f"sweep and not decides and {rest}",
        f"decides and {rest}",
    ]
    assert recipe("test-all") == recipe("test", "test-all"), "a newcomer needs one command"
    addopts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    assert "-m 'not gpu and not multigpu and not sweep'" in addopts, "pytest alone is what `make test` runs"
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert ci.rstrip().endswith("exec make test")
