"""Launches of the kernels of experts: tiles of the grouped products, and their choice by the number of rows.

R rows, X experts that rows choose from, E experts that are here, C chosen experts, P = R C pairs, T tiles, D
width, F ffn of an expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from idlm.kernels.backend import pdl_options
from idlm.kernels.experts.kernel import grouped_kernel
from idlm.kernels.experts.kernel_rows import add_experts_kernel, admit_kernel, plan_kernel, route_kernel
from idlm.kernels.experts.types import Routing

PLAN_PAIRS = 8192
COMBINE_COLUMNS = 1024
ADMIT_WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Launch parameters of one product.

    `block_o` outputs; with `stacked` (gate and up only) the M side of the instruction is twice as large,
    which must be a multiple of 64. `block_i` columns per step."""

    block_o: int
    block_i: int
    warps: int = 4
    stages: int = 4
    stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsLaunch:
    """`block_r`: pairs of a tile, the same for both products."""

    block_r: int
    gate_up: Tile
    down: Tile


STREAMED = {
    block_r: ExpertsLaunch(
        block_r=block_r,
        gate_up=Tile(block_o=32, block_i=128, stacked=True),
        down=Tile(block_o=64, block_i=128),
    )
    for block_r in (16, 32)
}
"""For few rows, where the number of weight bytes on their way limits the speed."""
COMPUTED = {
    block_r: ExpertsLaunch(
        block_r=block_r,
        gate_up=Tile(block_o=128, block_i=64, warps=8),
        down=Tile(block_o=256, block_i=64, warps=8),
    )
    for block_r in (64, 128)
}
EXACT = ExpertsLaunch(
    block_r=16, gate_up=Tile(block_o=64, block_i=32, stages=2), down=Tile(block_o=64, block_i=32, stages=2)
)
"""fp32 products use fma in an order that follows the tile, so all numbers of rows share one tile."""


def choose(num_rows: int, num_chosen: int, num_experts: int, dtype: torch.dtype) -> ExpertsLaunch:
    """Choose by the mean and the maximum number of rows of an expert."""
    if dtype.itemsize > 2:
        return EXACT
    mean = num_rows * num_chosen / num_experts
    # Twice the mean, so that few experts need a second tile and read their weights twice.
    wanted = min(num_rows, 2 * mean)
    for block_r, launch in STREAMED.items():
        if wanted <= block_r:
            return launch
    return COMPUTED[64 if mean < 96 else 128]


def num_tiles(num_pairs: int, num_experts: int, block_r: int) -> int:
    """Maximum number of tiles of `num_pairs`: every expert has at most one that is not full."""
    return min(num_experts, num_pairs) + num_pairs // block_r


