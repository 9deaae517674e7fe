"""The definition of the ops, token by token in fp64: laws, draws, the test of drafts and its correction.

Slow and obvious. X rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def probs_reference(
    logits_XV: Tensor, temperature_X: Tensor, top_k_X: Tensor, top_p_X: Tensor, min_p_X: Tensor
) -> Tensor:
    """The law [X, V] fp64 of every row under its own settings."""
    settings = zip(temperature_X.tolist(), top_k_X.tolist(), top_p_X.tolist(), min_p_X.tolist(), strict=True)
    probs = [_law(row, *setting) for row, setting in zip(logits_XV.double().tolist(), settings, strict=True)]
    return torch.tensor(probs, dtype=torch.float64).view(logits_XV.shape)


def _law(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    largest = max(logits)
    if temperature == 0:
        best = logits.index(largest)
        return [float(token == best) for token in range(len(logits))]
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    kept = list(range(len(logits)))
    if top_k > 0:
        kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        kept = [token for token in kept if logits[token] >= kth]
    if top_p < 1:
        mass, before = math.fsum(weights[token] for token in kept), 0.0
        prefix: list[int] = []
        for token in sorted(kept, key=lambda token: (-logits[token], token)):
            if prefix and before >= top_p * mass:
                break
            prefix.append(token)
            before += weights[token]
        kept = prefix
    floor = min_p * max(weights)
    above = {token for token in kept if weights[token] >= floor}
    mass = math.fsum(weights[token] for token in above)
    return [weights[token] / mass if token in above else 0.0 for token in range(len(logits))]


def draw_reference(law: Sequence[float], uniform: float) -> int:
    """The first token whose cumulated probability exceeds `uniform` of the whole."""
    target, total = uniform * math.fsum(law), 0.0
    for token, probability in enumerate(law):
        total += probability
        if probability > 0 and total > target:
            return token
    return max(token for token, probability in enumerate(law) if probability > 0)


def residual_reference(p: Sequence[float], q: Sequence[float]) -> list[float]:
    """What a rejected draft is replaced from: max(0, p - q), normalised; p itself where that is nothing."""
    excess = [max(0.0, target - draft) for target, draft in zip(p, q, strict=True)]
    mass = math.fsum(excess)
    return [value / mass for value in excess] if mass > 0 else list(p)


def verify_reference(
    p: Sequence[Sequence[float]],
    q: Sequence[Sequence[float]],
    draft_ids: Sequence[int],
    uniforms: Sequence[float],
    tau: float,
) -> int:
    """How many drafts are accepted before the first rejection."""
    for place, (token, uniform) in enumerate(zip(draft_ids, uniforms, strict=True)):
        if not uniform * q[place][token] < (1 + tau) * p[place][token]:
            return place
    return len(draft_ids)
