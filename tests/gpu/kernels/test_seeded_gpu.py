"""Kernels of the step and of its rows on a CUDA device against the definitions."""

from __future__ import annotations

import pytest

from tests.kernels.cases.sparse.seeded import SEEDED, seeds


@pytest.mark.parametrize(("name", "seed"), seeds(3))
def test_kernels_equal_the_definitions(name: str, seed: int) -> None:
    SEEDED[name][0](seed, "cuda")
