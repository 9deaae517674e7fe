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
