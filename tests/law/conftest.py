"""One enumerable toy per test process, and single-threaded torch: the toys are too small to share work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.law_harness import write_law_toy


@pytest.fixture(scope="session")
def law_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_law_toy(tmp_path_factory.mktemp("law_toy"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
