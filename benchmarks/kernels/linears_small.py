"""Part `small` of benchmarks.kernels.linears: norm, rotation, SwiGLU and gated LoRA against plain torch.

R rows, J fused heads, D width, F ffn width, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.stream import Timer
from idlm.kernels.qkv_rope_cache import make_rope, qkv_rope_cache
from idlm.kernels.rms_norm import add_rms_norm
from idlm.kernels.swiglu import swiglu

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, RANK = 32, 8, 128, 128
LORA_SPLITS = (4, 8, 16)
REPEATS = 32
Arms = dict[str, Callable[[bool], Any]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in fp32, cast back, then scale, as stock models of transformers do; `weight`
    broadcasts from the right.
    """
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def rotate(x_RJH: Tensor, cos_R1H: Tensor, sin_R1H: Tensor) -> Tensor:
    """Rotary embedding in the rotate-half layout; sin carries the sign of the swapped halves."""
    swapped_RJH = torch.roll(x_RJH, x_RJH.shape[-1] // 2, dims=-1)
    return x_RJH * cos_R1H + swapped_RJH * sin_R1H


class Note(Protocol):
    """Type of `Bench.note` of benchmarks.kernels.linears."""

    def __call__(
        self,
        case: dict[str, Any],
        us: float,
        *,
        baseline: float | None,
        num_bytes: float,
        gate: bool,
        exactness: str = "exact",
    ) -> None: ...


def small_lines(timer: Timer, width: int, ffn: int, rows_of: list[int], note: Note) -> None:
    """Measure every op at every number of rows, with and without programmatic launches, then the adapter."""
    for rows in rows_of:
        for name, (torch_arm, arms, num_bytes) in _ops(rows, width, ffn).items():
            baseline = timer.us_per_call([torch_arm] * REPEATS)
            for choice, arm in arms.items():
                for pdl in (False, True):
                    us = timer.us_per_call([partial(arm, pdl)] * REPEATS)
                    case = {"op": name, "rows": rows, "launch": choice, "pdl": pdl}
                    note(case, us, baseline=baseline, num_bytes=num_bytes, gate=True)


def _ops(rows: int, width: int, ffn: int) -> dict[str, tuple[Callable[[], Any], Arms, int]]:
    """name -> (plain torch, launches, bytes)."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, residual, weight = draw(rows, width), draw(rows, width), draw(width)
    gate_up = draw(rows, 2 * ffn)
    fused, rotated = NUM_HEADS + 2 * NUM_KV_HEADS, NUM_HEADS + NUM_KV_HEADS
    qkv, norm = draw(rows, fused, HEAD_DIM), draw(rotated, HEAD_DIM)
    caches = [torch.zeros(rows, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    slots = torch.arange(rows, device="cuda")
    inv_freq = 1e6 ** -torch.linspace(0, 1, HEAD_DIM // 2, device="cuda")

    def plain_rope() -> None:
        angles = slots[:, None].float() * inv_freq
        cos, sin = angles.cos(), angles.sin()
        tables = [torch.cat(one, -1).bfloat16()[:, None] for one in ((cos, cos), (-sin, sin))]
        turned = rotate(rms_norm(qkv[:, :rotated], norm, 1e-6), *tables)
        caches[0][slots], caches[1][slots] = turned[:, NUM_HEADS:], qkv[:, rotated:]

    def rope(heads: int) -> Callable[[bool], Any]:
        return lambda pdl: qkv_rope_cache(
            qkv,
            *caches,
            rope=make_rope(slots, inv_freq, dtype=qkv.dtype),
            slot_mapping_R=slots,
            qk_norm_YH=norm,
            heads_per_program=heads,
            pdl=pdl,
        )

    def normed(warps: int) -> Callable[[bool], Any]:
        return lambda pdl: add_rms_norm(x, residual, weight, eps=1e-6, warps=warps, pdl=pdl)

    def activated(block: int) -> Callable[[bool], Any]:
        return lambda pdl: swiglu(gate_up, block=block, pdl=pdl)

    plain_norm = lambda: rms_norm(residual.add_(x), weight, 1e-6)  # noqa: E731
    plain_act = lambda: F.silu(gate_up[:, :ffn]) * gate_up[:, ffn:]  # noqa: E731
    return {
        "add_rms_norm": (plain_norm, {f"w{n}": normed(n) for n in (4, 8, 16)}, 8 * rows * width),
        "swiglu": (plain_act, {f"b{n}": activated(n) for n in (512, 1024, 2048)}, 6 * rows * ffn),
        "qkv_rope_cache": (plain_rope, {f"j{n}": rope(n) for n in (1, 4, 8)}, 4 * qkv.numel()),
    }
