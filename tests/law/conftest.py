"""One enumerable toy per test process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.law.harness import write_law_toy


@pytest.fixture(scope="session")
def law_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_law_toy(tmp_path_factory.mktemp("law_toy"))
