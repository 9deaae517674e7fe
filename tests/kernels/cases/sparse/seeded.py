"""Checks by seed of ops of the step and of its rows: in plain torch, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from idlm.kernels.block_step import op as block_step
from idlm.kernels.step_rows import op as step_rows
from tests.kernels.cases import block_step as blocks
from tests.kernels.cases.sparse.block_eviction import check_selection
from tests.kernels.cases.sparse.block_state import check_state
from tests.kernels.cases.sparse.row_compaction import (
    check,
    check_gather,
    check_positions,
    check_wanted,
    make_case,
)
from tests.kernels.cases.step_rows import Case, commit_many
from tests.kernels.drafts.changed_rows import check_passes

Check = Callable[[int, str], None]


def like_plain_torch(op: ModuleType, run: Callable[[int, str], dict[str, Tensor]]) -> Check:
    """The kernels of `op` give what it gives without them, bit for bit."""

    def compare(seed: int, device: str) -> None:
        found = run(seed, device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(op, "runs_kernels", lambda _: False)
            expected = run(seed, "cpu")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name].cpu(), value), name

    return compare


def check_changes(seed: int, device: str) -> None:
    check_passes(seed, device, num_drafts=(1, 2, 3, 7)[seed % 4], has_holes=seed % 5 == 3)


SEEDED: dict[str, tuple[Check, int, int, int]] = {
    "rows that remain are packed": (lambda seed, device: check(make_case(seed, device)), 40, 8, 30),
    "gathers equal indexing": (check_gather, 12, 7, 12),
    "places are found and spread again": (check_positions, 15, 6, 15),
    "wanted rows that are left": (check_wanted, 40, 15, 30),
    "selection of a block's positions": (check_selection, 24, 7, 24),
    "state of a block": (check_state, 30, 3, 12),
    "changes of logits": (check_changes, 14, 4, 24),
    "rows of a pass": (like_plain_torch(step_rows, lambda *of: Case(*of).run()), 0, 8, 150),
    "a commit of many tokens": (like_plain_torch(step_rows, lambda _, device: commit_many(device)), 0, 1, 1),
    "a pass over blocks": (like_plain_torch(block_step, lambda *of: blocks.run(blocks.Case(*of))), 0, 8, 150),
}
"""Each compares an op with its reference or definition, or kernels with plain torch. The numbers of seeds: in
plain torch, in the interpreter, on a GPU."""


def seeds(column: int) -> list[tuple[str, int]]:
    """The seeds of every check in a column of `SEEDED`, the first ones of all before the second ones."""
    numbered = [(name, seed) for name, row in SEEDED.items() for seed in range(row[column])]
    return sorted(numbered, key=lambda one: one[1])
