"""Memory in which the ranks of a host put rows for each other, over NVLink."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

MAX_RANKS = 8
LARGEST_BYTES = 8 << 20
"""Of all rows of a sum."""
NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED."""
LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle: the handle of a GPU's memory in other processes."""

    _fields_ = [("content", ctypes.c_ubyte * 64)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerBoxes:
    """The box of every rank for rows of `width` elements of `dtype`; see README.md.

    `addresses` are those of the boxes, `stop` that of an int32 that ends all waiting once it is 1. `turns`
    (int32) has a value for each of the `num_slots` rows. `owner` holds the memory."""

    rank: int
    size: int
    width: int
    dtype: torch.dtype
    num_slots: int
    stride: int
    addresses: tuple[int, ...]
    stop: int
    turns: Tensor
    owner: object = None

    @property
    def empty(self) -> int:
        """An element that has not arrived, as an integer: the bits of minus zero."""
        return -1 << 8 * self.dtype.itemsize - 1

    def holds(self, x_RD: Tensor) -> bool:
        """Whether sums of such rows can use the boxes."""
        return len(x_RD) <= self.num_slots and x_RD.shape[1] == self.width and x_RD.dtype == self.dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerMemory:
    """A box on the GPU of every rank, all at `addresses` of this process, for sums of one width and dtype at
    a time; `stop` [1], int32 in pinned memory, ends all waiting once it is 1."""

    rank: int
    addresses: tuple[int, ...]
    stop: Tensor

    def boxes(self, width: int, dtype: torch.dtype) -> PeerBoxes:
        """The boxes for rows of `width`, of which the own is empty then. This GPU is idle, and no rank sums
        before all have their boxes."""
        device, stop = torch.device("cuda", self.rank), self.stop.data_ptr()
        boxes = make_boxes(
            self.rank, width, dtype, pointers=self.addresses, stop=stop, device=device, owner=self
        )
        empty = boxes.empty & 0xFFFFFFFF if dtype.itemsize == 4 else (boxes.empty & 0xFFFF) * 0x10001
        own, num_words = (
            ctypes.c_uint64(self.addresses[self.rank]),
            ctypes.c_size_t(box_bytes(boxes.size) // 4),
        )
        status = _driver().cuMemsetD32_v2(own, ctypes.c_uint32(empty), num_words)
        assert status == 0, f"cuMemsetD32: {status=}"
        torch.cuda.synchronize(device)
        return boxes


def box_bytes(size: int) -> int:
    """Of a box for `size` ranks."""
    return 2 * size * LARGEST_BYTES


def make_boxes(
    rank: int,
    width: int,
    dtype: torch.dtype,
    *,
    pointers: Sequence[int],
    stop: int,
    device: torch.device,
    owner: object = None,
) -> PeerBoxes:
    """The boxes of all ranks at these addresses."""
    per_16_bytes = 16 // dtype.itemsize
    stride = -(-width // per_16_bytes) * per_16_bytes
    num_slots = LARGEST_BYTES // (stride * dtype.itemsize)
    return PeerBoxes(
        rank=rank,
        size=len(pointers),
        width=width,
        dtype=dtype,
        num_slots=num_slots,
        stride=stride,
        addresses=tuple(pointers),
        stop=stop,
        turns=torch.zeros(num_slots, dtype=torch.int32, device=device),
        owner=owner,
    )


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def reaches_all(rank: int, size: int) -> bool:
    """Whether GPU `rank` is linked with the first `size` GPUs: atomics work over NVLink alone."""
    driver, value = _driver(), ctypes.c_int()
    for peer in set(range(size)) - {rank}:
        if not torch.cuda.can_device_access_peer(rank, peer):
            return False
        status = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), NATIVE_ATOMICS, rank, peer)
        if status or not value.value:
            return False
    return size <= MAX_RANKS


def open_memory(rank: int, size: int, hosts: dist.ProcessGroup | None, stop: Tensor) -> PeerMemory | None:
    """Memory on the GPUs of `size` ranks, of which rank r has GPU r. All call it, and wait for each other;
    `hosts` connects their hosts, `stop` is in pinned memory. None, on all ranks: a GPU does not reach another
    one, or the system does not let processes share memory.

    It is allocated without torch, whose allocators can make memory that no other process can open."""
    driver, own, handle = _driver(), ctypes.c_uint64(), _Handle()
    # Makes the GPU's context the current one of this thread.
    torch.cuda.synchronize(rank)
    is_shared = reaches_all(rank, size) and not (
        driver.cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(box_bytes(size)))
        or driver.cuIpcGetMemHandle(ctypes.byref(handle), own)
    )
    addresses = []
    for peer, theirs in enumerate(_of_all(bytes(handle) if is_shared else b"", size, hosts)):
        address = ctypes.c_uint64(own.value if peer == rank else 0)
        if peer != rank and theirs:
            driver.cuIpcOpenMemHandle_v2(
                ctypes.byref(address), _Handle.from_buffer_copy(theirs), LAZY_PEER_ACCESS
            )
        addresses.append(address.value)
    memory = PeerMemory(rank=rank, addresses=tuple(addresses), stop=stop)
    # A process that ends frees its memory.
    weakref.finalize(memory, _free, driver, rank, memory.addresses).atexit = False
    return memory if all(_of_all(b"open" if all(addresses) else b"", size, hosts)) else None


def _of_all(mine: bytes, size: int, hosts: dist.ProcessGroup | None) -> list[bytes]:
    everyone: list[bytes] = [b""] * size
    dist.all_gather_object(everyone, mine, group=hosts)
    return everyone


def _free(driver: ctypes.CDLL, rank: int, addresses: Sequence[int]) -> None:
    for peer, address in enumerate(addresses):
        if address:
            close = driver.cuMemFree_v2 if peer == rank else driver.cuIpcCloseMemHandle
            close(ctypes.c_uint64(address))
