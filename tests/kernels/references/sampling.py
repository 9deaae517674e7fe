"""The definition of the ops in fp64: distributions, draws, the test of drafts and the correction.

Slow and obvious: Python lists, one token at a time; `emitted_reference` alone works on tensors. A draft x ~ q
is accepted with probability min(1, (1+tau) p(x)/q(x)); a rejected one is replaced by a draw from
normalise(max(0, p - q)). With tau = 0 the emitted token has exactly the distribution p (Leviathan et al.
2023; arXiv 2604.11035, Algorithm 1), PROVIDED that x was drawn from that very q: the published rule drafts by
argmax and is biased. X rows, B pairs of distributions, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from idlm.kernels.sampling.types import ChunkShape, PlainProbs, Probs


def probs_reference(
    logits_XV: Tensor, temperature_X: Tensor, top_k_X: Tensor, top_p_X: Tensor, min_p_X: Tensor
) -> Tensor:
    """The distribution [X, V] (fp64) of every row under its own settings, as defined in README.md.

    The order is temperature, top-k, top-p, min-p, as in transformers. Temperature 0 gives all mass to the
    token with the largest logit (ties: lowest id), which makes greedy decoding an ordinary case of the
    accept/residual rule."""
    settings = zip(temperature_X.tolist(), top_k_X.tolist(), top_p_X.tolist(), min_p_X.tolist(), strict=True)
    probs = [
        _row_probs(row, *setting) for row, setting in zip(logits_XV.double().tolist(), settings, strict=True)
    ]
    return torch.tensor(probs, dtype=torch.float64).view(logits_XV.shape)


def _row_probs(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
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


def draw_reference(probs: Sequence[float], uniform: float) -> int:
    """The first token whose cumulated probability exceeds `uniform` of the whole."""
    target, total = uniform * math.fsum(probs), 0.0
    for token, probability in enumerate(probs):
        total += probability
        if probability > 0 and total > target:
            return token
    return max(token for token, probability in enumerate(probs) if probability > 0)


def residual_reference(p: Sequence[float], q: Sequence[float]) -> list[float]:
    """The distribution that replaces a rejected draft: max(0, p - q), normalised; p itself if that has no
    mass."""
    excess = [max(0.0, target - draft) for target, draft in zip(p, q, strict=True)]
    mass = math.fsum(excess)
    return [value / mass for value in excess] if mass > 0 else list(p)


def restricted_reference(q: Sequence[float], allowed: Collection[int], only: int = -1) -> list[float]:
    """q conditioned on allowed tokens, all 0 if it has none of them; that token alone if `only` is not -1."""
    kept = [value if token in allowed else 0.0 for token, value in enumerate(q)]
    mass = math.fsum(kept)
    if only >= 0:
        return [float(token == only) for token in range(len(q))]
    return [value / mass if mass > 0 else 0.0 for value in kept]


def verify_reference(
    p: Sequence[Sequence[float]],
    q: Sequence[Sequence[float]],
    draft_ids: Sequence[int],
    uniforms: Sequence[float],
    tau: float,
) -> int:
    """Number of drafts that are accepted before the first rejection."""
    for index, (token, uniform) in enumerate(zip(draft_ids, uniforms, strict=True)):
        if not uniform * q[index][token] < (1 + tau) * p[index][token]:
            return index
    return len(draft_ids)


def emitted_reference(p_BV: Tensor, q_BV: Tensor, tau: float = 0.0) -> Tensor:
    """The distribution [B, V] of one token after draft, test and correction, by enumeration of all drafts."""
    excess_BV = (p_BV - q_BV).clamp(min=0.0)
    mass_B1 = excess_BV.sum(-1, keepdim=True)
    residual_BV = torch.where(mass_B1 > 0, excess_BV / mass_B1.where(mass_B1 > 0, 1.0), p_BV)
    accepted_BV = q_BV * ((1.0 + tau) * p_BV / q_BV.where(q_BV > 0, 1.0)).clamp(max=1.0)
    return accepted_BV + (1.0 - accepted_BV.sum(-1, keepdim=True)) * residual_BV


def dense_probs(probs: Probs) -> Tensor:
    """The probabilities [X, V] (fp64) that `probs` stands for, all in memory; 0 in rows that have none."""
    if isinstance(probs, PlainProbs):
        return probs.probs_XV
    num_tokens = probs.logits_XV.shape[1]
    max_X1, scale_X1, threshold_X1, tie_X1, mass_X1 = probs.numbers_XF[:, :5, None].unbind(1)
    logits_XV, ids_V = probs.logits_XV.double(), torch.arange(num_tokens, device=mass_X1.device)
    # A stored row has logits only in chunks that have mass.
    chunk = ChunkShape(num_tokens, probs.tuning).chunk
    is_kept_XV = (probs.masses_XC > 0).repeat_interleave(chunk, dim=1)[:, :num_tokens] & (mass_X1 > 0)
    is_kept_XV &= (logits_XV > threshold_X1) | ((logits_XV == threshold_X1) & (ids_V <= tie_X1))
    power_XV = (logits_XV - max_X1) * scale_X1
    return torch.where(is_kept_XV & (power_XV > -126), power_XV.exp2() / mass_X1, 0.0)
