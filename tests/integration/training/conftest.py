from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_training import write_tiny_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny checkpoint, which no test changes."""
    return write_tiny_base(tmp_path_factory.mktemp("base"))
