"""The launch of the skinny linear: its parameters, workspace, and fixed parameters for deterministic mode.

R rows, D input width, E output width (F of a SwiGLU, whose weight has 2F rows)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from idlm.kernels.backend import pdl_options, rounds_as_written
from idlm.kernels.gated_lora.op import GatedLora
from idlm.kernels.linear.fp8 import Fp8Weight
from idlm.kernels.linear.groups import Groups, choose_groups
from idlm.kernels.linear.kernel import QUANTUM, linear_kernel

FP8_ROWS = 128
"""With more rows than this a widened weight costs less than it takes."""
FEW_ROWS = 32
"""With more rows a decoding step is faster with cuBLAS on an H200 (measured at 60 rows)."""
FEW_PROGRAMS = 264
"""Two for each of an H200's multiprocessors."""
AHEAD = 128
"""Columns that are prefetched while the previous kernel ends; more cost as much time as they save (H200)."""
GATED_ROWS, GATED_TILES = range(33, 65), range(132, FEW_PROGRAMS + 1)
"""Rows and tiles of 64 outputs (one round of programs) at which our product with SwiGLU takes as long as the
library's product alone, which saves a launch. Two tiles of 32 rows take 73.8 us, one of 64 takes 76.0 (one
H100)."""
MAX_RANKS = 128
"""Maximum rank that one product of tiles of B and h covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLaunch:
    """Launch parameters.

    The bits of a row depend on `splits` and the matrix instruction only."""

    block_e: int = 64
    """Outputs of a tile: the M side of the instruction, 64 or a multiple for Hopper's wgmma."""
    block_r: int = 16
    """Rows of a tile, which is the width of the instruction, so a multiple of 8."""
    block_d: int = 128
    """Columns per step, a power of two up to 256."""
    splits: int = 1
    """Shares of the columns; at most one per 256 columns is used."""
    serial: bool = False
    """One program computes all shares of a tile, in order; else one program each."""
    warps: int = 4
    stages: int = 4
    pdl: bool = False
    """Programmatic dependent launch: start while the previous kernel still runs, and wait for it inside."""
    ahead: int = 0
    """Columns of each row of the weight that are prefetched into the L2 cache before that wait."""
    groups: Groups | None = None
    """How warpgroups multiply what a warp loads (`launch_hopper`) where that serves the tensors; a row has
    the same bits."""

    def __post_init__(self) -> None:
        # A power of two, no more than any share has.
        assert self.ahead in (0, 32, 64, 128, QUANTUM.value), f"{self.ahead=}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Partial sums and counters of split products: one stream at a time; counters are zero between calls."""

    partials: Tensor
    counters: Tensor


def make_workspace(device: torch.device, *, num_floats: int, num_tiles: int) -> Workspace:
    """Memory for launches that need at most this much (`workspace_size`)."""
    return Workspace(
        partials=torch.empty(num_floats, dtype=torch.float32, device=device),
        counters=torch.zeros(num_tiles, dtype=torch.int32, device=device),
    )


def workspace_size(
    launch: LinearLaunch, num_rows: int, E: int, D: int, *, gated: bool, rank: int = 0
) -> tuple[int, int]:
    """(floats, tiles) that one call needs; `rank` of the LoRA that it adds."""
    splits = num_splits(launch, D)
    if (splits == 1 and rank == 0) or launch.serial:
        return 0, 0
    tiles = triton.cdiv(E, launch.block_e) * triton.cdiv(num_rows, launch.block_r)
    tiles += triton.cdiv(rank, launch.block_e)
    floats = tiles * splits * launch.block_e * launch.block_r * (2 if gated else 1)
    return floats if splits > 1 else 0, tiles


def with_pdl(launch: LinearLaunch, pdl: bool) -> LinearLaunch:
    """The launch with or without dependent launch and its prefetch."""
    return replace(launch, pdl=pdl, ahead=AHEAD if pdl else 0)


def columns_ahead(launch: LinearLaunch, num_rows: int, D: int) -> int:
    """`ahead` if all shares are that wide and there is one tile of rows (others would prefetch the same)."""
    return launch.ahead if D % QUANTUM.value == 0 and num_rows <= launch.block_r else 0


