"""Walks over drafts in plain torch against their definition; the kernels: interpreted/draft_walk.py."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases.draft_walk import Case
from tests.kernels.references.draft_walk import candidates_reference, walk_reference


@pytest.mark.parametrize("filters", [False, True])
def test_a_walk_follows_its_definition(filters: bool) -> None:
    case = Case(3, "cpu", num_tokens=60)
    found = case.candidates()
    for m, row in enumerate(case.rows_BJ.flatten().tolist()):
        if row >= 0:
            assert found.ids_MK[m].tolist() == candidates_reference(case.logits_XV[row])
    drafts_ZJ, q_ZJV, store = case.run(filters=filters)
    expected_ZJ, expected_ZJV = walk_reference(case, filters=filters)
    assert torch.equal(drafts_ZJ, expected_ZJ)
    torch.testing.assert_close(q_ZJV, expected_ZJV, atol=2e-6, rtol=0)
    case.check_draws(store, q_ZJV)


def test_an_unwritten_lane_stays_as_it_is() -> None:
    drafts_ZJ, q_ZJV, _ = Case(0, "cpu", num_tokens=60).run(filters=False)
    assert bool((drafts_ZJ == -5).any()) and not q_ZJV[drafts_ZJ == -5].any()
