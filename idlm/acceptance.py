"""Accept / residual rule, acceptance rate and tokens per forward: the reference that every kernel is tested
against.

A draft x ~ q is accepted with probability min(1, (1+tau) p(x)/q(x)); a rejected one is replaced by a draw
from normalise(max(0, p - q)). With tau = 0 the emitted token has law p exactly (Leviathan et al. 2023;
arXiv 2604.11035, Algorithm 1), PROVIDED that x was drawn from that very q: the published rule drafts by
argmax and is biased.
Shapes: B sequences, J draft positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def num_accepted(
    p_at_draft_BJ: Tensor, q_at_draft_BJ: Tensor, uniforms_BJ: Tensor, tau_B: Tensor, is_draft_BJ: Tensor
) -> Tensor:
    """Length [B] int64 of the accepted prefix of each sequence's drafts.

    `p_at_draft_BJ`, `q_at_draft_BJ`: both laws at the draft token; `is_draft_BJ` bool marks real drafts (a
    prefix).
    """
    accepts_BJ = uniforms_BJ * q_at_draft_BJ < (1.0 + tau_B[:, None]) * p_at_draft_BJ
    return (accepts_BJ & is_draft_BJ).long().cumprod(-1).sum(-1)


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """The law [B, V] of the replacement of a rejected draft: normalise(max(0, p - q)).

    Where p <= q everywhere (then nothing is ever rejected but for rounding) it is p itself.
    """
    excess_BV = (p_BV - q_BV).clamp(min=0.0)
    mass_B1 = excess_BV.sum(-1, keepdim=True)
    return torch.where(mass_B1 > 0, excess_BV / mass_B1.where(mass_B1 > 0, 1.0), p_BV)


def emitted_probs(p_BV: Tensor, q_BV: Tensor, tau: float = 0.0) -> Tensor:
    """The law [B, V] of one token after draft, test and residual, by enumeration of all drafts."""
    accept_BV = ((1.0 + tau) * p_BV / q_BV.where(q_BV > 0, 1.0)).clamp(max=1.0)
    accepted_BV = q_BV * accept_BV
    return accepted_BV + (1.0 - accepted_BV.sum(-1, keepdim=True)) * residual(p_BV, q_BV)


def acceptance_rate(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """Probability [B] that a draft from q is accepted: sum_x min(p(x), q(x)) = 1 - total variation (paper
    section 2).
    """
    return torch.minimum(p_BV, q_BV).sum(-1)


def cumulative_acceptance(acceptance_J: Sequence[float]) -> list[float]:
    """P_1..P_J: probability that the first k drafts all pass, from the per-position acceptance p_1..p_J."""
    products, product = [], 1.0
    for acceptance in acceptance_J:
        product *= acceptance
        products.append(product)
    return products


def tokens_per_forward_cold(acceptance_J: Sequence[float]) -> float:
    """Tokens per forward of the paper's rule, eq. 3: (2 + P_1 + .. + P_{N-2}) / (2 - P_{N-1}); J = N-1
    positions.
    """
    if not acceptance_J:
        return 1.0
    products = cumulative_acceptance(acceptance_J)
    return (2.0 + sum(products[:-1])) / (2.0 - products[-1])


def tokens_per_forward_branch(acceptance_J: Sequence[float]) -> float:
    """Tokens per forward when every rejection point has masks of its own: 1 + P_1 + .. + P_{N-1}."""
    return 1.0 + sum(cumulative_acceptance(acceptance_J))
