"""Norm and rotation in plain torch, as stock models of transformers compute them.

R rows, J heads, H head dim."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in fp32, cast back, then scale; `weight` broadcasts from the right."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def rotate(x_RJH: Tensor, cos_R1H: Tensor, sin_R1H: Tensor) -> Tensor:
    """Rotary embedding in the rotate-half layout; sin carries the sign of the swapped halves."""
    swapped_RJH = torch.roll(x_RJH, x_RJH.shape[-1] // 2, dims=-1)
    return x_RJH * cos_R1H + swapped_RJH * sin_R1H
