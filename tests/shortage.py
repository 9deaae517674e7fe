"""Allocations that fail on purpose."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Shortage(TorchDispatchMode):
    """Makes the allocations with these numbers (from 1) fail on `device_type`; can be entered again."""

    def __init__(self, device_type: str, fails_at: Collection[int]) -> None:
        super().__init__()
        self.device_type, self.fails_at = device_type, fails_at
        self.num_seen = self.num_failed = 0

    @property
    def is_over(self) -> bool:
        """Whether all of these allocations have failed."""
        return self.num_failed == len(self.fails_at)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = all(one.alias_info is None for one in func._schema.returns)
        if is_new and isinstance(result, Tensor) and result.device.type == self.device_type:
            self.num_seen += 1
            if self.num_seen in self.fails_at:
                self.num_failed += 1
                raise torch.OutOfMemoryError(f"allocation {self.num_seen} fails on purpose")
        return result
