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

from idlm.errors import UserError
from idlm.infer.state.batch import set_lanes, to_device
from idlm.kernels.block_step import NO_EDITS

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
