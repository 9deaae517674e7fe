"""Which masks of the active block a full-diffusion pass decides: orders, each a score and a quota.

`low_confidence` and `random` are LLaDA's (arXiv 2502.09992, section 2.4 and its code), with the same number
of tokens in every pass. `maskgit_plus`, `topk_margin`, `entropy` and `origin` are Dream's (arXiv 2508.15487
and its code), whose passes follow the times 1 .. `FIRST_TIME` of its diffusion.
Departures: Dream's code averages the number of masks over the batch, here every request counts its own; times
are fp64, not fp32; a greedy request's scores are under the model's own distribution, without top-k and top-p;
top-p is the mass among the top-k tokens, where Dream's code cuts the whole distribution by top-p first.
Exact ties go to the left position.
Shapes: B sequences, W positions of a block, Y rows of a slice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from idlm.kernels.sampling import Probs, row_entropy, row_margin
from idlm.registry import Registry

FIRST_TIME = 1e-3
"""The time of the clean end, `eps` in Dream's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The tokens drawn for rows [Y]. `confidence_Y` (fp64): their probability, as `Order.always_own` says;
    `is_greedy_Y` (bool): of temperature 0. The distributions are `probs`, or for the best tokens of a head
    that stores none `entropy_Y` alone, if the order reads it."""

    confidence_Y: Tensor
    is_greedy_Y: Tensor
    probs: Probs | None = None
    entropy_Y: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """How far each sequence's block is, int64 [B]: passes so far, passes in all, its positions, and the masks
    that are left."""

    pass_B: Tensor
    num_passes_B: Tensor
    size_B: Tensor
    num_masks_B: Tensor


class Order(ABC):
    """The order in which masks are decided: largest score first, and by default as many as Dream's times say.

    `always_own`: the confidence is under the model's own distribution, not under the request's.
    `has_threshold`: scores are probabilities. `is_random`: the score is a random number of the position.
    `reads`: what the score is a function of; other than of the token's probability, it needs copies of the
    logits, where these are stored. `flips`: only masks whose random number is below `flip_chance` are
    decided."""

    always_own: ClassVar[bool] = False
    has_threshold: ClassVar[bool] = False
    is_random: ClassVar[bool] = False
    reads: ClassVar[Literal["token", "entropy", "row"]] = "token"
    flips: ClassVar[bool] = False

    @abstractmethod
    def score(self, drawn: Drawn) -> Tensor:
        """fp64 [Y]; not called if `is_random`."""

    def quota(self, quota: Quota) -> Tensor:
        """Masks to decide in this pass, int64 [B]: the chance of a flip times the masks that are left,
        rounded down; a pass may decide none."""
        return (quota.num_masks_B.double() * flip_chance(quota)).long()


ORDERS: Registry[type[Order]] = Registry("order", None)


def time_of(pass_B: Tensor, num_passes_B: Tensor) -> Tensor:
    """Time before a pass, fp64: 1 before the first, `FIRST_TIME` after the last."""
    return 1.0 + (FIRST_TIME - 1.0) * pass_B.double() / num_passes_B.double()


def flip_chance(quota: Quota) -> Tensor:
    """Chance of a mask to be decided in this pass, fp64 [B]: 1 - s / t, and 1 in the last pass."""
    chance_B = 1.0 - time_of(quota.pass_B + 1, quota.num_passes_B) / time_of(quota.pass_B, quota.num_passes_B)
    return torch.where(quota.pass_B + 1 >= quota.num_passes_B, 1.0, chance_B)


@ORDERS.register("low_confidence")
class LowConfidence(Order):
    """The most confident tokens; the others stay masked (LLaDA's low-confidence remasking)."""

    always_own: ClassVar[bool] = True
    has_threshold: ClassVar[bool] = True

    def score(self, drawn: Drawn) -> Tensor:
        return drawn.confidence_Y

    def quota(self, quota: Quota) -> Tensor:
        """The same number in every pass; the first passes decide what is left over by the division."""
        min_B = quota.size_B // quota.num_passes_B
        return min_B + (quota.pass_B < quota.size_B % quota.num_passes_B).long()


@ORDERS.register("random")
class Random(LowConfidence):
    """Any masks."""

    has_threshold: ClassVar[bool] = False
    is_random: ClassVar[bool] = True


@ORDERS.register("maskgit_plus")
class MaskgitPlus(Order):
    """The most confident tokens, under the request's distribution."""

    has_threshold: ClassVar[bool] = True

    def score(self, drawn: Drawn) -> Tensor:
        return drawn.confidence_Y


@ORDERS.register("topk_margin")
class TopkMargin(MaskgitPlus):
    """The largest margin of the most likely token over the second."""

    reads: ClassVar[Literal["token", "entropy", "row"]] = "row"

    def score(self, drawn: Drawn) -> Tensor:
        assert drawn.probs is not None, "the second best token is not known"
        return row_margin(drawn.probs, drawn.is_greedy_Y)


@ORDERS.register("entropy")
class Entropy(MaskgitPlus):
    """Where the distribution is the most certain."""

    has_threshold: ClassVar[bool] = False
    reads: ClassVar[Literal["token", "entropy", "row"]] = "entropy"

    def score(self, drawn: Drawn) -> Tensor:
        """Negative entropy, in nats."""
        if drawn.probs is None:
            assert drawn.entropy_Y is not None
            return -drawn.entropy_Y
        return -row_entropy(drawn.probs, drawn.is_greedy_Y)


@ORDERS.register("origin")
class Origin(Random):
    """Every mask flips with the same chance: the reverse process of the diffusion itself."""

    flips: ClassVar[bool] = True

    def quota(self, quota: Quota) -> Tensor:
        """All masks: which of them flip is drawn (`flip_chance`)."""
        return quota.num_masks_B


def factor_quota(scores_BW: Tensor, is_maskable_BW: Tensor, factor_B: Tensor) -> Tensor:
    """The largest n, at least 1, with (n + 1) * (1 - c_n) < factor for the n-th largest score c_n of the
    maskable positions, int64 [B] (Fast-dLLM, arXiv 2505.22618, factor-based decoding)."""
    scores_BW = torch.where(is_maskable_BW, scores_BW, -torch.inf).sort(dim=-1, descending=True).values
    number_W = torch.arange(1, scores_BW.shape[1] + 1, device=scores_BW.device)
    # The left side grows with n, so that counting gives the largest.
    return ((number_W + 1) * (1 - scores_BW) < factor_B[:, None]).sum(-1).clamp(min=1)


def choose(scores_BW: Tensor, is_maskable_BW: Tensor, quota_B: Tensor) -> Tensor:
    """The `quota_B` maskable positions with the largest scores (fp64, -inf allowed), bool [B, W]."""
    # Below every score, so that a position with score -inf still comes before those that are not maskable.
    keys_BW = torch.where(is_maskable_BW, scores_BW.clamp(min=torch.finfo(torch.float64).min), -torch.inf)
    order_BW = keys_BW.sort(dim=-1, descending=True, stable=True).indices
    positions_W = torch.arange(keys_BW.shape[1], device=keys_BW.device)
    rank_BW = torch.empty_like(order_BW).scatter_(1, order_BW, positions_W.expand_as(order_BW))
    return is_maskable_BW & (rank_BW < quota_B[:, None])
