"""Options of decoder `block`: their meaning, their checks, which of them a request may set; and strategies:
which masked positions of a block a denoising pass decides, each a small function of tensors.

Names and rules of strategies are those of SDAR (arXiv 2510.06303 and its code), with two departures: quotas
never exceed the masks that are left (there, they would overwrite the prompt), and `entropy_bounded` is
written from its description. Static shapes; nothing waits for the device.
Ties, on every device: among positions with bitwise equal confidence the left one is decided first, and among
equally likely tokens the one with the lower id. Confidences that are equal up to rounding (on a block of
nothing but MASKs) are not ties: rounding decides between them. `sequential` has no such case.
Shapes: B sequences, W positions of a block, Z lanes."""

from __future__ import annotations

import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from idlm.errors import UserError
from idlm.infer.state.batch import set_lanes, to_device
from idlm.kernels.block_step import NO_EDITS, Masks
from idlm.kernels.row_compaction import ranks
from idlm.registry import Registry

THRESHOLD = 0.9
MODES = {"quality": (0.7, 0.5), "speed": (0.5, 0.0)}
"""`threshold` and `edit_threshold` on LLaDA2.1's model card; the defaults of its code are neither."""
UNMASKING_OPTIONS = ("threshold", "entropy_bound", "steps")
"""Options that only some strategies read."""
REQUEST_OPTIONS = ("threshold", "edit_threshold", "entropy_bound", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """`strategy`: which masks a pass decides. `steps`: the quota is block size / steps per pass; None: one
    mask. `threshold`: of low_confidence_dynamic; None: that of the mode, else 0.9. `entropy_bound` (nats): of
    entropy_bounded. `confidence`: the drawn token's probability under the request's "law" (after temperature
    and truncation, as published), or under the "model"'s own distribution.

    `edit_threshold`: every pass also replaces a decided token by the most likely one where that differs and
    its confidence is above this (LLaDA2.1), until a pass that began without a mask changes nothing, or after
    `max_edit_passes` such passes; None: that of the mode, else no edits (as with 1). `mode`: LLaDA2.1's
    "quality" (0.7, edits 0.5) or "speed" (0.5, edits 0).

    `sub_block_size`: masks are decided in parts of this many positions, left to right (Fast-dLLM v2: 8).
    `dual_cache` (lossy): a part's first pass computes the whole block, the later ones that part alone, with
    outdated keys and values of the others. `fused_commit`: store a clean block in the pass that begins the
    next one. Requests may set `threshold`, `edit_threshold`, `entropy_bound` and `steps`."""

    strategy: str = "low_confidence_dynamic"
    mode: Literal["quality", "speed"] | None = None
    steps: int | None = None
    threshold: float | None = None
    edit_threshold: float | None = None
    max_edit_passes: int = 16
    entropy_bound: float = 0.35
    sub_block_size: int | None = None
    dual_cache: bool = False
    confidence: Literal["law", "model"] = "law"
    fused_commit: bool = True

    @property
    def changed(self) -> list[str]:
        """Names of options that are not their defaults."""
        fields = dataclasses.fields(self)
        return [field.name for field in fields if getattr(self, field.name) != field.default]

    @property
    def sure(self) -> float:
        """The threshold for masks."""
        if self.threshold is not None:
            return self.threshold
        return THRESHOLD if self.mode is None else MODES[self.mode][0]

    @property
    def sure_edit(self) -> float:
        """The threshold for edits; `NO_EDITS` if there are none."""
        if self.edit_threshold is not None:
            return self.edit_threshold
        return NO_EDITS if self.mode is None else MODES[self.mode][1]


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """Options that may differ between requests; fp64, `steps_Z` int64."""

    threshold_Z: Tensor
    edit_threshold_Z: Tensor
    entropy_bound_Z: Tensor
    steps_Z: Tensor

    @classmethod
    def empty(cls, num_lanes: int, device: torch.device) -> LaneOptions:
        """Any finite values, for lanes without a request."""
        threshold_Z, edit_Z, entropy_Z = torch.ones(3, num_lanes, dtype=torch.float64, device=device)
        return cls(threshold_Z, edit_Z, entropy_Z, torch.ones(num_lanes, dtype=torch.int64, device=device))

    def admit(self, lanes: list[int], configs: Sequence[BlockConfig], *, block_size: int) -> None:
        """Set each lane's options; `block_size` steps if none are given."""
        set_lanes(
            to_device(lanes, self.steps_Z.device),
            (self.threshold_Z, [config.sure for config in configs]),
            (self.edit_threshold_Z, [config.sure_edit for config in configs]),
            (self.entropy_bound_Z, [config.entropy_bound for config in configs]),
            (self.steps_Z, [config.steps or block_size for config in configs]),
        )


def check(config: BlockConfig, block_size: int, *, prefix: str = "decoder.") -> None:
    """UserError IDLM-0451 for options out of range or in conflict. `prefix`: of options of requests."""
    steps, part_size = config.steps, config.sub_block_size
    divisors = [size for size in range(1, block_size + 1) if block_size % size == 0]
    largest = max(size for size in divisors if size <= max(part_size or 1, 1))
    parts = f"a part of the block of {block_size} (allowed: {', '.join(map(str, divisors))})"
    checks = (
        (prefix, "steps", f"in [1, {block_size}]", block_size, steps is None or 1 <= steps <= block_size),
        ("decoder.", "sub_block_size", parts, largest, part_size is None or part_size in divisors),
        (prefix, "threshold", "in [0, 1]", THRESHOLD, 0 <= config.sure <= 1),
        (prefix, "edit_threshold", "in [0, 1]", NO_EDITS, 0 <= config.sure_edit <= 1),
        ("decoder.", "max_edit_passes", "1 or more", 1, config.max_edit_passes >= 1),
        (prefix, "entropy_bound", "0 or more", BlockConfig().entropy_bound, config.entropy_bound >= 0),
    )
    problems = [
        (f"{start}{name}={getattr(config, name)!r} is not {allowed}", f"{start}{name}={better}")
        for start, name, allowed, better, is_good in checks
        if not is_good
    ]
    if config.dual_cache and part_size in (None, block_size):
        smaller = divisors[:-1]
        needs = f"needs decoder.sub_block_size= (allowed: {', '.join(map(str, smaller)) or 'none'})"
        fix = f"decoder.sub_block_size={smaller[-1]}" if smaller else "decoder.dual_cache=false"
        problems.append((f"decoder.dual_cache=true {needs}", fix))
    if config.dual_cache and config.sure_edit < NO_EDITS:
        edits = f"edits (edit_threshold={config.sure_edit}) look at positions that it does not compute"
        fix = f"decoder.dual_cache=false, or {prefix}edit_threshold={NO_EDITS} for no edits"
        problems.append((f"decoder.dual_cache=true: {edits}", fix))
    if problems:
        texts, fixes = zip(*problems, strict=True)
        raise UserError("IDLM-0451", "; ".join(texts), fix=f"give {'; '.join(fixes)}")


def warn_of_unread(strategy: str, reads: Sequence[str], names: Iterable[str], *, prefix: str) -> None:
    """Warn of given options (among `UNMASKING_OPTIONS`) that the strategy does not read."""
    idle = [name for name in names if name in UNMASKING_OPTIONS and name not in reads]
    if idle:
        warnings.warn(
            f"{', '.join(prefix + name for name in idle)} does nothing: decoder.strategy={strategy} reads "
            f"{', '.join(reads)}",
            stacklevel=4,
        )


class Unmasking(ABC):
    """Chooses the masks to decide, at least one in every sequence that has any. `reads`: the options among
    threshold, entropy_bound and steps that it uses."""

    needs_entropy: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ("steps",)

    @abstractmethod
    def choose(self, masks: Masks) -> Tensor:
        """Bool [B, W], a subset of `is_maskable_BW`."""


UNMASKINGS: Registry[type[Unmasking]] = Registry("unmasking_strategy", None)


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
