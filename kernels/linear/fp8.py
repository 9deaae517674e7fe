"""fp8 weights (e4m3) with one scale per output channel; lossy, and half the bytes of bf16.

Weights only: they are widened to the dtype of the activations in registers, products and sums are as ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """`values_ED` e4m3, `scale_E` fp32: the weight is values * scale."""

    values_ED: Tensor
    scale_E: Tensor

    def __len__(self) -> int:
        return len(self.values_ED)

    @property
    def shape(self) -> torch.Size:
        return self.values_ED.shape

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The weight it stands for, in `dtype`."""
        return (self.values_ED.to(torch.float32) * self.scale_E[:, None]).to(dtype)


def quantise_fp8(weight_ED: Tensor) -> Fp8Weight:
    """Round to e4m3, the largest of every output channel at the top of its range; a zero channel stays so."""
    largest_E = weight_ED.abs().amax(dim=1).to(torch.float32)
    scale_E = torch.where(largest_E > 0, largest_E / LARGEST, 1.0)
    scaled_ED = (weight_ED.to(torch.float32) / scale_E[:, None]).clamp(-LARGEST, LARGEST)
    return Fp8Weight(values_ED=scaled_ED.to(FP8), scale_E=scale_E)
