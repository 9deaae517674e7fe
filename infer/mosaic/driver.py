"""The calls of the CUDA driver that map physical memory into a reserved range of addresses.

`CudaDriver` uses cuda-bindings, which CUDA builds of torch install; nothing here imports it before it is
needed. Tests put a fake with the same calls in its place.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


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
