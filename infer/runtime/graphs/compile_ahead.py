"""Compiles the kernels of a warm-up on all cores of the host at once.

Otherwise passes compile them as they first launch them, one after the other: half a minute for many modes.
Passes over tensors without memory (on the meta device) launch nothing but show which variants of the kernels
are needed, and threads compile those. Compiled kernels stay in Triton's cache on disk.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from idlm.infer.models.loader import make_trunk
from idlm.infer.parts import EngineParts
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.graphs.pass_shape import PassShape

MAX_THREADS = 16


def is_plain(parts: EngineParts) -> bool:
    """Whether `step_on_meta` launches all that the engine's passes launch."""
    model, settings = parts.model, parts.settings
    is_dense = model.spec.moe is None and not settings.is_lossy and not model.trunk.is_adapted
    appends = parts.decoder.kv_policy.kind == "append" and parts.stack is None
    return is_dense and appends and not settings.deterministic and model.device.type == "cuda"


def step_on_meta(parts: EngineParts, assemble: Callable[..., EngineParts]) -> StaticStep:
    """The step of an engine like `parts` of one layer, on the meta device: its passes launch kernels of the
    same variants. `assemble`: that of `infer/build.py`."""
    model, device = parts.model, torch.device("meta")
    spec = replace(model.spec, num_layers=1)
    trunk = make_trunk(spec, device=device, dtype=model.dtype)
    model = replace(model, trunk=trunk, spec=spec, local=spec, device=device)
    settings = replace(parts.settings, attention="triton", num_pages=parts.pool.num_pages)
    # The copy allocates its own state; a decoder made anew would repeat its warnings.
    step = assemble(settings, model, None, copy.copy(parts.decoder), ()).step
    assert isinstance(step, StaticStep), f"{type(step)=}"
    return step


def compile_ahead(step: StaticStep, shapes: Iterable[PassShape]) -> int:
    """Compile for the current GPU, or load from Triton's cache, what passes of these shapes launch. `step` is
    on the meta device and was made where kernels are `only_compiled`, as here. Returns the number of
    variants that this process had not compiled yet."""
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch, kernels = JITFunction.run, set()

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.add(self)
        return launch(self, *arguments, grid=grid, warmup=True, **options)

    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    # Not raised here: Triton would then stay in this mode, without threads.
    with ThreadPoolExecutor(num_threads) as pool, AsyncCompileMode(pool, ignore_errors=True) as compiling:
        JITFunction.run = compile_only
        try:
            for shape in shapes:
                step.run(shape)
        finally:
            JITFunction.run = launch
    if any(future.exception() for future in compiling.raw_futures):
        # A launch shall compile again what failed, perhaps for lack of memory, and say why.
        for kernel in kernels:
            kernel.device_caches.clear()
    return len(compiling.raw_futures)
