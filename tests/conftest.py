"""One thread for every test: toys are too small to share work, and pytest runs a process per core."""

import gc
import os

import pytest

# Before torch is loaded, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt what imports created from garbage collection, which took a third of the engine's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)
