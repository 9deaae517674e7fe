"""Checks by seed of the ops on rows and on blocks: in plain torch, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from tests.kernels.cases.sparse.block_eviction import check_selection
from tests.kernels.cases.sparse.block_state import check_state
from tests.kernels.cases.sparse.row_compaction import (
    check,
    check_gather,
    check_positions,
    check_wanted,
    make_case,
)

CHECKS: dict[str, Callable[[int, str], None]] = {
    "rows that remain are packed": lambda seed, device: check(make_case(seed, device)),
    "gathers equal indexing": check_gather,
    "places are found and spread again": check_positions,
    "wanted rows that are left": check_wanted,
    "selection of a block's positions": check_selection,
    "state of a block": check_state,
}
"""Each compares an op with its reference or definition."""


def settings(*counts: int) -> list[tuple[str, int]]:
    """So many seeds of each check, the first ones of all before the second ones."""
    numbered = zip(CHECKS, counts, strict=True)
    return sorted(((name, seed) for name, count in numbered for seed in range(count)), key=lambda one: one[1])
