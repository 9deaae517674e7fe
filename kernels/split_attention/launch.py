"""Launch parameters of the kernels, measured on an H200, and their launches. The operator is in op.py.

B packed rows, T rows of one packed row, N query heads, K KV heads, H head dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from idlm.kernels.backend import INTERPRETED, LOG2_E, has_gluon
from idlm.kernels.split_attention.kernel import (
    backward_kernel,
    finish_kernel,
    forward_kernel,
    prepare_kernel,
    query_gradient_kernel,
)
from idlm.kernels.split_attention.visibility import TILE_ROWS, Visibility

FINISH_BLOCK = 4096
PREPARE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLaunch:
    """Launch parameters of one kernel; `rows` by `walk` is a tile of scores, `rows` the stationary side."""

    rows: int
    walk: int
    warps: int
    stages: int
    parts: int = 1
    """Programs that share the query heads of one KV head; their dk and dv are added afterwards."""


FORWARD = SplitLaunch(rows=64, walk=64, warps=4, stages=3)
BACKWARD = SplitLaunch(rows=128, walk=64, warps=8, stages=2, parts=2)
HOPPER_BACKWARD = SplitLaunch(rows=128, walk=64, warps=8, stages=3, parts=2)
HOPPER_PAIRS = SplitLaunch(rows=128, walk=64, warps=8, stages=2, parts=1)
"""Where a KV head has at most two query heads: parts cost more than they save."""
QUERIES = SplitLaunch(rows=64, walk=64, warps=4, stages=2)
HOPPER_QUERIES = SplitLaunch(rows=128, walk=128, warps=8, stages=2)
"""dq alone. The tiles of `HOPPER_QUERIES` take 192 KB of shared memory, which other GPUs lack."""
NARROW_FORWARD = SplitLaunch(rows=64, walk=64, warps=4, stages=2)
NARROW_BACKWARD = SplitLaunch(rows=128, walk=128, warps=8, stages=3)
NARROW_QUERIES = SplitLaunch(rows=128, walk=64, warps=4, stages=3)
"""Head dims up to 64 on Hopper. Two programs of the narrow queries share a multiprocessor."""
WIDE_FORWARD = SplitLaunch(rows=64, walk=32, warps=4, stages=2)
WIDE_BACKWARD = SplitLaunch(rows=64, walk=32, warps=8, stages=2)
WIDE_QUERIES = SplitLaunch(rows=64, walk=32, warps=8, stages=1)
"""Head dims above 128."""


def run_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, see: Visibility, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, T, N, H] and base-2 log-sum-exp [B, N, T] in float32."""
    batch, num_heads, num_rows, head_dim = query.shape
    launch = forward_launch(query)
    output = query.new_empty(batch, num_rows, num_heads, head_dim)
    lse = query.new_empty(batch, num_heads, num_rows, dtype=torch.float32)
    block_h = padded_head(head_dim)
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
        see.own_until_BT,
        see.query_tiles_BI8,
        see.query_order,
        see.num_rows_B,
        num_rows,
        see.query_tiles_BI8.shape[1],
        scale * LOG2_E,
        N=num_heads,
        G=num_heads // key.shape[1],
        BLOCK_Q=launch.rows,
        BLOCK_K=launch.walk,
        BLOCK_H=block_h,
        SPLITS=splits,
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
    return output, lse


