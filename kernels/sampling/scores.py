"""Scores of whole distributions that orders of full diffusion sort by: entropy, and lead of the best token.

Plain torch over rows of logits on every device, [X, V] in fp32 on a GPU and fp64 on a CPU: callers pass
slices.
Shapes: X rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from idlm.kernels.sampling.types import PlainProbs, Probs


def row_entropy(probs: Probs, takes_own_X: Tensor) -> Tensor:
    """Entropy (nats, fp64 [X]) of every row's distribution, or of the model's own (temperature 1, no filters)
    where `takes_own_X` (bool). `probs` must be computed with `own`.
    """
    if isinstance(probs, PlainProbs):
        return torch.special.entr(_plain(probs, takes_own_X)).sum(-1)
    weights_XV, exponents_XV = _weights(probs, takes_own_X)
    mass_X = weights_XV.double().sum(-1)
    # entropy = ln mass - sum(w ln w) / mass, with exponents in powers of two.
    mean_X = torch.where(weights_XV > 0, weights_XV * exponents_XV, 0.0).double().sum(-1) / mass_X
    return mass_X.log() - math.log(2) * mean_X


def row_margin(probs: Probs, takes_own_X: Tensor) -> Tensor:
    """Difference (fp64 [X]) of the two largest probabilities of every row; see `row_entropy`."""
    if isinstance(probs, PlainProbs):
        best_X2 = _plain(probs, takes_own_X).topk(2, dim=-1).values
        return best_X2[:, 0] - best_X2[:, 1]
    weights_XV, _ = _weights(probs, takes_own_X)
    best_X2 = weights_XV.topk(2, dim=-1).values.double()
    return (best_X2[:, 0] - best_X2[:, 1]) / weights_XV.double().sum(-1)


def _plain(probs: PlainProbs, takes_own_X: Tensor) -> Tensor:
    assert probs.own_XV is not None, "these probs lack the model's own"
    return torch.where(takes_own_X[:, None], probs.own_XV, probs.probs_XV)


def _weights(probs: Probs, takes_own_X: Tensor) -> tuple[Tensor, Tensor]:
    """Unnormalised probabilities [X, V] relative to the largest, 0 for dropped tokens; their exponents."""
    assert not isinstance(probs, PlainProbs)
    max_X, scale_X, threshold_X, tie_id_X = probs.numbers_XF[:, :4].unbind(1)
    scale_X = torch.where(takes_own_X, math.log2(math.e), scale_X)
    logits_XV = probs.logits_XV.float()
    exponents_XV = (logits_XV - max_X[:, None].float()) * scale_X[:, None].float()
    ids_V = torch.arange(logits_XV.shape[1], device=logits_XV.device)
    threshold_X1 = threshold_X[:, None].float()
    is_kept_XV = (logits_XV > threshold_X1) | ((logits_XV == threshold_X1) & (ids_V <= tie_id_X[:, None]))
    is_kept_XV |= takes_own_X[:, None]
    return torch.where(is_kept_XV, exponents_XV.exp2(), 0.0), exponents_XV
