"""Memory in which the ranks of a host put rows for each other, over NVLink."""

from __future__ import annotations

import ctypes
import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

MAX_RANKS = 8
LARGEST_BYTES = 8 << 20
"""Of all rows of a sum."""
NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED."""
IPC = tuple(inspect.signature(rebuild_cuda_tensor).parameters)
"""What torch describes a tensor of a GPU by to another process."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerBoxes:
    """The box of every rank for rows of `width` elements of `dtype`; see README.md.

    `addresses` are those of the boxes, `stop` that of an int32 that ends all waiting once it is 1. `turns`
    (int32) has a value for each of the `num_slots` rows; `counters` is the byte at which a box counts.
    `owned` keeps the memory."""

    rank: int
    size: int
    width: int
    dtype: torch.dtype
    num_slots: int
    stride: int
    counters: int
    addresses: tuple[int, ...]
    stop: int
    turns: Tensor
    owned: object = None

    def holds(self, x_RD: Tensor) -> bool:
        """Whether sums of such rows can use the boxes."""
        return len(x_RD) <= self.num_slots and x_RD.shape[1] == self.width and x_RD.dtype == self.dtype


def box_sizes(size: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """Rows of each source, elements between rows, and the byte of the counters, of a box."""
    per_16_bytes = 16 // dtype.itemsize
    stride = -(-width // per_16_bytes) * per_16_bytes
    num_slots = max(1, LARGEST_BYTES // (stride * dtype.itemsize))
    counters = 2 * size * num_slots * stride * dtype.itemsize
    return {"num_slots": num_slots, "stride": stride, "counters": counters}


def make_boxes(
    rank: int, width: int, dtype: torch.dtype, *, pointers: list[int], stop: int, device: torch.device
) -> PeerBoxes:
    """The boxes of all ranks at these addresses, full of zeros."""
    sizes = box_sizes(len(pointers), width, dtype)
    return PeerBoxes(
        rank=rank,
        size=len(pointers),
        width=width,
        dtype=dtype,
        **sizes,
        addresses=tuple(pointers),
        stop=stop,
        turns=torch.zeros(sizes["num_slots"], dtype=torch.int32, device=device),
    )


def reaches_all(rank: int, size: int) -> bool:
    """Whether GPU `rank` can write and count in the memory of the first `size` GPUs."""
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    for peer in set(range(size)) - {rank}:
        if not torch.cuda.can_device_access_peer(rank, peer):
            return False
        status = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), NATIVE_ATOMICS, rank, peer)
        if status or not value.value:
            return False
    return size <= MAX_RANKS


def open_boxes(
    rank: int, width: int, dtype: torch.dtype, *, size: int, hosts: dist.ProcessGroup | None, stop: Tensor
) -> PeerBoxes:
    """The boxes of `size` ranks, of which rank r has GPU r; all call it, and wait for each other. `hosts`
    connects their hosts. `stop` is in pinned memory; see `PeerBoxes`."""
    device, sizes = torch.device("cuda", rank), box_sizes(size, width, dtype)
    num_bytes = sizes["counters"] + 2 * sizes["num_slots"] * torch.int32.itemsize
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # Others write as soon as all are here.
    torch.cuda.synchronize(device)
    shared: list[Any] = [None] * size
    dist.all_gather_object(shared, dict(zip(IPC, reduce_tensor(memory)[1], strict=True)), group=hosts)
    # Mapped for this rank's GPU, which then reaches the memory of the others.
    opened = [
        memory if peer == rank else rebuild_cuda_tensor(**{**arguments, "storage_device": rank})
        for peer, arguments in enumerate(shared)
    ]
    pointers = [each.data_ptr() for each in opened]
    boxes = make_boxes(rank, width, dtype, pointers=pointers, stop=stop.data_ptr(), device=device)
    return replace(boxes, owned=(opened, stop))
