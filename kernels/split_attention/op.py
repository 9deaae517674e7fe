"""Split attention as one operator with a backward pass, opaque to torch.compile: it never breaks a graph.

bfloat16 and float16 on a GPU; under TRITON_INTERPRET=1 also float32 on a CPU. Contract in README.md.
B packed rows, T rows of one packed row, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from idlm.kernels.split_attention.reference import split_attention_reference
from idlm.kernels.split_attention.visibility import TILE_ROWS, Visibility, from_tensors

LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
FINISH_BLOCK = 4096
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one kernel is launched; `rows` by `walk` is a tile of scores, `rows` the stationary side."""

    rows: int
    walk: int
    warps: int
    stages: int
    parts: int = 1
    """Programs that share the query heads of one KV head; their dk and dv are added afterwards."""


FORWARD = Launch(rows=64, walk=64, warps=4, stages=3)
BACKWARD = Launch(rows=128, walk=64, warps=8, stages=2, parts=2)
WIDE_FORWARD = Launch(rows=64, walk=32, warps=4, stages=2)
WIDE_BACKWARD = Launch(rows=64, walk=32, warps=8, stages=2)
"""Head dims above 128."""


def split_attention(
    query_BNTH: torch.Tensor,
    key_BKTH: torch.Tensor,
    value_BKTH: torch.Tensor,
    see: Visibility,
    *,
    scale: float,
) -> torch.Tensor:
    """Attention [B, T, N, H], zero for padding rows, whose inputs are never read. Strides may be any."""
    return split_attention_ranges(query_BNTH, key_BKTH, value_BKTH, see.tensors(), scale=scale)


def split_attention_ranges(
    query_BNTH: torch.Tensor,
    key_BKTH: torch.Tensor,
    value_BKTH: torch.Tensor,
    ranges: Sequence[torch.Tensor],
    *,
    scale: float,
) -> torch.Tensor:
    """The same with `Visibility.tensors()`, which pass through wrappers that know tensors only.

    What the kernel does not take (float32, a CPU) the reference computes, with T x T scores: for checks.
    """
    if not takes(query_BNTH):
        return split_attention_reference(query_BNTH, key_BKTH, value_BKTH, from_tensors(ranges), scale=scale)
    return _forward(query_BNTH, key_BKTH, value_BKTH, list(ranges), scale)[0]


def takes(query_BNTH: torch.Tensor) -> bool:
    """Whether the kernel computes inputs of this device, dtype and head dim."""
    head_dim = query_BNTH.shape[-1]
    if INTERPRETED:
        return head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0
    is_16_bit = query_BNTH.dtype in (torch.bfloat16, torch.float16)
    return query_BNTH.is_cuda and is_16_bit and head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0