def num_splits(launch: LinearLaunch, D: int) -> int:
    """Number of shares that are used for D columns."""
    return max(1, min(launch.splits, triton.cdiv(D, QUANTUM.value)))


def num_shares(E: int, D: int) -> int:
    """Shares of the columns of a weight: as many as give each multiprocessor two programs of 64 outputs.

    They depend on the weight's shape and constants alone, never on the rows or the device, so that the same
    weights give a row the same bits everywhere."""
    maximum = min(FEW_PROGRAMS // triton.cdiv(E, 64), triton.cdiv(D, QUANTUM.value))
    return 1 << max(0, maximum.bit_length() - 1)


def fixed_launch(num_rows: int, E: int, D: int, dtype: torch.dtype, *, gated: bool = False) -> LinearLaunch:
    """The launch of deterministic mode, in `num_shares` shares; that of decoding for few rows.
    Where `groups` do not serve, tiles of 128 of many rows add their shares themselves."""
    splits = num_shares(E, D)
    if dtype.itemsize > 2:
        # One tile of rows for all: fp32 products use fma in an order that follows the tile.
        narrow = LinearLaunch(block_r=16, block_d=32, splits=splits, stages=2)
        return replace(narrow, serial=num_rows > 16)
    few = few_rows_launch(num_rows, E, D, dtype, gated=gated)
    if few is not None:
        return few
    if num_rows <= 64:
        launch = LinearLaunch(block_r=64, block_d=128, splits=splits, stages=3)
    elif num_rows <= 128:
        launch = LinearLaunch(block_r=128, block_d=64, splits=splits, warps=8)
    else:
        block_e = 64 if gated else 128
        launch = LinearLaunch(block_e=block_e, block_r=128, block_d=64, splits=splits, serial=True, warps=8)
    return replace(launch, groups=choose_groups(num_rows, E, splits=splits, gated=gated))


def few_rows_launch(
    num_rows: int, E: int, D: int, dtype: torch.dtype, *, gated: bool = False, is_fp8: bool = False
) -> LinearLaunch | None:
    """The fastest launch of a decoding step, None if the library is faster. `is_fp8`: the weight is fp8,
    which the library would widen first, at several times the cost of reading it."""
    if is_fp8 and dtype.itemsize == 2 and FEW_ROWS < num_rows <= FP8_ROWS:
        return fixed_launch(num_rows, E, D, dtype, gated=gated)
    tiles = triton.cdiv(E, 64)
    if gated and num_rows in GATED_ROWS and dtype.itemsize == 2 and tiles in GATED_TILES and not is_fp8:
        return LinearLaunch(block_r=32, block_d=128, splits=num_shares(E, D))
    if num_rows > FEW_ROWS or dtype.itemsize != 2:
        return None
    block_r = 16 if num_rows <= 16 else 32
    if not gated and FEW_PROGRAMS < tiles <= 2 * FEW_PROGRAMS:
        # Tiles of 64 would leave the second round of programs half empty.
        return LinearLaunch(block_e=128, block_r=block_r, block_d=64)
    splits = num_shares(E, D)
    # With three stages, four programs of 16 rows fit a multiprocessor, or three of 32: then all run at once.
    at_once = 2 * FEW_PROGRAMS if block_r == 16 else 3 * FEW_PROGRAMS // 2
    stages = 3 if gated and FEW_PROGRAMS < tiles <= at_once else 4
    return LinearLaunch(block_r=block_r, block_d=64 if gated else 128, splits=splits, stages=stages)


def adds_lora(launch: LinearLaunch, num_rows: int, E: int, *, rank: int) -> bool:
    """Whether the launch of a SwiGLU can add a gated LoRA in its epilogue.

    A plain linear never does: there the separate kernel is as fast on an H200."""
    is_few = num_rows <= min(FEW_ROWS, launch.block_r) and rank <= MAX_RANKS
    return is_few and not launch.serial and E % launch.block_e == 0


def run(
    x_RD: Tensor,
    weight_ED: Tensor | Fp8Weight,
    out_RE: Tensor,
    *,
    launch: LinearLaunch,
    bias_E: Tensor | None = None,
    gated: bool = False,
    lora: GatedLora | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Write the linear of `x_RD` into `out_RE`, with `lora` added to MASK rows; returns it."""
    num_rows, D = x_RD.shape
    E, scale_E = out_RE.shape[1], None
    if isinstance(weight_ED, Fp8Weight):
        scale_E, weight_ED = weight_ED.scale_E, weight_ED.values_ED
    assert x_RD.stride(1) == weight_ED.stride(1) == 1, f"{x_RD.stride()=}"
    assert bias_E is None or bias_E.shape == weight_ED.shape[:1], f"{bias_E=}"
    if num_rows == 0:
        return out_RE
    if launch.groups is not None and lora is None and scale_E is None:
        from idlm.kernels.linear import launch_hopper

        if launch_hopper.serves(x_RD, weight_ED, out_RE):
            tensors, splits, pdl = (x_RD, weight_ED, out_RE, bias_E), num_splits(launch, D), launch.pdl
            launch_hopper.run_many_rows(*tensors, groups=launch.groups, splits=splits, gated=gated, pdl=pdl)
            return out_RE
    adapter, options = _adapter(x_RD, out_RE, launch, lora, gated)
    splits, rank = num_splits(launch, D), 0 if lora is None else lora.b_Er.shape[1]
    floats, tiles = workspace_size(launch, num_rows, E, D, gated=gated, rank=rank)
    block_d = min(launch.block_d, max(16, triton.next_power_of_2(D)))
    programs = triton.cdiv(E, launch.block_e) * triton.cdiv(num_rows, launch.block_r)
    programs += triton.cdiv(rank, launch.block_e)
    linear_kernel[(programs * (1 if launch.serial else splits),)](
        *(x_RD, weight_ED, out_RE, scale_E, bias_E, _buffers(workspace, out_RE, floats, tiles), adapter),
        *(num_rows, E, D),
        (x_RD.stride(0), weight_ED.stride(0), E * weight_ED.stride(0), out_RE.stride(0)),
        splits,
        GATED=gated,
        EVEN_D=D % block_d == 0,
        MANY=tiles > 0,
        SERIAL=launch.serial,
        BLOCK_E=launch.block_e,
        BLOCK_R=launch.block_r,
        BLOCK_D=block_d,
        STAGES=launch.stages,
        PRECISION="ieee" if x_RD.dtype == torch.float32 else "tf32",
        AHEAD=columns_ahead(launch, num_rows, D),
        num_warps=launch.warps,
        **options,
        **pdl_options(launch.pdl),
    )
    return out_RE


def _buffers(workspace: Workspace | None, out_RE: Tensor, floats: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Partial sums and counters: of the workspace, of a new one, or (unused) the output."""
    if workspace is None and tiles:
        workspace = make_workspace(out_RE.device, num_floats=floats, num_tiles=tiles)
    if workspace is None:
        return out_RE, out_RE
    partials, counters = workspace.partials, workspace.counters
    assert tiles == 0 or (partials.numel() >= floats and counters.numel() >= tiles), f"{floats=} {tiles=}"
    return partials, counters


def _adapter(
    x_RD: Tensor, out_RE: Tensor, launch: LinearLaunch, lora: GatedLora | None, gated: bool
) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """The kernel's argument for an adapter, and the launch options that go with it."""
    if lora is None:
        return None, {"BLOCK_K": 16, "BLOCK_T": 1}
    (num_rows, E), rank = out_RE.shape, lora.b_Er.shape[1]
    assert gated and lora.sizes == (E, E) and len(lora.b_Er) == 2 * E, f"{gated=} {lora.sizes=} {E=}"
    assert isinstance(lora.gate, Tensor) and lora.gate.dtype == torch.bool, f"{lora.gate=}"
    assert len(lora.gate) == num_rows, f"{lora.gate.shape=}"
    assert lora.b_Er.stride(1) == 1, f"{lora.b_Er.stride()=}"
    assert adds_lora(launch, num_rows, E, rank=rank), f"{launch=} {num_rows=} {E=} {rank=}"
    h_RX = x_RD.new_empty(num_rows, 2 * rank)
    options = {
        "BLOCK_K": max(16, triton.next_power_of_2(rank)),
        "BLOCK_T": triton.next_power_of_2(E // launch.block_e),
        **(rounds_as_written() if x_RD.dtype.itemsize == 2 else {}),
    }
    return (lora.gate, h_RX, lora.b_Er, rank, lora.scaling, lora.b_Er.stride(0)), options
