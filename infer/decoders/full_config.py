"""Options of decoder `full`: their meaning, their checks, which of them a request may set; and orders: which
masks of the active block a pass decides, each a score and a quota.

`low_confidence` and `random` are LLaDA's (arXiv 2502.09992, section 2.4 and its code), with the same number
of tokens in every pass. `maskgit_plus`, `topk_margin`, `entropy` and `origin` are Dream's (arXiv 2508.15487
and its code), whose passes follow the times 1 .. `FIRST_TIME` of its diffusion.
Departures: Dream's code averages the number of masks over the batch, here every request counts its own; times
are fp64, not fp32; a greedy request's scores are under the model's own distribution, without top-k and top-p;
top-p is the mass among the top-k tokens, where Dream's code cuts the whole distribution by top-p first.
Exact ties go to the left position.
Shapes: B sequences, W positions of a block, Y rows of a slice, Z lanes."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from idlm.errors import UserError
from idlm.infer.decoders.full_rows import CACHES
from idlm.infer.state.batch import set_lanes, to_device
from idlm.kernels.sampling import Probs, row_entropy, row_margin
from idlm.registry import Registry

MAX_GUIDANCE = 1e4
"""Logits that are mixed in fp32 stay finite."""
REQUEST_OPTIONS = ("steps", "threshold", "factor", "order_temperature", "guidance")
NO_THRESHOLD = 2.0
"""No probability exceeds this."""
NO_FACTOR = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig:
    """`order`: which masks a pass decides; None: entropy for a checkpoint with shifted logits (Dream), else
    low_confidence (LLaDA). `block_length`: the answer is decided in blocks of this length, left to right,
    while every row sees the whole canvas; None: all at once. `steps`: passes for the whole answer; None: one
    for each token. `threshold`: decide every mask whose score is above it, and at least one, in place of the
    quota of `steps`; `factor`: decide the n most confident ones, c_n the least confident of them, for the
    largest n with (n + 1) * (1 - c_n) < factor, and at least one (both Fast-dLLM's, arXiv 2505.22618,
    confidence-aware parallel decoding). `order_temperature`: positions are drawn with probability
    proportional to exp(score / order_temperature) (Dream's `alg_temp`); 0: the largest scores.

    `defer_eos`: stop tokens count as the least confident, so that they do not fill the end of a canvas that
    is decided at once. `forbid_eos`: no stop token is drawn. `guidance`: draw from the logits of a second
    canvas whose prompt is masked, plus (1 + guidance) times what the prompt adds to them (LLaDA's
    `cfg_scale`; 0: off); a pass then feeds twice the rows. `cache`: keys and values that passes read of
    earlier ones (`full_rows.py`; lossy); `cache_refresh`: with cache=delayed, one in this many passes over a
    block feeds the whole canvas. Requests may set `steps`, `threshold`, `factor`,
    `order_temperature` and `guidance`."""

    order: str | None = None
    block_length: int | None = None
    steps: int | None = None
    threshold: float | None = None
    order_temperature: float = 0.0
    defer_eos: bool = False
    forbid_eos: bool = False
    factor: float | None = None
    cache: str | None = None
    cache_refresh: int | None = None
    guidance: float = 0.0


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """Options that may differ between requests: int64 `lengths_Z`, tokens of the whole answer, and `passes_Z`
    of each block; the others fp64."""

    lengths_Z: Tensor
    passes_Z: Tensor
    threshold_Z: Tensor
    factor_Z: Tensor
    order_temperature_Z: Tensor
    guidance_Z: Tensor

    @classmethod
    def empty(cls, num_lanes: int, device: torch.device) -> LaneOptions:
        counts_2Z = torch.ones(2, num_lanes, dtype=torch.int64, device=device)
        return cls(*counts_2Z, *torch.zeros(4, num_lanes, dtype=torch.float64, device=device))

    def admit(self, lanes: list[int], configs: Sequence[FullConfig], lengths: Sequence[int]) -> None:
        thresholds = [NO_THRESHOLD if config.threshold is None else config.threshold for config in configs]
        factors = [NO_FACTOR if config.factor is None else config.factor for config in configs]
        passes = [passes_per_block(config, length) for config, length in zip(configs, lengths, strict=True)]
        set_lanes(
            to_device(lanes, self.passes_Z.device),
            (self.lengths_Z, lengths),
            (self.passes_Z, passes),
            (self.threshold_Z, thresholds),
            (self.factor_Z, factors),
            (self.order_temperature_Z, [config.order_temperature for config in configs]),
            (self.guidance_Z, [config.guidance for config in configs]),
        )


def passes_per_block(config: FullConfig, max_tokens: int) -> int:
    """Passes over each block of an answer: its share of `steps`, or one for each token."""
    size = config.block_length or max_tokens
    return size if config.steps is None else max(1, config.steps * size // max_tokens)


def order_name(config: FullConfig, *, logit_shift: bool) -> str:
    return config.order or ("entropy" if logit_shift else "low_confidence")


def check(config: FullConfig, order: str, kind: type[Order], *, prefix: str = "decoder.") -> None:
    """UserError IDLM-0451 for options out of range or in conflict. `prefix`: of options of requests."""
    problems, threshold, factor, interval = [], config.threshold, config.factor, config.cache_refresh
    for name, value in (("block_length", config.block_length), ("steps", config.steps)):
        if value is not None and value < 1:
            problems.append(f"{prefix}{name}={value} is below 1")
    if threshold is not None and not 0 <= threshold <= 1:
        problems.append(f"{prefix}threshold={threshold} is not in [0, 1]")
    if factor is not None and not 0 < factor < math.inf:
        problems.append(f"{prefix}factor={factor} is not a number above 0")
    if threshold is not None and factor is not None:
        problems.append(f"{prefix}threshold={threshold} and {prefix}factor={factor} exclude each other")
    known = [name for name in ORDERS.names() if ORDERS.get(name).has_threshold]
    for name, limit in (("threshold", threshold), ("factor", factor)):
        if limit is not None and not kind.has_threshold:
            problems.append(
                f"{prefix}{name}={limit}: scores of order {order} are no probabilities; use {known}"
            )
    if interval is not None:
        cache = None if config.cache is None else CACHES.get(config.cache, key="decoder.cache")
        if cache is None or not cache.has_interval:
            known = [name for name in CACHES.names() if CACHES.get(name).has_interval]
            found = f"needs decoder.cache of {known}, not {config.cache}"
            problems.append(f"decoder.cache_refresh={interval} {found}")
        elif interval < 1:
            problems.append(f"decoder.cache_refresh={interval} is below 1")
    if not 0 <= config.guidance <= MAX_GUIDANCE:
        problems.append(f"{prefix}guidance={config.guidance} is not a number from 0 to {MAX_GUIDANCE:g}")
    if config.guidance > 0 and config.cache is not None:
        problems.append(f"{prefix}guidance={config.guidance} does not work with decoder.cache={config.cache}")
    if not config.order_temperature >= 0:
        problems.append(f"{prefix}order_temperature={config.order_temperature} is below 0")
    if config.order_temperature > 0 and kind.is_random:
        problems.append(
            f"{prefix}order_temperature={config.order_temperature}: order {order} is random already"
        )
    if config.defer_eos and config.forbid_eos:
        problems.append("decoder.defer_eos and decoder.forbid_eos: there is no stop token to defer")
    if problems:
        raise UserError("IDLM-0451", "; ".join(problems), fix="change or leave out the options named")
    for name, limit in (("threshold", threshold), ("factor", factor)):
        if limit is not None and config.steps is not None:
            warnings.warn(
                f"{prefix}steps={config.steps} does nothing with {prefix}{name}={limit}", stacklevel=4
            )


def check_canvas(config: FullConfig, *, num_prompt: int, max_tokens: int, max_length: int) -> None:
    """UserError IDLM-0470 for an answer that the options cannot divide, or that does not fit."""
    capacity, size = max(0, max_length - num_prompt), config.block_length or max_tokens
    if max_tokens > capacity:
        fits = capacity // size * size if config.block_length else capacity
        raise UserError(
            "IDLM-0470",
            f"the canvas of {num_prompt} prompt tokens and max_tokens={max_tokens} is longer than "
            f"max_length={max_length}",
            fix=f"use max_tokens={fits}, or a larger max_length"
            if fits
            else "use a larger max_length, or a shorter prompt or block_length",
        )
    if max_tokens % size:
        lower, upper = max_tokens // size * size, (max_tokens // size + 1) * size
        near = f"{lower} or {upper}" if lower else str(upper)
        raise UserError(
            "IDLM-0470",
            f"max_tokens={max_tokens} is not a multiple of block_length={size}",
            fix=f"use max_tokens={near}, or another decoder.block_length",
        )
    num_blocks = max_tokens // size
    has_quota = config.threshold is None and config.factor is None
    if config.steps is not None and has_quota and config.steps % num_blocks:
        near_steps = max(1, round(config.steps / num_blocks)) * num_blocks
        raise UserError(
            "IDLM-0470",
            f"steps={config.steps} cannot be divided among the {num_blocks} blocks of max_tokens="
            f"{max_tokens}",
            fix=f"use decoder.steps={near_steps}",
        )


FIRST_TIME = 1e-3
"""The time of the clean end, `eps` in Dream's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The tokens drawn for rows [Y]. `confidence_Y` (fp64): their probability, see `Order.always_own`;
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
    """The order in which masks are decided: largest score first, by default as many as Dream's times give.

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
    """Decides every mask with the same probability: the reverse process of the diffusion."""

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
