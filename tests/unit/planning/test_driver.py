"""The real driver's calls, on a stub of cuda-bindings: arguments, errors, devices that cannot map pages."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from idlm.infer.mosaic.arena import CudaDriver, DriverError

SUCCESS, OUT_OF_MEMORY = (
    SimpleNamespace(name="CUDA_SUCCESS"),
    SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"),
)


class Bindings(SimpleNamespace):
    """The names of cuda.bindings.driver that are used; `results` by call; the rest return nothing."""

    def __init__(self, **results: tuple[object, ...]) -> None:
        super().__init__(
            CUresult=SimpleNamespace(CUDA_SUCCESS=SUCCESS),
            CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102),
            CUmemAllocationType=SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1),
            CUmemLocationType=SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1),
            CUmemAccess_flags=SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3),
            CUmemAllocationGranularity_flags=SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0),
            CUmemAllocationProp=lambda: SimpleNamespace(location=SimpleNamespace()),
            CUmemAccessDesc=lambda: SimpleNamespace(location=SimpleNamespace()),
        )
        self.calls: list[tuple[object, ...]] = []
        self.results = {
            "cuDeviceGet": (SUCCESS, 7),
            "cuDeviceGetAttribute": (SUCCESS, 1),
            "cuMemGetAllocationGranularity": (SUCCESS, 2 << 20),
        } | results

    def __getattr__(self, name: str) -> object:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: object) -> tuple[object, ...]:
            self.calls.append((name, *arguments))
            return self.results.get(name, (SUCCESS,))

        return call


@pytest.fixture
def driver_with(monkeypatch: pytest.MonkeyPatch):
    """Make a CudaDriver of device 3 on stubs."""

    def make(bindings: Bindings) -> CudaDriver:
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
        return CudaDriver(torch.device("cuda", 3))

    monkeypatch.setattr(torch, "empty", lambda *shape, device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return make


def test_calls_name_their_range_and_device(driver_with) -> None:
    bindings = Bindings(cuMemAddressReserve=(SUCCESS, 1 << 40), cuMemCreate=(SUCCESS, 55))
    driver = driver_with(bindings)
    assert driver.granularity == 2 << 20
    assert bindings.calls[:2] == [("cuDeviceGet", 3), ("cuDeviceGetAttribute", 102, 7)]
    bindings.calls.clear()
    address, handle = driver.reserve(4 << 20), driver.create(2 << 20)
    driver.map(address, 2 << 20, handle)
    driver.set_access(address, 2 << 20)
    driver.unmap(address, 2 << 20)
    driver.release(handle)
    driver.unreserve(address, 4 << 20)
    properties, [access] = bindings.calls[1][2], bindings.calls[3][3]
    assert (properties.type, properties.location.type, properties.location.id) == (1, 1, 3)
    assert (access.flags, access.location.type, access.location.id) == (3, 1, 3)
    assert bindings.calls == [
        ("cuMemAddressReserve", 4 << 20, 0, 0, 0),
        ("cuMemCreate", 2 << 20, properties, 0),
        ("cuMemMap", 1 << 40, 2 << 20, 0, 55, 0),
        ("cuMemSetAccess", 1 << 40, 2 << 20, [access], 1),
        ("cuMemUnmap", 1 << 40, 2 << 20),
        ("cuMemRelease", 55),
        ("cuMemAddressFree", 1 << 40, 4 << 20),
    ]


def test_failures_are_named(driver_with) -> None:
    driver = driver_with(Bindings(cuMemCreate=(OUT_OF_MEMORY, None)))
    with pytest.raises(DriverError, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.create(2 << 20)
    with pytest.raises(DriverError, match="cuda:3 has no virtual memory management"):
        driver_with(Bindings(cuDeviceGetAttribute=(SUCCESS, 0)))


def test_a_missing_package_is_a_driver_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverError, match="cuda-bindings cannot be imported"):
        CudaDriver(torch.device("cuda", 0))
