"""Rows that are packed and blocks whose positions are selected, in plain torch against the references."""

from __future__ import annotations

import pytest

from tests.kernels.cases.sparse.seeded import CHECKS, settings


@pytest.mark.parametrize(("name", "seed"), settings(40, 12, 15, 40, 24, 30))
def test_plain_torch_equals_the_references(name: str, seed: int) -> None:
    CHECKS[name](seed, "cpu")
