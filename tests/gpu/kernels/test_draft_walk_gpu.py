"""The kernels of draft_walk on a GPU against the definition of a walk; in 16 bits what is stored is drawn."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases.draft_walk import Case
from tests.kernels.references.draft_walk import candidates_reference, walk_reference


@pytest.mark.parametrize("seed", range(6))
def test_walks_on_a_gpu(seed: int) -> None:
    case, filters = Case(seed, "cuda", num_tokens=9000, num_drafts=7), seed % 2 == 0
    found = case.candidates()
    for m, row in enumerate(case.rows_BJ.flatten().tolist()):
        if row >= 0:
            assert found.ids_MK[m].tolist() == candidates_reference(case.logits_XV[row].cpu())
    drafts_ZJ, q_ZJV, store = case.run(filters=filters)
    expected_ZJ, expected_ZJV = walk_reference(case, filters=filters)
    assert torch.equal(drafts_ZJ.cpu(), expected_ZJ)
    torch.testing.assert_close(q_ZJV.cpu(), expected_ZJV, atol=2e-6, rtol=0)
    case.check_draws(store, q_ZJV)


def test_sixteen_bits_draw_from_what_they_store() -> None:
    """Frequencies of drafts after the anchor, by numbers that are spread evenly."""
    case = Case(1, "cuda", num_tokens=4000, num_drafts=1, dtype=torch.bfloat16)
    counts_ZV, num = torch.zeros(7, 4000, dtype=torch.float64, device="cuda"), 400
    for index in range(num):
        case.uniforms_BJ.fill_((index + 0.5) / num)
        drafts_ZJ, q_ZJV, _ = case.run(filters=True)
        is_drawn_Z = drafts_ZJ[:, 0] >= 0
        counts_ZV[is_drawn_Z, drafts_ZJ[is_drawn_Z, 0]] += 1 / num
    assert (counts_ZV - q_ZJV[:, 0]).abs().max() <= 1.01 / num
