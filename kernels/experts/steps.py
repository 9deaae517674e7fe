"""The op `experts` in four steps whose results go to positions that the caller gives, for a planned
workspace.

    sort_pairs -> expert_hidden -> expert_outputs -> add_experts

Each step reads what the ones before it wrote. All experts are here, no row is padding, and there is no shared
expert. On a GPU they are the kernels of `experts`; elsewhere torch ops with the same bits as its plain path,
on at most `PIECE_ROWS` rows at a time, so that what torch allocates does not grow with the rows.
R rows, C chosen experts of a row, P = R C pairs (pair p belongs to row p // C), E experts, T tiles, D width,
F ffn of an expert, S pairs of one expert."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.backend import computes, has_pdl
from idlm.kernels.linear import library_linear
from idlm.kernels.swiglu import swiglu

PIECE_ROWS = 4096
TILE_BYTES = 16
MIN_TILE_PAIRS = 16


def tile_bytes(num_experts: int) -> tuple[int, int]:
    """Bytes of the tiles that `sort_pairs` writes, at most: of each pair, and in all cases."""
    return TILE_BYTES // MIN_TILE_PAIRS, TILE_BYTES * num_experts


def sort_pairs(
    experts_RC: Tensor, order_P: Tensor, tiles: Tensor, *, num_experts: int, dtype: torch.dtype
) -> None:
    """Sort the pairs by expert, stably, into `order_P`; `tiles` (flat, of `tile_bytes`) gets what the
    products need. All int32 and contiguous; `dtype` is that of the rows."""
    if computes(torch.empty(0, dtype=dtype, device=experts_RC.device)):
        from idlm.kernels.experts.launch import choose, num_tiles, plan_tiles

        num_rows, num_chosen = experts_RC.shape
        block_r = choose(num_rows, num_chosen, num_experts, dtype).block_r
        num = num_tiles(experts_RC.numel(), num_experts, block_r)
        out = (tiles[: 4 * num].view(num, 4), order_P)
        plan_tiles(experts_RC, 0, num_experts, block_r, has_pdl(experts_RC.device), out)
        return
    flat_P, end = experts_RC.view(-1), 0
    for expert in range(num_experts):
        tiles[expert] = end
        for start in range(0, len(flat_P), PIECE_ROWS):
            found_S = (flat_P[start : start + PIECE_ROWS] == expert).nonzero()[:, 0] + start
            order_P[end : end + len(found_S)] = found_S
            end += len(found_S)


def expert_hidden(
    x_RD: Tensor, gate_up_EFD: Tensor, experts_RC: Tensor, order_P: Tensor, tiles: Tensor, out_PF: Tensor
) -> None:
    """silu(gate) * up of every pair's expert. `gate_up_EFD` has the gate's rows first."""
    if computes(x_RD):
        _grouped(x_RD, gate_up_EFD, experts_RC, order_P, tiles, out_PF, gated=True)
        return
    for expert, pairs_S in _pieces(order_P, tiles, len(gate_up_EFD)):
        rows_SD = x_RD[pairs_S // experts_RC.shape[1]]
        out_PF[pairs_S] = swiglu(library_linear(rows_SD, gate_up_EFD[expert]))


def expert_outputs(
    hidden_PF: Tensor, down_EDF: Tensor, experts_RC: Tensor, order_P: Tensor, tiles: Tensor, out_PD: Tensor
) -> None:
    """The outputs of every pair's expert."""
    if computes(hidden_PF):
        _grouped(hidden_PF, down_EDF, experts_RC, order_P, tiles, out_PD, gated=False)
        return
    for expert, pairs_S in _pieces(order_P, tiles, len(down_EDF)):
        out_PD[pairs_S] = library_linear(hidden_PF[pairs_S], down_EDF[expert])


def add_experts(y_PD: Tensor, experts_RC: Tensor, weights_RC: Tensor, x_RD: Tensor) -> None:
    """Add the weighted sum of each row's pairs to `x_RD`, IN PLACE; summed in fp32, in order of experts.

    A kernel rounds the sum with x once; the plain path rounds the sum first, as the trunk does."""
    num_chosen = experts_RC.shape[1]
    if computes(x_RD):
        from idlm.kernels.experts.launch import combine

        # Every expert is here: the number only bounds them.
        bound, pdl = torch.iinfo(torch.int32).max, has_pdl(x_RD.device)
        if len(x_RD):
            combine(y_PD, experts_RC, weights_RC, x_RD, x_RD, first=0, num_experts=bound, pdl=pdl)
        return
    for start in range(0, len(x_RD), PIECE_ROWS):
        rows = slice(start, start + PIECE_ROWS)
        number_RC = experts_RC[rows].argsort(dim=1)
        first_pair_R = torch.arange(start, start + len(number_RC)) * num_chosen
        sum_RD = torch.zeros_like(x_RD[rows], dtype=weights_RC.dtype)
        for index in range(num_chosen):
            number_R1 = number_RC[:, index : index + 1]
            weight_R1 = weights_RC[rows].gather(1, number_R1)
            sum_RD += y_PD[first_pair_R + number_R1[:, 0]] * weight_R1
        x_RD[rows] += sum_RD.to(x_RD.dtype)


def _grouped(
    x: Tensor, weight: Tensor, experts_RC: Tensor, order_P: Tensor, tiles: Tensor, y: Tensor, *, gated: bool
) -> None:
    """Launch one grouped product with the tiles of `sort_pairs`."""
    from idlm.kernels.experts.launch import choose, grouped, num_tiles

    num_rows, num_experts = len(experts_RC), len(weight)
    if num_rows == 0:
        return
    launch = choose(num_rows, experts_RC.shape[1], num_experts, x.dtype)
    num = num_tiles(experts_RC.numel(), num_experts, launch.block_r)
    plan = None if num_rows == 1 else (tiles[: 4 * num].view(num, 4), order_P)
    tile = launch.gate_up if gated else launch.down
    grouped(x, weight, y, plan, experts_RC, 0, launch.block_r, tile, has_pdl(x.device), gated)


def _pieces(order_P: Tensor, tiles: Tensor, num_experts: int) -> list[tuple[int, Tensor]]:
    """Experts, and at most PIECE_ROWS of their pairs at a time; `tiles` has the first index of each."""
    ends = [*tiles[1:num_experts].tolist(), len(order_P)]
    return [
        (expert, order_P[index : min(index + PIECE_ROWS, end)])
        for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
        for index in range(start, end, PIECE_ROWS)
    ]
