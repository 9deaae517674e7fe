"""Options of decoder `block`: what they are, which of them a request may set, and what they come to.

Shapes: Z lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from idlm.errors import UserError
from idlm.infer.transfer import to_device

CONFIDENCES = ("law", "model")
THRESHOLD = 0.9
NO_EDITS = 1.0
"""Nothing is surer than this."""
MODES = {"quality": (0.7, 0.5), "speed": (0.5, 0.0)}
"""`threshold` and `edit_threshold` on LLaDA2.1's model card; the defaults of its code are neither."""
REQUEST_OPTIONS = ("threshold", "edit_threshold", "entropy_bound", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """`strategy`: which masks a pass decides. `steps` sets the quota, block size / steps a pass; None: one.
    `threshold` of low_confidence_dynamic; None: that of the mode, else 0.9. `entropy_bound` (nats): of
    entropy_bounded. `confidence`: the drawn token's probability under the request's "law" (after temperature
    and truncation, as published), or under the "model"'s own.

    `edit_threshold`: every pass also puts the likeliest token in the place of a decided one where it is
    another and its confidence is above this (LLaDA2.1), until a pass that began without a mask changes
    nothing, or `max_edit_passes` of those; None: that of the mode, else no edits (1 as well). `mode`:
    LLaDA2.1's "quality" (0.7, edits 0.5) or "speed" (0.5, edits 0).

    `sub_block_size`: masks are decided in parts of so many positions, left to right (Fast-dLLM v2: 8).
    `dual_cache` (lossy): once per part the whole block is computed, then that part alone, beside keys and
    values of the others that are out of date. `fused_commit`: store a clean block in the pass that begins the
    next one. Requests may set `REQUEST_OPTIONS` for themselves.
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
    def sure(self) -> float:
        """The threshold for masks."""
        if self.threshold is not None:
            return self.threshold
        return THRESHOLD if self.mode is None else MODES[self.mode][0]

    @property
    def sure_edit(self) -> float:
        """The threshold for edits; `NO_EDITS` where there are none."""
        if self.edit_threshold is not None:
            return self.edit_threshold
        return NO_EDITS if self.mode is None else MODES[self.mode][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """What may differ from request to request; fp64, `steps_Z` int64."""

    threshold_Z: Tensor
    edit_threshold_Z: Tensor
    entropy_bound_Z: Tensor
    steps_Z: Tensor

    @classmethod
    def empty(cls, num_lanes: int, device: torch.device) -> LaneOptions:
        """Nobody sits there: any values that compute."""

        def ones(dtype: torch.dtype) -> Tensor:
            return torch.ones(num_lanes, dtype=dtype, device=device)

        return cls(
            threshold_Z=ones(torch.float64),
            edit_threshold_Z=ones(torch.float64),
            entropy_bound_Z=ones(torch.float64),
            steps_Z=ones(torch.int64),
        )

    def seat(self, lanes: list[int], configs: Sequence[BlockConfig], *, block_size: int) -> None:
        """Each lane's options; `block_size` steps where none are given."""
        lanes_B = to_device(lanes, self.steps_Z.device)
        for column_Z, values in (
            (self.threshold_Z, [config.sure for config in configs]),
            (self.edit_threshold_Z, [config.sure_edit for config in configs]),
            (self.entropy_bound_Z, [config.entropy_bound for config in configs]),
            (self.steps_Z, [config.steps or block_size for config in configs]),
        ):
            column_Z[lanes_B] = to_device(values, column_Z.device, dtype=column_Z.dtype)


def check(config: BlockConfig, block_size: int) -> None:
    """UserError IDLM-0451 for options out of range or at odds."""
    steps, part_size = config.steps, config.sub_block_size
    problems = [
        text
        for text, is_bad in (
            (
                f"steps={steps!r} is not in [1, {block_size}], the block size",
                steps is not None and not 1 <= steps <= block_size,
            ),
            (
                f"sub_block_size={part_size!r} does not divide the block size {block_size}",
                part_size is not None and (part_size < 1 or block_size % part_size != 0),
            ),
            (f"threshold={config.threshold!r} is not in [0, 1]", not 0 <= config.sure <= 1),
            (f"edit_threshold={config.edit_threshold!r} is not in [0, 1]", not 0 <= config.sure_edit <= 1),
            (f"max_edit_passes={config.max_edit_passes!r} is below 1", config.max_edit_passes < 1),
            (f"entropy_bound={config.entropy_bound!r} is below 0", not config.entropy_bound >= 0),
            (
                f"confidence={config.confidence!r} is not one of {CONFIDENCES}",
                config.confidence not in CONFIDENCES,
            ),
            (
                "dual_cache=true needs sub_block_size=, smaller than the block",
                config.dual_cache and part_size in (None, block_size),
            ),
            (
                "dual_cache=true does not compute the places that edits would look at",
                config.dual_cache and config.sure_edit < NO_EDITS,
            ),
        )
        if is_bad
    ]
    if problems:
        raise UserError("IDLM-0451", "; ".join(problems), fix="correct the decoder options named")
