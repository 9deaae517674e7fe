"""Random walks for the tests of draft_walk: mask rows, rows of other drafts, and inactive sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.draft_walk import Candidates, Walk, top_candidates, walk
from idlm.kernels.sampling import draft_probs, draw_stored, put, row_probs
from idlm.kernels.sampling.types import Drafts, Tuning
from tests.kernels.cases.sampling_steps import stored_probs
from tests.kernels.references.draft_walk import candidates_reference, walk_reference

NUM_LANES = 7


class Case:
    """`num_sequences` of `num_drafts` drafts over a vocabulary, every third row -1; settings by lane."""

    def __init__(
        self,
        seed: int,
        device: str,
        *,
        num_tokens: int = 300,
        num_drafts: int = 3,
        width: int = 24,
        dtype: torch.dtype = torch.float32,
        tuning: Tuning | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        num_sequences = NUM_LANES - 1
        num_rows = num_sequences * (num_drafts + 2)
        self.dtype, self.device, self.tuning = dtype, device, tuning or Tuning()
        self.num_drafts, self.num_tokens = num_drafts, num_tokens
        self.logits_XV = (3 * normal(num_rows, num_tokens)).to(dtype)
        # Equal logits, whose order is that of their ids.
        self.logits_XV[:, 1::2] = self.logits_XV[:, : num_tokens // 2].clone()
        order = torch.randperm(num_rows, generator=generator)[: num_sequences * num_drafts]
        rows_M = order.where(torch.arange(len(order)) % 3 != 2, -1)
        self.rows_BJ = rows_M.view(num_sequences, num_drafts).to(device)
        self.rows_BJ[-1] = -1
        self.lanes_B = torch.randperm(NUM_LANES, generator=generator)[:num_sequences].to(device)
        self.scored = Walk(
            previous_VW=normal(num_tokens, width).to(dtype),
            candidate_VW=normal(num_tokens, width).to(dtype),
            projected_MW=(0.3 * normal(len(order), width)).to(dtype),
            anchors_B=torch.randint(num_tokens, (num_sequences,), generator=generator).to(device),
        )
        self.uniforms_BJ = torch.rand(num_sequences, num_drafts, dtype=torch.float64, generator=generator)
        self.uniforms_BJ = self.uniforms_BJ.to(device)
        self.settings = (
            torch.tensor([1.0, 0.7, 0.0, 1.3, 1.0, 0.9, 2.0], dtype=torch.float64, device=device),
            torch.tensor([0, 5, 0, 0, 3, 0, 20], device=device),
            torch.tensor([1.0, 1.0, 0.5, 0.8, 0.9, 0.4, 1.0], dtype=torch.float64, device=device),
            torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.3], dtype=torch.float64, device=device),
        )

    def candidates(self) -> Candidates:
        return top_candidates(self.logits_XV, self.rows_BJ.flatten(), 16)

    def run(self, *, filters: bool) -> tuple[Tensor, Tensor, Drafts]:
        """Drafts [Z, J], stored distributions [Z, J, V] and the store."""
        shape = NUM_LANES, self.num_drafts
        store = draft_probs(
            *shape, self.num_tokens, dtype=self.dtype, device=torch.device(self.device), tuning=self.tuning
        )
        drafts_ZJ = torch.full(shape, -5, device=self.device)
        lanes_X = torch.zeros(len(self.logits_XV), dtype=torch.int64, device=self.device)
        is_draft_BJ = self.rows_BJ >= 0
        lanes_X[self.rows_BJ[is_draft_BJ]] = self.lanes_B[:, None].expand_as(self.rows_BJ)[is_draft_BJ]
        settings = (setting[lanes_X] for setting in self.settings)
        probs = row_probs(self.logits_XV, *settings, filters=filters, tuning=self.tuning)
        put(store, self.lanes_B, probs, self.rows_BJ, active_B=is_draft_BJ.any(1))
        walk(
            self.scored,
            self.candidates(),
            store,
            self.settings,
            filters=filters,
            rows_BJ=self.rows_BJ,
            lanes_B=self.lanes_B,
            uniforms_BJ=self.uniforms_BJ,
            drafts_ZJ=drafts_ZJ,
            tuning=self.tuning,
        )
        return drafts_ZJ, stored_probs(store, self.tuning), store

    def check(self, *, filters: bool) -> None:
        """Candidates, drafts and what is stored are those of the definitions; draws follow the store."""
        found = self.candidates()
        for m, row in enumerate(self.rows_BJ.flatten().tolist()):
            if row >= 0:
                assert found.ids_MK[m].tolist() == candidates_reference(self.logits_XV[row].cpu())
                assert torch.equal(found.logits_MK[m], self.logits_XV[row, found.ids_MK[m]])
        drafts_ZJ, q_ZJV, store = self.run(filters=filters)
        expected_ZJ, expected_ZJV = walk_reference(self, filters=filters)
        assert torch.equal(drafts_ZJ.cpu(), expected_ZJ)
        torch.testing.assert_close(q_ZJV.cpu(), expected_ZJV, atol=2e-6, rtol=0)
        self.check_draws(store, q_ZJV)

    def check_draws(self, store: Drafts, q_ZJV: Tensor) -> None:
        """Draws from the store follow what it holds."""
        ids_BJ = draw_stored(store, self.lanes_B, self.uniforms_BJ[:, :, None], tuning=self.tuning)[:, :, 0]
        reached_BJV = q_ZJV[self.lanes_B].cumsum(-1) > self.uniforms_BJ[:, :, None].to(q_ZJV.device)
        expected_BJ = reached_BJV.long().argmax(-1)
        is_drawn_BJ = self.rows_BJ >= 0
        assert torch.equal(ids_BJ[is_drawn_BJ], expected_BJ[is_drawn_BJ].to(ids_BJ.device))
