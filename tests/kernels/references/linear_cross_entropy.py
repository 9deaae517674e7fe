"""The definition of the op: all logits at once, in fp32 or, for fp64 input, fp64. Formula in README.md.

M rows, D width, V vocabulary."""

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


def linear_distillation_reference(
    draft_MD: Tensor,
    verify_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    coefficients_M: Tensor,
    *,
    divergence: str,
    share: float,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(weighted loss, scalar; negative log-likelihood [M], detached); no gradient through `verify_MD`."""
    dtype = torch.float64 if draft_MD.dtype == torch.float64 else torch.float32
    bias = None if bias_V is None else bias_V.to(dtype)
    log_q_MV, log_p_MV = (
        torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype), b).log_softmax(dim=-1)
        for hidden, weight, b in (
            (draft_MD, weight_VD, bias),
            (verify_MD.detach(), weight_VD.detach(), None if bias is None else bias.detach()),
        )
    )
    nll_M = -log_q_MV.gather(1, labels_M[:, None])[:, 0]
    lost_M = 1 - torch.minimum(log_q_MV.exp(), log_p_MV.exp()).sum(dim=-1)
    if divergence == "kl":
        lost_M = torch.nn.functional.kl_div(log_q_MV, log_p_MV, reduction="none", log_target=True).sum(dim=-1)
    return (coefficients_M.to(dtype) * ((1 - share) * nll_M + share * lost_M)).sum(), nll_M.detach()
