"""The kernels of row_compaction in Triton's interpreter: started by test_interpreted.py."""

from __future__ import annotations

import pytest

from tests.kernels.cases.sparse.row_compaction import (
    check,
    check_gather,
    check_positions,
    check_wanted,
    make_case,
)


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize("seed", range(8))
def test_compaction_equals_the_reference(seed: int) -> None:
    check(make_case(seed))


@pytest.mark.sweep_but(4)
@pytest.mark.parametrize("seed", range(7))
def test_gathers_equal_indexing(seed: int) -> None:
    check_gather(seed)


@pytest.mark.sweep_but(4)
@pytest.mark.parametrize("seed", range(6))
def test_places_are_found_and_spread_again(seed: int) -> None:
    check_positions(seed)


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize("seed", range(15))
def test_wanted_rows_that_are_left_equal_the_reference(seed: int) -> None:
    check_wanted(seed)
