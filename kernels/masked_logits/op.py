"""The best token of every wanted row and its probability, from hidden states and the output head, by a kernel
that stores neither logits nor gathered rows. Contract in README.md.

Shapes: R rows of the pass, X wanted rows, V vocabulary, D width, S forbidden ids."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.backend import INTERPRETED
from idlm.kernels.masked_logits.types import Proposals

FUSED_MAJORS = (9, 10)
"""Compute capabilities whose multiprocessors have the shared memory of the kernel, 192 KiB."""
MAX_VOCABULARY = 1 << 24
"""Token ids pass through fp32, which is exact up to here."""


def has_fused(device: torch.device) -> bool:
    """Whether the kernel runs on a device: a GPU with enough shared memory, or Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETED
    return torch.cuda.get_device_capability(device)[0] in FUSED_MAJORS


@torch.inference_mode()
def masked_logits(
    hidden_RD: Tensor,
    rows_X: Tensor,
    weight_VD: Tensor,
    *,
    forbidden_S: Tensor | None = None,
    entropy: bool = False,
    workspace: Tensor | None = None,
) -> Proposals:
    """Propose a token for row `rows_X[x]` (int64, -1: no row) of `hidden_RD` (fp32, bf16 or fp16).
    The device must be one that `has_fused`.

    Logits are hidden times weight (same dtype, contiguous rows), rounded to that dtype; the token is the
    argmax, ties to the lower id. `forbidden_S`: ids (int64) that have no probability. `entropy`: also return
    it. `workspace` (fp32, flat): where the kernel stores its numbers, of `WORKSPACE_BYTES` + X *
    `WORKSPACE_ROW_BYTES` bytes."""
    assert hidden_RD.dtype == weight_VD.dtype and hidden_RD.shape[1] == weight_VD.shape[1], (
        f"{hidden_RD.dtype=} {weight_VD.dtype=} {hidden_RD.shape=} {weight_VD.shape=}"
    )
    assert hidden_RD.stride(1) == weight_VD.stride(1) == 1, f"{hidden_RD.stride()=} {weight_VD.stride()=}"
    assert len(weight_VD) <= MAX_VOCABULARY and rows_X.is_contiguous(), f"{weight_VD.shape=}"
    assert has_fused(hidden_RD.device), f"the kernel does not run on {hidden_RD.device}"
    from idlm.kernels.masked_logits import launch

    given = hidden_RD, rows_X, weight_VD
    return launch.run(*given, forbidden_S=forbidden_S, entropy=entropy, workspace=workspace)
