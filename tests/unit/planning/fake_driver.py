"""A CPU stand-in for the CUDA driver's calls, which keeps books and can refuse its n-th call."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.infer.mosaic.arena import DriverError

PAGE = 2 << 20


class FakeDriver:
    """Addresses are offsets into one tensor; memory is counted and every rule of the real calls is checked.

    `refuse_after` calls that can fail (create, map, set_access) succeed, and the next one raises."""

    granularity = PAGE

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes_created = self.num_syncs = self.num_cache_flushes = 0
        self.refuse_after: int | None = None
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self._next, self._memory = 1, torch.empty(0, dtype=torch.uint8)

    @property
    def is_clean(self) -> bool:
        return not (self.reserved or self.handles or self.mapped or self.bytes_created)

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes % PAGE == 0 and num_bytes > 0 and not self.reserved
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.reserved[PAGE] = num_bytes
        return PAGE

    def unreserve(self, address: int, num_bytes: int) -> None:
        assert not self.mapped, "unmap before the addresses go"
        assert self.reserved.pop(address) == num_bytes, "addresses are freed once, and as a whole"

    def create(self, num_bytes: int) -> int:
        assert num_bytes % PAGE == 0 and num_bytes > 0
        self._may_refuse("cuMemCreate")
        if self.bytes_created + num_bytes > self.capacity:
            raise DriverError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
        self.bytes_created += num_bytes
        self._next += 1
        self.handles[self._next] = num_bytes
        return self._next

    def release(self, handle: int) -> None:
        assert all(mapped != handle for mapped, _ in self.mapped.values()), "unmap before release"
        self.bytes_created -= self.handles.pop(handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._may_refuse("cuMemMap")
        assert self.handles[handle] == num_bytes
        [(start, size)] = self.reserved.items()
        assert start <= address and address + num_bytes <= start + size
        for other, (_, length) in self.mapped.items():
            assert address + num_bytes <= other or other + length <= address, "mapped twice"
        self.mapped[address] = (handle, num_bytes)

    def set_access(self, address: int, num_bytes: int) -> None:
        self._may_refuse("cuMemSetAccess")
        assert self.mapped[address][1] == num_bytes
        self.accessible.add(address)

    def unmap(self, address: int, num_bytes: int) -> None:
        assert self.num_syncs, "a kernel may still run"
        assert self.mapped.pop(address)[1] == num_bytes, "whole mappings only"
        self.accessible.discard(address)

    def before_mapping(self) -> None:
        self.num_cache_flushes += 1

    def synchronize(self) -> None:
        self.num_syncs += 1

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        end = address
        while end in self.accessible:
            end += self.mapped[end][1]
        assert end >= address + num_bytes, "not all of it is mapped"
        [start] = self.reserved
        return self._memory[address - start : address - start + num_bytes]

    def _may_refuse(self, name: str) -> None:
        if self.refuse_after is not None:
            if not self.refuse_after:
                self.refuse_after = None
                raise DriverError(f"{name} failed: CUDA_ERROR_UNKNOWN")
            self.refuse_after -= 1
