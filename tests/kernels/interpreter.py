"""Runs files of checks in a process with interpreted Triton, which is decided when Triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_interpreted(
    *selection: str, must_pass: bool = True, timeout_s: float | None = 300, **variables: str
) -> str:
    """Run checks of files under tests/kernels, with pytest's options; skips if Triton is not installed.
    Returns a line for each check, and its faults. `variables` are set in the environment."""
    pytest.importorskip("triton")
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    settings["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    chosen = [f"tests/kernels/{one}" if one.endswith(".py") else one for one in selection]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *chosen],
        cwd=ROOT,
        env=os.environ | settings | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert not must_pass or done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    has_run = re.search(r"\d+ (passed|failed)", done.stdout) and "skipped" not in done.stdout
    assert has_run, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout
