"""fp8 weights (e4m3) with one scale per output channel; lossy, and half the bytes of bf16.

Only weights are fp8: they are widened to the dtype of the activations, and products and sums are unchanged.
Scales are powers of two, so a dequantised weight has four significant bits, bf16 and fp32 hold it exactly,
and kernel and library compute with the same weights. A finer scale would not make e4m3 more precise. R rows,
D input width, E output width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.kernels.backend import FP8, library_linear

LARGEST = 448.0
MANTISSA = 0x7FFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """`values_ED` e4m3, `scale_E` fp32 powers of two: the weight is values * scale."""

    values_ED: Tensor
    scale_E: Tensor

    def __len__(self) -> int:
        return len(self.values_ED)

    @property
    def shape(self) -> torch.Size:
        return self.values_ED.shape

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The dequantised weight in `dtype`."""
        return self.values_ED.to(dtype).mul_(self.scale_E.to(dtype)[:, None])

    def linear(self, x_RD: Tensor, bias_E: Tensor | None) -> Tensor:
        """x W^T (+ bias), [R, E], by the library, with a temporary copy of the weight in the dtype of x.

        Scaling outputs by powers of two gives the same bits as scaling weights at a fraction of the traffic,
        but unscaled outputs may exceed the range of fp16."""
        if x_RD.dtype == torch.float16:
            return library_linear(x_RD, self.widened(x_RD.dtype), bias_E=bias_E)
        scale_E = self.scale_E.to(x_RD.dtype)
        small_E = None if bias_E is None else bias_E / scale_E
        return library_linear(x_RD, self.values_ED.to(x_RD.dtype), bias_E=small_E).mul_(scale_E)


def quantise_fp8(weight_ED: Tensor) -> Fp8Weight:
    """Round to e4m3, with the largest value of every output channel in the top octave of the range; a zero
    channel stays zero. Needs a temporary fp32 copy of the weight."""
    scaled_ED = weight_ED.to(torch.float32, copy=True)
    largest_E = torch.maximum(scaled_ED.amax(dim=1), -scaled_ED.amin(dim=1))
    scale_E = torch.where(largest_E > 0, _power_of_two_above(largest_E / LARGEST), 1.0)
    scaled_ED.div_(scale_E[:, None]).clamp_(-LARGEST, LARGEST)
    return Fp8Weight(values_ED=scaled_ED.to(FP8), scale_E=scale_E)


def _power_of_two_above(x_E: Tensor) -> Tensor:
    """The smallest power of two >= x > 0, computed on bits, so exact on every device."""
    return ((x_E.view(torch.int32) + MANTISSA) & ~MANTISSA).view(torch.float32)


def dequantised(values_ED: Tensor, scale_E: Tensor) -> Tensor:
    """The fp32 weight that an fp8 weight represents."""
    return values_ED.to(torch.float32) * scale_E[:, None]