def run_route(
    logits_RX: Tensor,
    routing: Routing,
    *,
    bias_X: Tensor | None,
    slots_R: Tensor | None,
    positions_R: Tensor | None,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """Route with one program per row; returns experts (int32) and weights (fp32), both [R, C]. With a
    capacity, the first row of each block admits experts before, in another launch."""
    num_rows, X = logits_RX.shape
    shape = (num_rows, routing.num_chosen)
    experts_RC = torch.empty(shape, dtype=torch.int32, device=logits_RX.device)
    weights_RC = torch.empty(shape, dtype=torch.float32, device=logits_RX.device)
    if num_rows:
        # If all groups are chosen, groups change nothing.
        groups = routing.num_groups if routing.num_chosen_groups < routing.num_groups else 1
        given = (logits_RX, bias_X, slots_R, positions_R)
        route_kernel[(num_rows,)](
            *(given, None if routing.capacity is None else _admit(given, routing, pdl)),
            *(experts_RC, weights_RC, logits_RX.stride(0)),
            ROUTING=routing,
            X=X,
            GROUPS=groups,
            PAD_G=triton.next_power_of_2(groups),
            PAD_S=triton.next_power_of_2(X // groups),
            num_warps=1,
            **pdl_options(pdl),
        )
    return experts_RC, weights_RC


def _admit(
    given: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None], routing: Routing, pdl: bool
) -> Tensor:
    """Whether each block admits each expert, int8 [R, X], in the row of the block's first row; the other rows
    are not written."""
    (num_rows, X), device = given[0].shape, given[0].device
    admitted_RX = torch.empty(num_rows, X, dtype=torch.int8, device=device)
    admit_kernel[(num_rows,)](
        *(given, admitted_RX, num_rows, given[0].stride(0)),
        ROUTING=routing,
        X=X,
        PAD_W=triton.next_power_of_2(routing.block_size),
        PAD_X=triton.next_power_of_2(X),
        num_warps=ADMIT_WARPS,
        **pdl_options(pdl),
    )
    return admitted_RX


def run_experts(
    x_RD: Tensor,
    weights: tuple[Tensor, Tensor],
    chosen: tuple[Tensor, Tensor],
    *,
    first: int,
    num_choices: int,
    shared_RD: Tensor | None,
    launch: ExpertsLaunch | None,
    pdl: bool,
) -> Tensor:
    """Plan the tiles, run both grouped products and sum; returns [R, D]. `launch` None: chosen by rule."""
    (gate_up_EFD, down_EDF), (experts_RC, weights_RC) = weights, chosen
    experts_RC, weights_RC = experts_RC.contiguous(), weights_RC.contiguous()
    num_rows, num_chosen = experts_RC.shape
    num_experts, D, F = down_EDF.shape
    out_RD = x_RD.new_empty(num_rows, D)
    if num_rows == 0:
        return out_RD
    launch = launch or choose(num_rows, num_chosen, num_choices, x_RD.dtype)
    plan = plan_tiles(experts_RC, first, num_experts, launch.block_r, pdl)
    hidden_PF, y_PD = x_RD.new_empty(experts_RC.numel(), F), x_RD.new_empty(experts_RC.numel(), D)
    grouped(x_RD, gate_up_EFD, hidden_PF, plan, experts_RC, first, launch.block_r, launch.gate_up, pdl, True)
    grouped(hidden_PF, down_EDF, y_PD, plan, experts_RC, first, launch.block_r, launch.down, pdl, False)
    combine(y_PD, experts_RC, weights_RC, shared_RD, out_RD, first=first, num_experts=num_experts, pdl=pdl)
    return out_RD


def combine(
    y_PD: Tensor,
    experts_RC: Tensor,
    weights_RC: Tensor,
    shared_RD: Tensor | None,
    out_RD: Tensor,
    *,
    first: int,
    num_experts: int,
    pdl: bool,
) -> None:
    """Write the weighted sum of each row's pairs, plus `shared_RD`, which may be `out_RD` itself."""
    (num_rows, num_chosen), D = experts_RC.shape, out_RD.shape[1]
    block = min(COMBINE_COLUMNS, triton.next_power_of_2(D))
    add_experts_kernel[(num_rows * triton.cdiv(D, block),)](
        *(y_PD, experts_RC, weights_RC, shared_RD, out_RD, first, num_experts, D),
        0 if shared_RD is None else shared_RD.stride(0),
        CHOSEN=num_chosen,
        BLOCK_D=block,
        num_warps=4,
        **pdl_options(pdl),
    )


def plan_tiles(
    experts_RC: Tensor,
    first: int,
    num_experts: int,
    block_r: int,
    pdl: bool,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Tiles [T, 4] and the pairs sorted by expert [P], int32, in `out` if given; None for one row, whose
    experts all differ."""
    if len(experts_RC) == 1:
        return None
    num_pairs = experts_RC.numel()
    tiles = num_tiles(num_pairs, num_experts, block_r)
    if out is None:
        tiles_T4 = torch.empty(tiles, 4, dtype=torch.int32, device=experts_RC.device)
        order_P = torch.empty(num_pairs, dtype=torch.int32, device=experts_RC.device)
    else:
        tiles_T4, order_P = out
    block_p = min(PLAN_PAIRS, max(128, triton.next_power_of_2(num_pairs)))
    plan_kernel[(num_experts,)](
        *(experts_RC, order_P, tiles_T4, num_pairs, tiles, first, num_experts),
        BLOCK_P=block_p,
        BLOCK_R=block_r,
        PAD_E=max(32, triton.next_power_of_2(num_experts)),
        num_warps=8 if block_p > 1024 else 4,
        **pdl_options(pdl),
    )
    return tiles_T4, order_P


def grouped(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    plan: tuple[Tensor, Tensor] | None,
    experts_RC: Tensor,
    first: int,
    block_r: int,
    tile: Tile,
    pdl: bool,
    gated: bool,
) -> None:
    """Write x @ weight[e].T for the experts e of each pair into `y` [pairs, OUT], in place.

    x [R or pairs, IN], weight [E, OUT or 2 OUT, IN]; `gated`: gate and up rows, and y = silu(gate) * up."""
    IN, OUT = x.shape[1], y.shape[1]
    num = experts_RC.numel() if plan is None else len(plan[0])
    block_i = min(tile.block_i, max(16, triton.next_power_of_2(IN)))
    grouped_kernel[(num * triton.cdiv(OUT, tile.block_o),)](
        *(x, weight, y, (*(plan or (None, None)), experts_RC)),
        *(first, len(weight), experts_RC.shape[1], IN, OUT),
        (x.stride(0), *weight.stride()[:2], y.stride(0)),
        GATED=gated,
        EVEN=IN % block_i == 0,
        TILE=tile,
        BLOCK_R=block_r,
        BLOCK_I=block_i,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        **pdl_options(pdl),
    )
