"""Triton's interpreter without its own overhead and with the types that kernels see, for a process that only
interprets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch_once() -> None:
    """Leave `triton.language` as kernels in the interpreter need it.

    Triton looks for what it has to patch again in every launch and every call of a device function, and lists
    all types to find one: half of the time of our kernels. What is patched and found stays the same."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    if scope is not None:
        scope._changes.clear()
    interpreter._patch_lang = lambda _: scope
    known: dict[str, Any] = {}
    find = interpreter._get_np_dtype

    def found(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = found

    # Its own takes the type of what was compared for the result of a comparison, which is then no mask.
    def splat(self: Any, block: Any, scalar: Any) -> Any:
        return interpreter.TensorHandle(np.full(block.shape, scalar.data, found(block)), block.scalar)

    interpreter.InterpreterBuilder.create_splat = splat
