"""The workspace of a plan: one range of bytes that grows and shrinks between requests.

`PlainArena` is one torch tensor. `MappedArena` reserves addresses once and maps physical pages into them up
to the planned peak (Mosaic, section 4.5), so that addresses stay. Contents do not survive `resize`.

Departure from the paper: it maps extents of up to 256 MiB, as a call per page costs time; the last extent
is replaced by a smaller one when the arena shrinks, so that no more than the plan stays mapped."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from idlm.errors import UserError
from idlm.infer.mosaic.planner import ALIGNMENT
from idlm.infer.mosaic.template import ceil_div
from idlm.log import get_logger


class DriverError(RuntimeError):
    """A call of the driver failed; the message has its name and the error's."""


class _MappedBytes:
    """Device memory in the form that torch.as_tensor reads (the CUDA array interface, version 3)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaDriver:
    """The driver of one CUDA device, through cuda-bindings. Every size is a multiple of `granularity` bytes;
    addresses lie in a reserved range; a handle is physical memory, mapped whole. Calls raise DriverError on
    failure, as does a device without virtual memory management."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise DriverError(f"{device} is not a CUDA device")
        try:
            self._cuda: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DriverError(f"cuda-bindings cannot be imported ({error})") from error
        self._device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        torch.empty(1, device=self._device)  # makes torch's context, which the calls below use
        cuda, index = self._cuda, self._device.index
        # Ordinals of the driver and of torch agree: both follow CUDA_VISIBLE_DEVICES.
        has_memory_management = self._call(
            "cuDeviceGetAttribute",
            cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            self._call("cuDeviceGet", index),
        )
        if not has_memory_management:
            raise DriverError(f"{self._device} has no virtual memory management")
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = index
        self._access = cuda.CUmemAccessDesc()
        self._access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = index
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))

    def reserve(self, num_bytes: int) -> int:
        """Reserve a range of addresses without memory, and return its start."""
        return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def unreserve(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int) -> int:
        """Take physical memory and return its handle."""
        return int(self._call("cuMemCreate", num_bytes, self._properties, 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def set_access(self, address: int, num_bytes: int) -> None:
        self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)

    def before_mapping(self) -> None:
        """Give memory that torch caches but does not use back to the device."""
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for all work of the device: addresses may not be unmapped under a running kernel."""
        torch.cuda.synchronize(self._device)

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        """Return mapped bytes as a uint8 tensor that does not own them."""
        return torch.as_tensor(_MappedBytes(address, num_bytes), device=self._device)

    def _call(self, name: str, *arguments: object) -> Any:
        """Call the driver and return its value; DriverError names the call and the error."""
        with torch.cuda.device(self._device):
            error, *values = getattr(self._cuda, name)(*arguments)
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{name} failed: {error.name}")
        return values[0] if values else None


MAX_EXTENT_BYTES = 256 << 20
AUTO, PLAIN, MAPPED = "auto", "plain", "mapped"
SHRINK_BELOW = 0.5
"""A plain arena shrinks when less than this share of it is needed."""


def view_of(base: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return bytes of a uint8 tensor as a contiguous tensor of `shape` and `dtype`."""
    num_bytes = math.prod(shape) * dtype.itemsize
    assert offset % ALIGNMENT == 0, f"{offset=}"
    assert min(shape, default=0) >= 0 and 0 <= offset <= offset + num_bytes <= base.numel(), (
        f"{tuple(shape)} of {dtype} at {offset} is outside of {base.numel()} bytes"
    )
    return base[offset : offset + num_bytes].view(dtype).view(tuple(shape))


def _refused(num_bytes: int, current: int, reason: str) -> UserError:
    return UserError(
        "IDLM-0466",
        f"the workspace cannot grow from {current} to {num_bytes} bytes: {reason}",
        fix="use a shorter canvas, or free memory on the device",
    )


class PlainArena:
    """One uint8 tensor of torch's allocator, which shrinks when less than half of it is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = self._allocate(0)
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        return self._base.numel()

    def resize(self, num_bytes: int) -> None:
        """Hold at least `num_bytes` bytes; views taken before are invalid.

        Raises UserError IDLM-0466 if the device has too little memory; the arena then keeps its old size."""
        assert num_bytes >= 0 and not self._is_closed
        num_bytes = ceil_div(num_bytes, ALIGNMENT) * ALIGNMENT
        current = self.num_bytes
        if SHRINK_BELOW * current <= num_bytes <= current:
            return
        # The old tensor goes first: both at once would need up to twice the memory.
        self._base = self._allocate(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            self._base = self._allocate(num_bytes)
        except RuntimeError as error:
            if self._device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
                raise
            self._base = self._allocate(current)
            raise _refused(num_bytes, current, "the device is out of memory") from error

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return view_of(self._base, offset, shape, dtype)

    def close(self) -> None:
        self._base, self._is_closed = self._allocate(0), True

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class MappedArena:
    """Pages mapped into `reserved_bytes` addresses; `num_bytes` of them, from the start, hold memory."""

    def __init__(
        self, driver: CudaDriver, reserved_bytes: int, *, max_extent_bytes: int = MAX_EXTENT_BYTES
    ) -> None:
        self._driver = driver
        self._max_extent = max(1, max_extent_bytes // driver.granularity) * driver.granularity
        self.reserved_bytes = self._round_up(reserved_bytes)
        self.address = driver.reserve(self.reserved_bytes)
        self.num_bytes = 0
        self._extents: list[tuple[int, int]] = []
        self._base: Tensor | None = None
        self._is_closed = False

    def resize(self, num_bytes: int) -> None:
        """Map exactly `num_bytes` bytes, rounded up to pages; see `PlainArena`.

        A mapping that fails midway is undone. Shrinking replaces the last extent by a smaller one; if the
        driver refuses that, the arena ends before this extent."""
        assert num_bytes >= 0 and not self._is_closed
        wanted = self._round_up(num_bytes)
        if wanted == self.num_bytes:
            return
        if wanted > self.reserved_bytes:
            raise _refused(wanted, self.num_bytes, f"the device has {self.reserved_bytes} bytes in all")
        self._base = None
        self._driver.synchronize()
        while self.num_bytes > wanted:
            self._pop()
        if self.num_bytes < wanted:
            self._grow(wanted)
        if self.num_bytes:
            self._base = self._driver.tensor(self.address, self.num_bytes)

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        assert self._base is not None, "the arena is empty"
        return view_of(self._base, offset, shape, dtype)

    def close(self) -> None:
        """Unmap and release all pages, and give the addresses back; safe to call twice."""
        if not self._is_closed:
            self.resize(0)
            self._driver.unreserve(self.address, self.reserved_bytes)
            self._is_closed = True

    def _grow(self, wanted: int) -> None:
        """Map pages up to `wanted` bytes, or keep what is mapped and raise UserError IDLM-0466."""
        before = self.num_bytes
        self._driver.before_mapping()
        try:
            while self.num_bytes < wanted:
                self._push(min(self._max_extent, wanted - self.num_bytes))
        except DriverError as error:
            while self.num_bytes > before:
                self._pop()
            if self.num_bytes:
                self._base = self._driver.tensor(self.address, self.num_bytes)
            raise _refused(wanted, before, str(error)) from error

    def _push(self, num_bytes: int) -> None:
        """Map one more extent after the last one; on failure, nothing of it stays."""
        address = self.address + self.num_bytes
        handle = self._driver.create(num_bytes)
        try:
            self._driver.map(address, num_bytes, handle)
        except DriverError:
            self._driver.release(handle)
            raise
        try:
            self._driver.set_access(address, num_bytes)
        except DriverError:
            self._driver.unmap(address, num_bytes)
            self._driver.release(handle)
            raise
        self._extents.append((handle, num_bytes))
        self.num_bytes += num_bytes

    def _pop(self) -> None:
        handle, num_bytes = self._extents.pop()
        self.num_bytes -= num_bytes
        self._driver.unmap(self.address + self.num_bytes, num_bytes)
        self._driver.release(handle)

    def _round_up(self, num_bytes: int) -> int:
        return ceil_div(num_bytes, self._driver.granularity) * self._driver.granularity


Arena = PlainArena | MappedArena
"""A workspace on one device."""


def open_arena(kind: str, device: torch.device) -> Arena:
    """Return an empty arena of a kind; MAPPED falls back to PLAIN, with a log message, where it is not
    supported.

    AUTO is MAPPED on a GPU: 200 requests of 1K to 64K spent 1.5 % of their time on resizing, with PLAIN 3.3 %
    (LLaDA-8B with 2 layers, H200)."""
    assert kind in (AUTO, PLAIN, MAPPED), kind
    if kind == MAPPED or (kind == AUTO and device.type == "cuda"):
        try:
            driver = CudaDriver(device)
            return MappedArena(driver, torch.cuda.get_device_properties(device).total_memory)
        except DriverError as error:
            get_logger(__name__).warning("arena=mapped is not available, arena=plain is used: %s", error)
    return PlainArena(device)