@torch.library.custom_op("idlm::split_attention", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranges: Sequence[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, T, N, H] and base-2 log-sum-exp [B, N, T] in float32."""
    import triton

    from idlm.kernels.split_attention.kernel import forward_kernel

    see = from_tensors(ranges)
    batch, num_heads, num_rows, head_dim = query.shape
    group = num_heads // key.shape[1]
    launch = FORWARD if head_dim <= 128 else WIDE_FORWARD
    output = query.new_empty(batch, num_rows, num_heads, head_dim)
    lse = query.new_empty(batch, num_heads, num_rows, dtype=torch.float32)
    block_h = max(16, triton.next_power_of_2(head_dim))
    splits = TILE_ROWS // launch.rows
    forward_kernel[(see.query_order.numel() * splits * num_heads,)](
        _descriptor(query, launch.rows, block_h),
        _descriptor(key, launch.walk, block_h),
        _descriptor(value, launch.walk, block_h),
        _descriptor(output.transpose(1, 2), launch.rows, block_h),
        lse,
        see.across_start_BT,
        see.across_end_BT,
        see.own_start_BT,
        see.query_tiles_BI8,
        see.query_order,
        see.num_rows_B,
        num_rows,
        see.query_tiles_BI8.shape[1],
        scale * LOG2_E,
        N=num_heads,
        G=group,
        BLOCK_Q=launch.rows,
        BLOCK_K=launch.walk,
        BLOCK_H=block_h,
        SPLITS=splits,
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
    return output, lse


@_forward.register_fake
def _forward_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranges: Sequence[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, num_heads, num_rows, head_dim = query.shape
    lse = query.new_empty(batch, num_heads, num_rows, dtype=torch.float32)
    return query.new_empty(batch, num_rows, num_heads, head_dim), lse


@torch.library.custom_op("idlm::split_attention_backward", mutates_args=())
def _backward(
    doutput: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    ranges: Sequence[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, all contiguous as [B, T, heads, H]."""
    import triton

    from idlm.kernels.split_attention.kernel import backward_kernel, finish_kernel, prepare_kernel

    see = from_tensors(ranges)
    batch, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    launch = BACKWARD if head_dim <= 128 else WIDE_BACKWARD
    parts = launch.parts if group % launch.parts == 0 else 1
    block_h = max(16, triton.next_power_of_2(head_dim))
    doutput = doutput if _fits_descriptor(doutput) else doutput.contiguous()
    delta = torch.empty_like(lse)
    dq_sum = torch.empty(output.shape, device=query.device, dtype=torch.float32)
    prepare_kernel[(triton.cdiv(num_rows, 64), batch * num_heads)](
        output,
        doutput,
        doutput.stride(0),
        doutput.stride(1),
        doutput.stride(2),
        delta,
        dq_sum,
        num_rows,
        N=num_heads,
        H=head_dim,
        BLOCK_T=64,
        BLOCK_H=block_h,
    )
    parts_shape = (parts, batch, num_rows, num_kv_heads, head_dim)
    dk, dv = (
        key.new_empty(parts_shape[parts == 1 :], dtype=key.dtype if parts == 1 else torch.float32)
        for _ in "kv"
    )
    splits = TILE_ROWS // launch.rows
    backward_kernel[(see.key_order.numel() * splits * num_kv_heads * parts,)](
        _descriptor(query, launch.walk, block_h),
        _descriptor(key, launch.rows, block_h),
        _descriptor(value, launch.rows, block_h),
        _descriptor(doutput.transpose(1, 2), launch.walk, block_h),
        _descriptor(dq_sum.transpose(1, 2), launch.walk, block_h),
        dq_sum,
        dk,
        dv,
        lse,
        delta,
        see.seen_start_BT,
        see.seen_end_BT,
        see.own_end_BT,
        see.key_tiles_BI8,
        see.key_order,
        see.num_rows_B,
        batch,
        num_rows,
        see.key_tiles_BI8.shape[1],
        scale,
        scale * LOG2_E,
        N=num_heads,
        G=group,
        H=head_dim,
        PARTS=parts,
        BLOCK_Q=launch.walk,
        BLOCK_K=launch.rows,
        BLOCK_H=block_h,
        SPLITS=splits,
        STAGES=launch.stages,
        BULK=not INTERPRETED,
        num_warps=launch.warps,
    )
    dq = torch.empty_like(output)
    finish_kernel[(triton.cdiv(dq.numel(), FINISH_BLOCK),)](
        dq_sum, dq, dq.numel(), scale, PARTS=1, BLOCK=FINISH_BLOCK
    )
    if parts == 1:
        return dq, dk, dv
    sums = [key.new_empty(parts_shape[1:]) for _ in "kv"]
    for total, part in zip(sums, (dk, dv), strict=True):
        grid = (triton.cdiv(total.numel(), FINISH_BLOCK),)
        finish_kernel[grid](part, total, total.numel(), 1.0, PARTS=parts, BLOCK=FINISH_BLOCK)
    return dq, sums[0], sums[1]


@_backward.register_fake
def _backward_shapes(
    doutput: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    ranges: Sequence[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, num_kv_heads, num_rows, head_dim = key.shape
    dkey, dvalue = (key.new_empty(batch, num_rows, num_kv_heads, head_dim) for _ in range(2))
    return torch.empty_like(output), dkey, dvalue


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ranges, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, *ranges)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, doutput: torch.Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, output, lse, *ranges = ctx.saved_tensors
    gradients = _backward(doutput, query, key, value, output, lse, ranges, ctx.scale)
    return *(gradient.transpose(1, 2) for gradient in gradients), [None] * len(ranges), None


torch.library.register_autograd("idlm::split_attention", _gradients, setup_context=_keep)


def _fits_descriptor(tensor: torch.Tensor) -> bool:
    """Whether the bulk copy engine can address it: unit stride inside, all others multiples of 16 bytes."""
    aligned = all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
    return aligned and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0


def _descriptor(tensor: torch.Tensor, rows: int, block_h: int) -> Any:
    """Of tiles [rows, block_h] of a tensor [B, heads, T, H]; what lies outside reads as zero."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    tensor = tensor if _fits_descriptor(tensor) else tensor.contiguous()
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, block_h])