def run_backward(
    doutput: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    see: Visibility,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, all contiguous as [B, T, heads, H].

    Where there are more keys than queries (`visibility(..., num_queries=...)`), those after the last query
    get the gradient zero, and B is 1."""
    batch, num_heads, num_rows, head_dim = query.shape
    num_keys = key.shape[2]
    assert batch == 1 or num_keys == num_rows, f"{batch=} {num_keys=} {num_rows=}"
    whole_key, whole_value, key, value = key, value, key[:, :, :num_rows], value[:, :, :num_rows]
    group = num_heads // key.shape[1]
    on_hopper, launch = takes_hopper_kernel(query), backward_launch(query, whole_key)
    parts = launch.parts if group % launch.parts == 0 else 1
    doutput = addressable(doutput)
    delta = torch.empty_like(lse)
    # A tile of a nearly empty packed row starts below row 0, where a bulk addition may not, hence the margin.
    margin = launch.walk
    dq_sums = query.new_empty(margin + batch * num_rows, num_heads * head_dim, dtype=torch.float32)
    dq_sum = dq_sums[margin:]
    prepare_kernel[(triton.cdiv(num_rows, PREPARE_ROWS), batch * num_heads)](
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
        BLOCK_T=PREPARE_ROWS,
        BLOCK_H=padded_head(head_dim),
    )
    dkey, dvalue = (key.new_empty(batch, num_keys, key.shape[1], head_dim) for _ in "kv")
    sums = [gradient[:, :num_rows] for gradient in (dkey, dvalue)]
    dk, dv = sums
    if parts > 1:
        dk, dv = (key.new_empty(parts, *one.shape, dtype=torch.float32) for one in sums)
    inputs = (addressable(query), addressable(key), addressable(value), doutput.transpose(1, 2))
    _run_walk(launch, parts, inputs, dq_sums, (dk, dv), (lse, delta), see, scale, on_hopper=on_hopper)
    if parts > 1:
        for part_sums, sum_BTKH in zip((dk, dv), sums, strict=True):
            _finish(part_sums, sum_BTKH)
    dq = torch.empty_like(output)
    if num_keys == num_rows:
        _finish(dq_sum.view(1, *output.shape), dq, scale)
        return dq, dkey, dvalue
    dkey[:, num_rows:], dvalue[:, num_rows:] = 0, 0
    inputs = (inputs[0], addressable(whole_key), addressable(whole_value), inputs[3])
    _run_queries(inputs, dq_sum, (lse, delta), see, scale, dq)
    return dq, dkey, dvalue


def forward_launch(query: torch.Tensor) -> SplitLaunch:
    """How the forward kernel is launched for `query` [B, N, T, H]."""
    if query.shape[-1] <= 64 and takes_hopper_kernel(query):
        return NARROW_FORWARD
    return FORWARD if query.shape[-1] <= 128 else WIDE_FORWARD


def backward_launch(query: torch.Tensor, key: torch.Tensor) -> SplitLaunch:
    """How the backward walk of `query` [B, N, T, H] is launched; more rows of `key` are clean ones."""
    if not takes_hopper_kernel(query):
        return BACKWARD if query.shape[-1] <= 128 else WIDE_BACKWARD
    if query.shape[-1] <= 64:
        return NARROW_BACKWARD
    return HOPPER_PAIRS if query.shape[1] <= 2 * key.shape[1] else HOPPER_BACKWARD


def queries_launch(query: torch.Tensor) -> SplitLaunch:
    """How the kernel of dq alone is launched."""
    if query.shape[-1] > 128:
        return WIDE_QUERIES
    if not takes_hopper_kernel(query):
        return QUERIES
    return NARROW_QUERIES if query.shape[-1] <= 64 else HOPPER_QUERIES


def _run_walk(
    launch: SplitLaunch,
    parts: int,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dq_sums: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor],
    statistics: tuple[torch.Tensor, torch.Tensor],
    see: Visibility,
    scale: float,
    *,
    on_hopper: bool,
) -> None:
    """Run Triton's or the Hopper backward kernel, which fills dk and dv (`outputs`) and adds to `dq_sums`.

    `inputs`: query, key, value and the gradient of the output. `statistics`: log-sum-exp and delta. Columns
    past the head dim are zero, so Triton's kernel may add them to the next head of `dq_sums`."""
    query, key = inputs[:2]
    num_heads, num_kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    block_h, splits = padded_head(head_dim), TILE_ROWS // launch.rows
    sums_block = [launch.walk, block_h]
    tile_rows = (launch.walk, launch.rows, launch.rows, launch.walk)
    options: dict[str, Any] = {"N": num_heads, "G": num_heads // num_kv_heads, "H": head_dim, "PARTS": parts}
    options |= {"BLOCK_Q": launch.walk, "BLOCK_K": launch.rows, "BLOCK_H": block_h}
    options |= {"SPLITS": splits, "STAGES": launch.stages, "num_warps": launch.warps}
    kernel: Any
    if on_hopper:
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TileDescriptor

        from idlm.kernels.split_attention import kernel_hopper

        kernel, layout = kernel_hopper.backward_kernel, NVMMASharedLayout(128, 16, rank=4)
        tiles = [
            TileDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, block_h], layout)
            for x, rows in zip(inputs, tile_rows, strict=True)
        ]
        sums_layout = NVMMASharedLayout(128, 32, rank=2)
        sums = [TileDescriptor(dq_sums, list(dq_sums.shape), list(dq_sums.stride()), sums_block, sums_layout)]
    else:
        kernel = backward_kernel
        tiles = [_descriptor(x, rows, block_h) for x, rows in zip(inputs, tile_rows, strict=True)]
        sums = [TensorDescriptor(dq_sums, list(dq_sums.shape), list(dq_sums.stride()), sums_block)]
        sums.append(dq_sums[launch.walk :])
        options |= {"BULK": not INTERPRETED}
    kernel[(see.key_order.numel() * splits * num_kv_heads * parts,)](
        *tiles,
        *sums,
        *(*outputs, *statistics),
        *(see.seen_start_BT, see.seen_end_BT, see.own_from_BT, see.own_end_BT),
        *(see.key_tiles_BI8, see.key_order, see.num_queries_B),
        *(*see.own_end_BT.shape, see.key_tiles_BI8.shape[1]),
        *(scale, scale * LOG2_E),
        **options,
    )


