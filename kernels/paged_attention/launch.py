"""The Triton back end: the launches of a layer; planning.py has the plan of a step, and the records.

B sequences, R rows fed this pass, N query heads, K KV heads, G = N / K, H head dim."""

from __future__ import annotations

import torch
import triton

from idlm.kernels.backend import FP8, INTERPRETED, KERNEL_DTYPES, LOG2_E, gpu_of, pdl_options
from idlm.kernels.paged_attention.choice import Walk, padded_head
from idlm.kernels.paged_attention.kernel import attend_kernel
from idlm.kernels.paged_attention.kernel_parts import combine_kernel
from idlm.kernels.paged_attention.planning import TritonPlan, groups_serve, plan
from idlm.kernels.paged_attention.types import BeforeBlock, HeadShape

__all__ = ["TritonPlan", "plan", "problems", "run"]
MAX_HEAD_DIM = 256
MAX_GROUP = 128


def problems(shape: HeadShape, *, deterministic: bool, device: torch.device) -> list[str]:
    """Every reason why this back end cannot compute such heads; empty when it can."""
    found = []
    if gpu_of(device).type != "cuda" and not INTERPRETED:
        found.append(f"needs a CUDA device, got {device.type}")
    if shape.dtype not in KERNEL_DTYPES:
        found.append(f"computes bfloat16, float16 and float32, got {shape.dtype}")
    if shape.kv_dtype not in (None, shape.dtype, FP8):
        found.append(f"takes a cache of {shape.dtype} or {FP8}, got {shape.kv_dtype}")
    if shape.head_dim > MAX_HEAD_DIM:
        found.append(f"head dim {shape.head_dim} is above {MAX_HEAD_DIM}")
    if shape.group > MAX_GROUP:
        found.append(f"{shape.group} query heads per KV head are more than {MAX_GROUP}")
    return found


def run(
    q_RNH: torch.Tensor,
    caches: tuple[tuple[torch.Tensor, torch.Tensor | None], ...],
    plan: TritonPlan,
    *,
    scale: float,
    out: torch.Tensor | None,
    lists_BKC: torch.Tensor | None,
    before: BeforeBlock | None,
) -> torch.Tensor:
    """See `op.paged_attention`; `caches`: keys and values, each with its scales."""
    rows, shape, ((k_cache_SKH, k_scale_K), (v_cache_SKH, v_scale_K)) = plan.rows, plan.shape, caches
    num_rows = rows.own_slots_R.shape[0]
    assert q_RNH.shape == (num_rows, shape.num_heads, shape.head_dim), f"{q_RNH.shape=} {shape=}"
    assert q_RNH.dtype == shape.dtype and k_cache_SKH.dtype == (shape.kv_dtype or shape.dtype), f"{shape=}"
    assert k_cache_SKH.stride() == v_cache_SKH.stride(), f"{k_cache_SKH.stride()=} {v_cache_SKH.stride()=}"
    assert q_RNH.stride(-1) == k_cache_SKH.stride(-1) == 1 and scale > 0, f"{q_RNH.stride()=} {scale=}"
    assert (k_scale_K is None) == (v_scale_K is None), f"{k_scale_K=} {v_scale_K=}"
    o_RNH = torch.empty(q_RNH.shape, dtype=q_RNH.dtype, device=q_RNH.device) if out is None else out
    assert o_RNH.stride(-1) == 1 and o_RNH.shape == q_RNH.shape, f"{o_RNH.shape=} {o_RNH.stride()=}"
    if num_rows == 0:
        return o_RNH
    scales = None if k_scale_K is None else (k_scale_K, v_scale_K)
    for walk in plan.walks:
        _attend((q_RNH, k_cache_SKH, v_cache_SKH, o_RNH), walk, scale, scales, lists_BKC, before)
        if walk.num_split:
            _combine(o_RNH, walk, v_scale_K, before)
    return o_RNH


def _attend(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    plan: TritonPlan,
    scale: float,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] | None,
    lists_BKC: torch.Tensor | None,
    before: BeforeBlock | None,
) -> None:
    """One walk; `tensors`: queries, cached keys and values, output."""
    rows, shape, launch = plan.rows, plan.shape, plan.launch
    grid = (plan.num_items * shape.num_kv_heads,)
    q_RNH, k_cache_SKH, _, o_RNH = tensors
    of_rows = (rows.block_table, rows.limits_R, rows.branch_starts_R, rows.own_slots_R)
    strides = (*q_RNH.stride()[:2], *k_cache_SKH.stride()[:2], *o_RNH.stride()[:2])
    sizes = (scale * LOG2_E, strides, rows.block_table.stride(0))
    if before is None and scales is None and lists_BKC is None and has_groups(plan):
        from idlm.kernels.paged_attention import kernel_hopper

        kernel_hopper.attend_kernel[(triton.cdiv(grid[0], launch.turns),)](
            *(tensors, of_rows, plan.items, grid[0], launch.turns, plan.parts, *sizes),
            SHAPE=shape,
            PAGE=rows.page_size,
            BLOCK_N=launch.block_n,
            REGISTERS=kernel_hopper.REGISTERS,
            COPY_REGISTERS=kernel_hopper.COPY_REGISTERS,
            num_warps=4,
            maxnreg=kernel_hopper.MEAN_REGISTERS,
            **pdl_options(launch.pdl),
        )
        return
    walk = Walk(
        block_m=launch.block_m,
        block_n=launch.block_n,
        block_h=padded_head(shape.head_dim),
        page_size=rows.page_size,
        split_blocks=launch.split_slots // launch.block_n,
        octave=launch.octave,
        stages=launch.stages,
        precision="ieee" if shape.dtype == torch.float32 else "tf32",
        early=launch.early and plan.num_split > 0,
        num_listed=0 if lists_BKC is None else rows.num_listed,
        sums_before=before is not None,
        has_windows=rows.first_slots_R is not None,
    )
    attend_kernel[grid](
        *(tensors, (*of_rows, rows.first_slots_R), plan.items, scales, lists_BKC, before, plan.parts, *sizes),
        SHAPE=shape,
        WALK=walk,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **pdl_options(launch.pdl),
    )


def has_groups(plan: TritonPlan) -> bool:
    """Whether the walk of two warpgroups is chosen and computes these tiles on this device."""
    launch = plan.launch
    is_tile = launch.block_m == 128 and launch.block_n in (64, 128) and not launch.split_slots
    return launch.two_groups and is_tile and groups_serve(plan.rows, plan.shape)


def _combine(
    o_RNH: torch.Tensor, plan: TritonPlan, v_scale_K: torch.Tensor | None, before: BeforeBlock | None
) -> None:
    shape, launch = plan.shape, plan.launch
    pieces = triton.cdiv(launch.block_m, launch.combine_rows)
    combine_kernel[(plan.num_split * shape.num_kv_heads, pieces)](
        *(o_RNH, plan.tiles, v_scale_K, before, plan.parts, o_RNH.stride()[:2]),
        SHAPE=shape,
        TILE_M=launch.block_m,
        BLOCK_M=launch.combine_rows,
        BLOCK_H=padded_head(shape.head_dim),
        PARTS=1 if launch.split_slots else launch.combine_parts,
        STAGES=launch.sum_stages,
        num_warps=launch.combine_warps,
        **pdl_options(launch.pdl),
    )
