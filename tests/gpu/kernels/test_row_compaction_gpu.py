"""The kernels of row_compaction on a CUDA device against the definition."""

from __future__ import annotations

import pytest

from tests.kernels.cases.sparse.row_compaction import (
    check,
    check_gather,
    check_positions,
    check_wanted,
    make_case,
)


@pytest.mark.parametrize("seed", range(30))
def test_compaction_equals_the_definition(seed: int) -> None:
    check(make_case(seed, "cuda"))


@pytest.mark.parametrize("seed", range(12))
def test_gathers_equal_indexing(seed: int) -> None:
    check_gather(seed, "cuda")


@pytest.mark.parametrize("seed", range(15))
def test_places_are_found_and_spread_again(seed: int) -> None:
    check_positions(seed, "cuda")


@pytest.mark.parametrize("seed", range(30))
def test_wanted_rows_that_are_left_equal_the_reference(seed: int) -> None:
    check_wanted(seed, "cuda")
