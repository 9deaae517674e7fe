"""The tiny checkpoints of all tests of accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.accelerators.cases import write_toys


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_toys(tmp_path_factory)
