"""One thread for every test: toys are too small to share work, and pytest runs a process per core. And which
tests are sweeps."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from idlm.log import get_logger

# Before torch is loaded, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Products of float32 then give a row the same bits in a pass of any size, where MKL and the CPU can.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Where it did not, `caplog` would watch it beside the root logger and read messages twice.
get_logger().propagate = True

WHOLE_FOLDERS = {"gpu": "gpu", "unit/benchmarks": "sweep"}
"""Folders of which every test has this marker: they are not even imported where it is deselected."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Save a worker the imports of tests that it would not run."""
    folder = collection_path.relative_to(Path(__file__).parent).as_posix()
    marker = WHOLE_FOLDERS.get(folder)
    return True if marker and f"not {marker}" in (config.option.markexpr or "") else None


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> Generator[None, Any, Any]:
    """Give all settings of a test but those of its `sweep_but` the marker `sweep`."""
    made = yield
    items = [item for item in made if isinstance(item, pytest.Function)] if isinstance(made, list) else []
    kept: set[str] = set()
    for marker in items[0].iter_markers("sweep_but") if items else ():
        first = marker.args[0] if marker.args and isinstance(marker.args[0], int) else 0
        fitting = {item.name for item in items[:first]}
        fitting |= {item.name for item in items if _fits(item.callspec, marker)}
        if not fitting:
            raise pytest.Collector.CollectError(f"{collector.nodeid}::{name}: no setting fits {marker}")
        kept |= fitting
    for item in items if kept else ():
        if item.name not in kept:
            item.add_marker(pytest.mark.sweep)
    return made


def _fits(callspec: Any, marker: pytest.Mark) -> bool:
    """Whether the setting has one of the identifiers or all the values of a marker."""
    values = callspec.params
    by_value = bool(marker.kwargs) and all(values.get(key) == value for key, value in marker.kwargs.items())
    return callspec.id in marker.args or by_value


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what lies in a folder of `WHOLE_FOLDERS`."""
    folders = {parent.as_posix() for parent in item.path.relative_to(Path(__file__).parent).parents}
    for folder in folders & WHOLE_FOLDERS.keys():
        item.add_marker(WHOLE_FOLDERS[folder])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt what imports created from garbage collection, which took a third of the engine's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint, which tests only read."""
    from tests.toy import write_toy_checkpoint

    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def foreseeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose drafts are often right."""
    from tests.contracts.engines import write_foreseeing_toy

    return write_foreseeing_toy(tmp_path_factory.mktemp("foreseeing"))
