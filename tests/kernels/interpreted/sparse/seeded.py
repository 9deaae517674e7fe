"""Kernels of row_compaction and block_eviction in Triton's interpreter: started by test_interpreted.py."""

from __future__ import annotations

import pytest

from tests.kernels.cases.sparse.seeded import CHECKS, settings


@pytest.mark.sweep_but(18)
@pytest.mark.parametrize(("name", "seed"), settings(8, 7, 6, 15, 7, 3))
def test_kernels_equal_the_references(name: str, seed: int) -> None:
    CHECKS[name](seed, "cpu")
