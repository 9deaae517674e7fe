"""Compiles Triton kernels without a GPU, mostly for sm_90; returns PTX, registers, spills, shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from idlm.kernels.backend import has_gluon, has_pdl, num_multiprocessors, only_compiled

DEVICE = 62
"""A number that no GPU has, so that what is noted for it is used by nothing else."""
HOPPER = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Result of the compiler; `spilled_bytes` and `registers` are per thread."""

    ptx: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    output: str
    """What ptxas said, warnings among it."""


def compile_for_hopper(
    kernel: Any, types: Mapping[str, Any], constants: Mapping[str, Any], *, sm: int = 90, **options: Any
) -> Compiled:
    """Compile with the `types` of non-constant arguments ("*bf16", "i32", ..., tuples of them, None for
    what is absent), all divisible by 16; `sm`: the target's compute capability."""
    signature: dict[str, Any] = {}
    values, divisible = dict[tuple[int, ...], Any](), dict[tuple[int, ...], Any]()

    def typed(kind: Any, path: tuple[int, ...]) -> Any:
        if isinstance(kind, tuple):
            return tuple(typed(each, (*path, number)) for number, each in enumerate(kind))
        if kind is None:
            values[path] = None
        elif kind != "fp32" and not kind.startswith("tensordesc"):
            divisible[path] = [["tt.divisibility", 16]]
        return "constexpr" if kind is None else kind

    for number, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[number,] = "constexpr", constants[name]
        else:
            signature[name] = typed(types[name], (number,))
    make_source: Any = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make_source(kernel, signature, constexprs=values, attrs=divisible)
    compiled = compile_kernel(source, target=GPUTarget("cuda", sm, 32), options=options)
    return _described(compiled, sm)


def compiled_launches(run: Callable[[], object]) -> list[tuple[str, Compiled]]:
    """What `run`, which calls ops with tensors on the meta device, launches on a Hopper: the names of kernels
    and their variants, compiled for the arguments of the launch."""
    found, kernels, launch = dict[Any, str](), set[Any](), JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.add(self)
        found[launch(self, *arguments, grid=grid, warmup=True, **options)] = self.fn.__name__

    names = {"get_current_target": HOPPER, "get_current_device": DEVICE, "get_current_stream": 0}
    stub = SimpleNamespace(**{name: lambda *_, value=value: value for name, value in names.items()})
    properties = SimpleNamespace(multi_processor_count=132)
    caches = (has_pdl, has_gluon, num_multiprocessors)
    for cached in caches:
        cached.cache_clear()
    try:
        with (
            patch.object(driver, "_active", stub),
            patch.object(JITFunction, "run", compile_only),
            patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
            only_compiled(),
        ):
            run()
    finally:
        for kernel in kernels:
            kernel.device_caches.pop(DEVICE, None)
        for cached in caches:
            cached.cache_clear()
    return [(name, _described(compiled, 90)) for compiled, name in found.items()]


def _described(compiled: Any, sm: int) -> Compiled:
    ptx = compiled.asm["ptx"]
    registers, spilled, output = _resources(ptx, sm)
    return Compiled(
        ptx=ptx,
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        spilled_bytes=spilled,
        output=output,
    )


def _resources(ptx: str, sm: int) -> tuple[int, int, str]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command: list[str | Path] = [
            get_ptxas(sm).path,
            "-v",
            f"-arch=sm_{sm}{'a' if sm >= 90 else ''}",
            source,
            "-o",
            Path(folder, "kernel.cubin"),
        ]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", output)
    spilled = re.search(r"(\d+) bytes spill stores", output)
    assert registers and spilled, output
    return int(registers[1]), int(spilled[1]), output
