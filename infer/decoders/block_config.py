"""Options of decoder `block`: their meaning, their checks, and which of them a request may set.

Shapes: Z lanes.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError
from idlm.infer.state.device import to_device

CONFIDENCES = ("law", "model")
THRESHOLD = 0.9
NO_EDITS = 1.0
"""No confidence exceeds this."""
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

    `sub_block_size`: masks are decided in parts of so many positions, left to right (Fast-dLLM v2: 8).
    `dual_cache` (lossy): a part's first pass computes the whole block, the later ones that part alone, with
    outdated keys and values of the others. `fused_commit`: store a clean block in the pass that begins the
    next one. Requests may set `threshold`, `edit_threshold`, `entropy_bound` and `steps`.
    """

    strategy: str = "low_confidence_dynamic"
    mode: Literal["quality", "speed"] | None = None
    steps: int | None = None
    threshold: float | None = None
    edit_threshold: float | None = None
    max_edit_passes: int = 16
    entropy_bound: float = 0.35
    sub_block_size: int | None = None
    dual_cache: bool = False
    confidence: str = "law"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """Options that may differ between requests; fp64, `steps_Z` int64."""

    threshold_Z: Tensor
    edit_threshold_Z: Tensor
    entropy_bound_Z: Tensor
    steps_Z: Tensor

    @classmethod
    def empty(cls, num_lanes: int, device: torch.device) -> LaneOptions:
        """Any finite values, for lanes without a request."""

        def ones(dtype: torch.dtype) -> Tensor:
            return torch.ones(num_lanes, dtype=dtype, device=device)

        return cls(
            threshold_Z=ones(torch.float64),
            edit_threshold_Z=ones(torch.float64),
            entropy_bound_Z=ones(torch.float64),
            steps_Z=ones(torch.int64),
        )

    def admit(self, lanes: list[int], configs: Sequence[BlockConfig], *, block_size: int) -> None:
        """Set each lane's options; `block_size` steps if none are given."""
        lanes_B = to_device(lanes, self.steps_Z.device)
        for column_Z, values in (
            (self.threshold_Z, [config.sure for config in configs]),
            (self.edit_threshold_Z, [config.sure_edit for config in configs]),
            (self.entropy_bound_Z, [config.entropy_bound for config in configs]),
            (self.steps_Z, [config.steps or block_size for config in configs]),
        ):
            column_Z[lanes_B] = to_device(values, column_Z.device, dtype=column_Z.dtype)


def check(config: BlockConfig, block_size: int, *, prefix: str = "decoder.") -> None:
    """UserError IDLM-0451 for options out of range or in conflict. `prefix`: of options of requests."""
    checks = [*_ranges(config, block_size, prefix), *_conflicts(config, block_size, prefix)]
    problems = [(text, fix) for text, fix, is_bad in checks if is_bad]
    if problems:
        texts, fixes = zip(*problems, strict=True)
        raise UserError("IDLM-0451", "; ".join(texts), fix=f"give {'; '.join(fixes)}")


Check = tuple[str, str, bool]
"""The problem, its fix, and whether it applies."""


def _divisors(block_size: int) -> list[int]:
    return [size for size in range(1, block_size + 1) if block_size % size == 0]


def _ranges(config: BlockConfig, block_size: int, prefix: str) -> list[Check]:
    steps, part_size, divisors = config.steps, config.sub_block_size, _divisors(block_size)
    return [
        (
            f"{prefix}steps={steps!r} is not in [1, {block_size}], the block size",
            f"{prefix}steps={block_size}",
            steps is not None and not 1 <= steps <= block_size,
        ),
        (
            f"decoder.sub_block_size={part_size!r} does not divide the block size {block_size} (allowed: "
            f"{', '.join(map(str, divisors))})",
            f"decoder.sub_block_size={max(s for s in divisors if s <= max(part_size or 1, 1))}",
            part_size is not None and part_size not in divisors,
        ),
        (
            f"{prefix}threshold={config.threshold!r} is not in [0, 1]",
            f"{prefix}threshold={THRESHOLD}",
            not 0 <= config.sure <= 1,
        ),
        (
            f"{prefix}edit_threshold={config.edit_threshold!r} is not in [0, 1]",
            f"{prefix}edit_threshold={NO_EDITS} for no edits",
            not 0 <= config.sure_edit <= 1,
        ),
        (
            f"decoder.max_edit_passes={config.max_edit_passes!r} is below 1",
            f"decoder.max_edit_passes={BlockConfig().max_edit_passes}",
            config.max_edit_passes < 1,
        ),
        (
            f"{prefix}entropy_bound={config.entropy_bound!r} is below 0",
            f"{prefix}entropy_bound={BlockConfig().entropy_bound}",
            not config.entropy_bound >= 0,
        ),
        (
            f"decoder.confidence={config.confidence!r} is not one of {', '.join(CONFIDENCES)}"
            f"{did_you_mean(config.confidence, CONFIDENCES)}",
            f"decoder.confidence={CONFIDENCES[0]}",
            config.confidence not in CONFIDENCES,
        ),
    ]


def _conflicts(config: BlockConfig, block_size: int, prefix: str) -> list[Check]:
    parts = _divisors(block_size)[:-1]
    return [
        (
            f"decoder.dual_cache=true needs decoder.sub_block_size=, smaller than the block of "
            f"{block_size} (allowed: {', '.join(map(str, parts)) or 'none'})",
            f"decoder.sub_block_size={parts[-1]}" if parts else "decoder.dual_cache=false",
            config.dual_cache and config.sub_block_size in (None, block_size),
        ),
        (
            f"decoder.dual_cache=true does not compute the positions that {prefix}edit_threshold="
            f"{config.sure_edit} (of decoder.mode, if it is not given) would look at",
            f"decoder.dual_cache=false, or {prefix}edit_threshold={NO_EDITS} for no edits",
            config.dual_cache and config.sure_edit < NO_EDITS,
        ),
    ]


def warn_of_unread(strategy: str, reads: Sequence[str], names: Iterable[str], *, prefix: str) -> None:
    """Warn of given options (among `UNMASKING_OPTIONS`) that the strategy does not read."""
    idle = [name for name in names if name in UNMASKING_OPTIONS and name not in reads]
    if idle:
        warnings.warn(
            f"{', '.join(prefix + name for name in idle)} does nothing: decoder.strategy={strategy} reads "
            f"{', '.join(reads)}",
            stacklevel=4,
        )
