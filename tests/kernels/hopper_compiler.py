"""Compiles Triton kernels without a GPU, mostly for sm_90; returns PTX, registers, spills, shared memory."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from idlm.kernels.backend import has_gluon, has_pdl, num_multiprocessors, only_compiled

DEVICE = 62
"""A number that no GPU has, so that what is noted for it is used by nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Result of the compiler; `spilled_bytes` and `registers` are per thread."""

    ptx: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    output: str
    """What ptxas printed, warnings among it."""


@contextmanager
def as_gpu(kernels: set[Any], *, sm: int = 90) -> Iterator[None]:
    """Inside, Triton compiles for a Hopper, or a GPU of another compute capability `sm`, which is not there.
    At the end it forgets what the `kernels` were compiled to."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", sm, 32)
    names = {"get_current_target": target, "get_current_device": DEVICE, "get_current_stream": 0}
    stub = SimpleNamespace(**{name: lambda *_, value=value: value for name, value in names.items()})
    properties = SimpleNamespace(multi_processor_count=132)
    caches = (has_pdl, has_gluon, num_multiprocessors)
    for cached in caches:
        cached.cache_clear()
    try:
        with (
            patch.object(driver, "_active", stub),
            patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(sm, 10)),
            patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        ):
            yield
    finally:
        for kernel in kernels:
            kernel.device_caches.pop(DEVICE, None)
        for cached in caches:
            cached.cache_clear()


def compiled_launches(run: Callable[[], object], *, sm: int = 90) -> list[tuple[str, Compiled]]:
    """What `run`, which calls ops with tensors on the meta device, launches `as_gpu`: the names of kernels
    and their variants, compiled for the arguments of the launch. Skips the test without Triton."""
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    found, kernels, launch = dict[Any, str](), set[Any](), JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.add(self)
        found[launch(self, *arguments, grid=grid, warmup=True, **options)] = self.fn.__name__

    with as_gpu(kernels, sm=sm), patch.object(JITFunction, "run", compile_only), only_compiled(), _logging():
        run()
    return [(name, _described(compiled)) for compiled, name in found.items()]


def assert_unspilled(run: Callable[[], object], *names: str) -> list[Compiled]:
    """What `run` launches has these names, and keeps all values in registers."""
    made = compiled_launches(run)
    assert [name for name, _ in made] == [*names]
    assert all(each.spilled_bytes == 0 for _, each in made)
    return [each for _, each in made]


def _described(compiled: Any) -> Compiled:
    log = compiled.metadata.ptxas_log
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert registers and spilled, log
    return Compiled(
        ptx=compiled.asm["ptx"],
        shared_bytes=compiled.metadata.shared,
        registers=int(registers[1]),
        spilled_bytes=int(spilled[1]),
        output=log,
    )


@contextmanager
def _logging() -> Iterator[None]:
    """Inside, what ptxas prints becomes metadata of a kernel, also of one that the cache has: a cache of its
    own, because others do not have it."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    make_cubin = CUDABackend.make_cubin

    def logged(backend: Any, ptx: str, metadata: dict[str, Any], *given: Any) -> bytes:
        with redirect_stdout(io.StringIO()) as log:
            cubin: bytes = make_cubin(backend, ptx, metadata, *given)
        metadata["ptxas_log"] = log.getvalue()
        return cubin

    with knobs.cache.scope(), knobs.nvidia.scope(), patch.object(CUDABackend, "make_cubin", logged):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = f"{knobs.cache.dir}-with-logs", True
        yield
