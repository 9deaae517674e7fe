"""Memory of the card as the driver counts it: a ballast that leaves `cap` bytes, free bytes, and shortages.

torch's memory fraction does not see mapped pages, contexts or workspaces, so a cap must be taken from the
card itself: what the ballast holds is held for every allocator.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch

from benchmarks.engine.canvas.models import GIB
from idlm.errors import UserError

SHORTAGES = ("out of memory", "ALLOC_FAILED", "OUT_OF_MEMORY", "not enough memory")
"""What libraries say when an allocation of theirs fails."""
TOO_LONG = "IDLM-0466"
"""The product's refusal of a canvas, or of a workspace, that does not fit."""


class Ballast:
    """Device memory that nothing uses, taken with the driver's own call and held until the process ends."""

    def __init__(self, num_bytes: int) -> None:
        torch.empty(1, device="cuda")  # makes the context that the call below uses
        self.num_bytes = num_bytes
        if num_bytes <= 0:
            return
        driver = ctypes.CDLL("libcuda.so.1")
        address = ctypes.c_uint64()
        status = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes))
        free, total = torch.cuda.mem_get_info()
        if status != 0:
            raise UserError(
                "IDLM-0543",
                f"the ballast of {num_bytes / GIB:.2f} GiB cannot be taken (CUDA error {status}): "
                f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free",
                fix="end other programs on this GPU, or use a larger cap",
            )


def ballast_bytes(cap_bytes: int, *, total_bytes: int, absent_bytes: int) -> int:
    """Bytes that leave `cap_bytes` of a card, of which `absent_bytes` count as weights that are left out."""
    return max(0, total_bytes - cap_bytes) + absent_bytes


def take_cap(cap_gib: float, *, absent_bytes: int) -> Ballast:
    """Leave `cap_gib` GiB of the current device (0: all of it), less `absent_bytes`."""
    total = torch.cuda.mem_get_info()[1]
    cap = int(cap_gib * GIB) if cap_gib else total
    if cap > total:
        raise UserError(
            "IDLM-0107", f"caps={cap_gib} on a card of {total / GIB:.2f} GiB", fix="use a smaller cap"
        )
    return Ballast(ballast_bytes(cap, total_bytes=total, absent_bytes=absent_bytes))


def shortage(error: BaseException) -> str | None:
    """The first line of an error that says that memory ran out; None for any other error."""
    message = str(error).strip().partition("\n")[0]
    is_refusal = isinstance(error, UserError) and error.code == TOO_LONG
    is_short = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(word in message for word in SHORTAGES)
    )
    return message if is_refusal or is_short else None


def free_bytes(device: torch.device) -> int:
    """Free bytes of the card by the driver's count; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def release(device: torch.device) -> None:
    """Give back what torch caches, so that the next measurement starts as the first did."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def device_counts(device: torch.device) -> dict[str, int]:
    """Bytes that torch has allocated and reserved, now and at most since `reset_counts`."""
    if device.type != "cuda":
        return dict.fromkeys(("allocated", "reserved", "max_allocated", "max_reserved"), 0)
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "max_allocated": stats["allocated_bytes.all.peak"],
        "max_reserved": stats["reserved_bytes.all.peak"],
    }


def reset_counts(device: torch.device) -> None:
    """Start the peaks of `device_counts` again."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
