"""Host lists to device tensors without waiting for the device. Z lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], device: torch.device, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """`values` (numbers, or rows of equal length) as a tensor on `device`, in the order of its stream."""
    on_host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)


def fill_lanes(lanes: Sequence[int], value: int, *columns_Z: Tensor) -> None:
    """Set these lanes of columns on one device. An assignment, column_Z[lanes] = value, would copy the number
    to the device and wait for everything that runs there.
    """
    lanes_B = to_device(lanes, columns_Z[0].device)
    for column_Z in columns_Z:
        column_Z.index_fill_(0, lanes_B, value)