def _run_queries(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dq_sum: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor],
    see: Visibility,
    scale: float,
    dq: torch.Tensor,
) -> None:
    """Fill dq [B, T, N, H] from the keys across and the sums of the own half. Arguments as of `_run_walk`."""
    query, key = inputs[:2]
    num_heads, num_rows, head_dim = query.shape[1:]
    launch = queries_launch(query)
    block_h, splits = padded_head(head_dim), TILE_ROWS // launch.rows
    tile_rows = (launch.rows, launch.walk, launch.walk, launch.rows, launch.rows)
    query_gradient_kernel[(see.query_order.numel() * splits * num_heads,)](
        *(_descriptor(x, r, block_h) for x, r in zip((*inputs, dq.transpose(1, 2)), tile_rows, strict=True)),
        *(dq_sum, *statistics),
        *(see.across_start_BT, see.across_end_BT, see.query_tiles_BI8, see.query_order, see.num_rows_B),
        *(num_rows, see.query_tiles_BI8.shape[1], scale, scale * LOG2_E),
        N=num_heads,
        G=num_heads // key.shape[1],
        H=head_dim,
        BLOCK_Q=launch.rows,
        BLOCK_K=launch.walk,
        BLOCK_H=block_h,
        SPLITS=splits,
        STAGES=launch.stages,
        num_warps=launch.warps,
    )


def _finish(parts: torch.Tensor, total: torch.Tensor, scale: float = 1.0) -> None:
    """Fill `total`, contiguous, with the sum of `parts` over the first axis, scaled."""
    grid = (triton.cdiv(total.numel(), FINISH_BLOCK),)
    finish_kernel[grid](parts, total, total.numel(), scale, PARTS=parts.shape[0], BLOCK=FINISH_BLOCK)


def takes_hopper_kernel(query: torch.Tensor) -> bool:
    """Whether the Gluon kernel computes these heads on this device."""
    return padded_head(query.shape[-1]) in (64, 128) and has_gluon(query.device)


def padded_head(head_dim: int) -> int:
    """Columns of a tile; those past the head dim read as zero."""
    return max(16, triton.next_power_of_2(head_dim))


def addressable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied unless bulk copies can address it: last stride 1, others multiples of 16 bytes."""
    aligned = all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
    fits = aligned and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
    return tensor if fits else tensor.contiguous()


def _descriptor(tensor: torch.Tensor, rows: int, block_h: int) -> TensorDescriptor:
    """Descriptor of tiles [rows, block_h] of a tensor [B, heads, T, H]; elements outside read as zero."""
    tensor = addressable(tensor)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, block_h])
