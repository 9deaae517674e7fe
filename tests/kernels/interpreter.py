"""Runs a file of checks in a process with interpreted Triton, which is decided when Triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_interpreted(name: str, *selection: str, timeout_s: float | None = 300, **variables: str) -> None:
    """Run all checks of tests/kernels/`name`, or pytest's `selection` of them; skips if Triton is not
    installed. `variables` are set in the environment.
    """
    pytest.importorskip("triton")
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/kernels/{name}", *selection],
        cwd=ROOT,
        env=os.environ | settings | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout, done.stdout[-4000:]
