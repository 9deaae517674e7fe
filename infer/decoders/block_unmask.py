"""Which masked positions of a block a denoising pass decides: strategies, each a small function of tensors.

Names and rules are those of SDAR (arXiv 2510.06303 and its code), with two departures: quotas never exceed
the masks that are left (there, they would overwrite the prompt), and `entropy_bounded` is written from its
description. Static shapes; nothing waits for the device.
Ties, on every device: among positions with bitwise equal confidence the left one is decided first, and among
equally likely tokens the one with the lower id. Confidences that are equal up to rounding (on a block of
nothing but MASKs) are not ties: rounding decides between them. `sequential` has no such case.
Shapes: B sequences, W positions of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from idlm.kernels.block_step import Masks
from idlm.registry import Registry


class Unmasking(ABC):
    """Chooses the masks to decide, at least one in every sequence that has any. `reads`: the options among
    threshold, entropy_bound and steps that it uses."""

    needs_entropy: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ("steps",)

    @abstractmethod
    def choose(self, masks: Masks) -> Tensor:
        """Bool [B, W], a subset of `is_maskable_BW`."""


UNMASKINGS: Registry[type[Unmasking]] = Registry("unmasking_strategy", None)


def ranks(keys_BW: Tensor, is_maskable_BW: Tensor) -> Tensor:
    """How many maskable positions come before each: larger keys first, the left one of equal keys first.

    Compares all W * W pairs: a sort is not stable on every device, and W is small."""
    index_W = torch.arange(keys_BW.shape[1], device=keys_BW.device)
    mine_BW1, other_B1W = keys_BW[:, :, None], keys_BW[:, None, :]
    is_left_WW = index_W[None, :] < index_W[:, None]
    is_before_BWW = (other_B1W > mine_BW1) | ((other_B1W == mine_BW1) & is_left_WW)
    return (is_before_BWW & is_maskable_BW[:, None, :]).sum(-1)


@UNMASKINGS.register("sequential")
class Sequential(Unmasking):
    """The leftmost, as many as the quota."""

    def choose(self, masks: Masks) -> Tensor:
        return masks.is_maskable_BW & (masks.is_maskable_BW.long().cumsum(-1) <= masks.quota_B[:, None])


@UNMASKINGS.register("low_confidence_static")
class Static(Unmasking):
    """The most confident, as many as the quota; the others stay masked."""

    def choose(self, masks: Masks) -> Tensor:
        return masks.is_maskable_BW & (
            ranks(masks.confidence_BW, masks.is_maskable_BW) < masks.quota_B[:, None]
        )


@UNMASKINGS.register("low_confidence_dynamic")
class Dynamic(Static):
    """All masks whose confidence is above the threshold (strictly: 1 means one token per quota)."""

    reads: ClassVar[tuple[str, ...]] = ("threshold", "steps")

    def choose(self, masks: Masks) -> Tensor:
        """The most confident ones where fewer than the quota are above it."""
        passes_BW = masks.is_maskable_BW & (masks.confidence_BW > masks.threshold_B[:, None])
        min_B = torch.minimum(masks.quota_B, masks.is_maskable_BW.sum(-1))
        return torch.where((passes_BW.sum(-1) >= min_B)[:, None], passes_BW, super().choose(masks))


@UNMASKINGS.register("entropy_bounded")
class EntropyBounded(Unmasking):
    """The masks of lowest entropy while their sum is below the bound; at least one, without a quota."""

    needs_entropy: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("entropy_bound",)

    def choose(self, masks: Masks) -> Tensor:
        assert masks.entropy_BW is not None
        is_maskable_BW = masks.is_maskable_BW
        rank_BW = ranks(-masks.entropy_BW, is_maskable_BW)
        is_counted_BWW = (rank_BW[:, None, :] <= rank_BW[:, :, None]) & is_maskable_BW[:, None, :]
        sums_BW = torch.where(is_counted_BWW, masks.entropy_BW[:, None, :], 0.0).sum(-1)
        return is_maskable_BW & ((sums_BW < masks.entropy_bound_B[:, None]) | (rank_BW == 0))
