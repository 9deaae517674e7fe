"""The definition of the op in fp64, one row at a time.

Shapes: R rows of the pass, X wanted rows, V vocabulary, D width."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from idlm.kernels.masked_logits.types import Proposals


def masked_logits_reference(
    hidden_RD: Tensor, rows_X: Tensor, weight_VD: Tensor, *, forbidden_ids: Sequence[int] = ()
) -> Proposals:
    """See `masked_logits`; logits are not rounded."""
    found = []
    for row in rows_X.tolist():
        logits = [] if row < 0 else (weight_VD.double() @ hidden_RD[row].double()).tolist()
        found.append(_row(logits, set(forbidden_ids)) if logits else (0, 0.0, False, 0.0))
    values = list(zip(*found, strict=True)) or [()] * 4
    return Proposals(
        token_X=torch.tensor(values[0], dtype=torch.int64),
        own_X=torch.tensor(values[1], dtype=torch.float64),
        is_nonfinite_X=torch.tensor(values[2], dtype=torch.bool),
        entropy_X=torch.tensor(values[3], dtype=torch.float64),
    )


def _row(logits: list[float], forbidden: set[int]) -> tuple[int, float, bool, float]:
    """(token, its probability, whether there is no distribution, entropy)."""
    allowed = {token: logit for token, logit in enumerate(logits) if token not in forbidden}
    largest = max(allowed.values(), default=-math.inf)
    if not math.isfinite(largest) or any(math.isnan(logit) for logit in allowed.values()):
        return 0, 0.0, True, 0.0
    weights = {token: math.exp(logit - largest) for token, logit in allowed.items()}
    total = sum(weights.values())
    entropy = -sum(w / total * math.log(w / total) for w in weights.values() if w > 0)
    token = min(token for token, logit in allowed.items() if logit == largest)
    return token, 1.0 / total, False, entropy
