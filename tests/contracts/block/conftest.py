"""Tiny block-causal checkpoints with blocks of the module's `SIZE`, by whether their logits are shifted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.block.blocks import Slow, write_block_toy


@pytest.fixture(scope="module")
def toys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    return {
        shifted: write_block_toy(tmp_path_factory.mktemp("toy"), shifted=shifted, size=request.module.SIZE)
        for shifted in (False, True)
    }


@pytest.fixture(scope="module")
def slow(request: pytest.FixtureRequest, toys: dict[bool, Path]) -> Slow:
    return Slow(toys, request.module.SIZE)
