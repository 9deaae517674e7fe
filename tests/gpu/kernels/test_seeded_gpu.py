"""The kernels of row_compaction and block_eviction on a CUDA device against the definitions."""

from __future__ import annotations

import pytest

from tests.kernels.cases.sparse.seeded import CHECKS, settings


@pytest.mark.parametrize(("name", "seed"), settings(30, 12, 15, 30, 24, 12))
def test_kernels_equal_the_definitions(name: str, seed: int) -> None:
    CHECKS[name](seed, "cuda")
