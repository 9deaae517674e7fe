"""Rotary embedding of the rows of a pass. R rows, h half of the head dim."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of a pass's rows. `positions_R` int64, `inv_freq_h` fp32 radians per position,
    `scaling` a factor of cos and sin. `tables`: rounded cos and sin [R, 1, h] if no kernel computes them.
    """

    positions_R: Tensor
    inv_freq_h: Tensor
    scaling: float
    tables: tuple[Tensor, Tensor] | None
