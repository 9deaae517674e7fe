"""Checks of this folder, which run in Triton's interpreter alone.

pytest imports this file also in the process of all other tests, which compiles kernels."""

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.patched_triton import patch_once

    patch_once()


@pytest.fixture
def fresh_memory_is_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, so that a read before a write is detected."""
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*args, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -77777)

    monkeypatch.setattr(torch, "empty", poisoned)
