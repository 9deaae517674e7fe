"""GPU tests: skipped without a GPU, and without warm-ups of their own, which would capture graphs for minutes
in hundreds of engines; and the place of engines that tests of the CPU build."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from idlm.infer.runtime.graphs import warm_up
from tests.contracts import engines
from tests.law import harness

REHEARSALS = {"IDLM_ZERO_DEVICE", "IDLM_RANKS_DEVICE"}
"""Variables with which tests of several processes run without a GPU."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if not torch.cuda.is_available() and not REHEARSALS & os.environ.keys():
        item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(autouse=True)
def _no_time_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "AUTO_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def _share_of_the_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes most of the free memory, so each of several workers sees its share alone."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1 or "alone" in request.keywords or not torch.cuda.is_available():
        return
    mem_get_info = torch.cuda.mem_get_info

    def share(device: Any = None) -> tuple[int, int]:
        free, total = mem_get_info(device)
        return max(0, min(free, total // workers - torch.cuda.memory_reserved(device))), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", share)


@pytest.fixture
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines of the contracts and of the law's harness run on the GPU, with its kernels and graphs."""
    for module in (harness, engines):
        monkeypatch.setattr(module, "DEVICE", {"device": "cuda", "graphs": "on", "attention": "triton"})
    yield
    torch.cuda.synchronize()
