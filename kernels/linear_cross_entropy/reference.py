"""The definition of the op: all logits at once, in fp32 or, for fp64 input, fp64. Formula in README.md.

M rows, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cross_entropy_reference(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    coefficients_M: Tensor,
    *,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(weighted loss, scalar; negative log-likelihood per row [M], detached)."""
    dtype = torch.float64 if hidden_MD.dtype == torch.float64 else torch.float32
    logits_MV = hidden_MD.to(dtype) @ weight_VD.to(dtype).T
    if bias_V is not None:
        logits_MV = logits_MV + bias_V.to(dtype)
    nll_M = logits_MV.logsumexp(dim=-1) - logits_MV.gather(1, labels_M[:, None])[:, 0]
    return (coefficients_M.to(dtype) * nll_M).sum(), nll_M.detach()
