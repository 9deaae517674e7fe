"""Temperature / top-k / top-p / min-p -> one law, used for p and q alike; and drawing from a law: the
reference that the ops of idlm.kernels.sampling are tested against.

The target of every decoder is the warped law, so no token outside it can ever be emitted, not even as a
residual. Laws are fp64: the test `min(1, p/q)` divides them.
Shapes: X rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Warp:
    """Per-row sampling settings. Neutral: temperature 1, top_k 0 (off), top_p 1, min_p 0; temperature 0 is
    greedy.

    `temperature_X`, `top_p_X`, `min_p_X` fp64, `top_k_X` int64.
    """

    temperature_X: Tensor
    top_k_X: Tensor
    top_p_X: Tensor
    min_p_X: Tensor

    def rows(self, index: Tensor) -> Warp:
        """The settings of the rows `index`, in that order."""
        return Warp(
            temperature_X=self.temperature_X[index],
            top_k_X=self.top_k_X[index],
            top_p_X=self.top_p_X[index],
            min_p_X=self.min_p_X[index],
        )


def to_probs(logits_XV: Tensor, warp: Warp) -> Tensor:
    """The probability law [X, V] (fp64, rows sum to 1) that tokens are drawn from and tested against.

    Order: temperature, top-k, top-p, min-p, as in transformers. top-k keeps every token tied with the
    k-th; top-p keeps the shortest prefix of the law, sorted by falling probability (ties: lower id first),
    whose mass reaches top_p. temperature 0 gives the one-hot law of the argmax (ties: lowest id), which
    makes greedy decoding an ordinary case of the accept/residual rule.
    """
    logits_XV = logits_XV.double()
    greedy_X = warp.temperature_X == 0
    # From the maximum down: a tiny temperature then gives -inf for the others, and never inf - inf.
    below_XV = logits_XV - logits_XV.amax(-1, keepdim=True)
    scaled_XV = below_XV / torch.where(greedy_X, 1.0, warp.temperature_X)[:, None]
    probs_XV = _keep_top_p(_keep_top_k(scaled_XV, warp.top_k_X).softmax(-1), warp.top_p_X)
    floor_X = warp.min_p_X * probs_XV.amax(-1)
    probs_XV = probs_XV.where(probs_XV >= floor_X[:, None], 0.0)
    probs_XV = probs_XV / probs_XV.sum(-1, keepdim=True)
    one_hot_XV = torch.zeros_like(probs_XV).scatter_(-1, logits_XV.argmax(-1)[:, None], 1.0)
    return torch.where(greedy_X[:, None], one_hot_XV, probs_XV)


def _keep_top_k(logits_XV: Tensor, top_k_X: Tensor) -> Tensor:
    num_tokens = logits_XV.shape[-1]
    k_X = torch.where(top_k_X > 0, top_k_X, num_tokens).clamp(max=num_tokens)
    kth_X1 = logits_XV.sort(-1, descending=True).values.gather(-1, (k_X - 1)[:, None])
    return logits_XV.masked_fill(logits_XV < kth_X1, -torch.inf)


def _keep_top_p(probs_XV: Tensor, top_p_X: Tensor) -> Tensor:
    sorted_XV, order_XV = probs_XV.sort(dim=-1, descending=True, stable=True)
    mass_before_XV = sorted_XV.cumsum(-1) - sorted_XV
    keep_XV = (mass_before_XV < top_p_X[:, None]) | (top_p_X[:, None] >= 1.0)
    keep_XV[:, 0] = True
    return probs_XV.where(torch.zeros_like(keep_XV).scatter_(-1, order_XV, keep_XV), 0.0)


def draw(probs_XV: Tensor, uniforms_X: Tensor) -> Tensor:
    """One token id per row [X] int64 by inversion; a token of zero mass is never drawn. Rows need not sum to
    1.
    """
    cumulative_XV = probs_XV.cumsum(-1)
    threshold_X1 = uniforms_X[:, None] * cumulative_XV[:, -1:]
    return (cumulative_XV <= threshold_X1).sum(-1)
