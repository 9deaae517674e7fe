"""What GPUs from Hopper on can do for a chain of short kernels."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

HOPPER = (9, 0)


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one that it waits for has ended (programmatic dependent
    launch). Triton's interpreter knows nothing of it.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type == "cuda" and not is_interpreted and torch.cuda.get_device_capability(device) >= HOPPER


def rounds_as_written() -> dict[str, Any]:
    """Launch options of a kernel that rounds between a product and a sum: Triton's compiler would otherwise
    fuse both into one operation with one rounding. The interpreter does not know the option.
    """
    return {} if os.environ.get("TRITON_INTERPRET") == "1" else {"enable_fp_fusion": False}
