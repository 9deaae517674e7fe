"""The definition of a walk over drafts, one draft at a time, in fp64. Z lanes, J drafts, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.kernels.references.sampling import probs_reference

if TYPE_CHECKING:
    from tests.kernels.cases.draft_walk import Case

NUM_CANDIDATES = 16


def candidates_reference(logits_V: Tensor) -> list[int]:
    """The likeliest tokens, lower ids first among equal ones."""
    return sorted(range(len(logits_V)), key=lambda token: (-float(logits_V[token]), token))[:NUM_CANDIDATES]


def walk_reference(case: Case, *, filters: bool) -> tuple[Tensor, Tensor]:
    """Drafts [Z, J], -5 where none is drawn, and distributions [Z, J, V] that they are drawn from: candidates
    first, then the other tokens by id, unless temperature 0 or filters leave the candidates alone."""
    num_lanes = len(case.settings[0])
    drafts_ZJ = torch.full((num_lanes, case.num_drafts), -5)
    q_ZJV = torch.zeros(num_lanes, case.num_drafts, case.num_tokens, dtype=torch.float64)
    previous_VW, candidate_VW = case.scored.previous_VW.double(), case.scored.candidate_VW.double()
    for b, lane in enumerate(case.lanes_B.tolist()):
        previous = int(case.scored.anchors_B[b])
        settings = [float(setting[lane]) for setting in case.settings]
        if not filters:
            settings[1:] = 0, 1.0, 0.0
        for j, row in enumerate(case.rows_BJ[b].tolist()):
            if row < 0:
                continue
            ids = candidates_reference(case.logits_XV[row])
            projected_W = case.scored.projected_MW[b * case.num_drafts + j].double()
            query_W = previous_VW[previous] * projected_W
            scores = [float(case.logits_XV[row, i]) + float(query_W @ candidate_VW[i]) for i in ids]
            temperature, top_k, top_p, min_p = settings
            if temperature > 0 and (not 0 < top_k < case.num_tokens, top_p, min_p) == (True, 1.0, 0.0):
                rest = [token for token in range(case.num_tokens) if token not in ids]
                scores += [float(case.logits_XV[row, token]) for token in rest]
                ids += rest
            q_K = probs_reference(
                torch.tensor([scores], dtype=torch.float64),
                torch.tensor([temperature]),
                torch.tensor([int(top_k)]),
                torch.tensor([top_p]),
                torch.tensor([min_p]),
            )[0]
            reached = (q_K.cumsum(0) > float(case.uniforms_BJ[b, j])) & (q_K > 0)
            previous = ids[int(reached.long().argmax())]
            drafts_ZJ[lane, j] = previous
            q_ZJV[lane, j, torch.tensor(ids)] = q_K
    return drafts_ZJ, q_ZJV
