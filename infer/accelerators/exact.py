"""Leaves nothing out: the simplest accelerator, and a name for what all others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from idlm.infer.sparse.accelerator import ACCELERATORS, KVAccelerator, PassView


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactConfig:
    """No options."""


@ACCELERATORS.register("exact")
class Exact(KVAccelerator):
    """Every row sees every slot below its limit. Works with every engine."""

    name: ClassVar[str] = "exact"
    Config: ClassVar[type] = ExactConfig
    exactness: ClassVar[Literal["exact", "lossy"]] = "exact"
    is_static: ClassVar[bool] = True
    needs_blocks: ClassVar[bool] = False
    shards: ClassVar[bool] = True

    def begin(self, view: PassView) -> None:
        """Every pass is one without accelerators."""
        return
