"""Changes of logits in plain torch against their definition."""

from __future__ import annotations

import pytest

from tests.kernels.drafts.changed_rows import check_passes


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize("seed", range(12))
def test_plain_torch_equals_the_definition(seed: int) -> None:
    check_passes(seed, "cpu", num_drafts=1 + seed % 4)


@pytest.mark.parametrize("seed", range(2))
def test_positions_of_a_block_are_not_before_themselves(seed: int) -> None:
    check_passes(seed, "cpu", num_drafts=5, has_holes=True)
