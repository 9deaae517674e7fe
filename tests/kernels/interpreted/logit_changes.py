"""The kernels of logit_changes in Triton's interpreter: started by test_interpreted.py."""

from __future__ import annotations

import pytest

from tests.kernels.drafts.changed_rows import check_passes


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize("seed", range(4))
def test_kernels_equal_the_definition(seed: int) -> None:
    check_passes(seed, "cpu", num_drafts=1 + seed % 4, has_holes=seed % 4 == 3)
