"""Launch parameters of the skinny linear, its workspace, fixed launches for deterministic mode.

R rows, D input width, E output width (F of a SwiGLU, whose weight has 2F rows).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from idlm.kernels.linear.kernel import QUANTUM

FIXED_PROGRAMS = 384
"""Programs that splitting aims at in deterministic mode: three for each of an H200's 132 multiprocessors.
A constant, so that the same weights give the same bits on every device.
"""
FIXED_ROWS = (16, 32, 64, 128)
FEW_ROWS = 32
"""Above, a decoding step is faster with cuBLAS on an H200 (benchmarks/engine/decode.py, 60 rows)."""
FEW_PROGRAMS = 264
"""Two for each of an H200's multiprocessors."""
AHEAD = 128
"""Columns; what memory has not begun to deliver when a kernel ends. More take as long as they save (H200)."""
GATED_ROWS, GATED_TILES = range(33, 65), range(132, FEW_PROGRAMS + 1)
"""Here the product with its SwiGLU takes as long as the library's without one: a launch less. Tiles of 64
outputs, one round of programs.
"""
SHARED_BYTES = 225 * 1024
MAX_RANKS = 128
"""One product of B's and h's tiles covers them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the kernel is launched; everything here may be swept (benchmarks/kernels/linears.py).

    The bits of a row depend on `splits` and the matrix instruction, on nothing else.
    """

    block_e: int = 64
    """Outputs of a tile: the M side of the instruction, 64 or a multiple for Hopper's wgmma."""
    block_r: int = 16
    """Rows of a tile; the instruction is as wide, so a multiple of 8."""
    block_d: int = 128
    """Columns per step, a power of two up to 256."""
    splits: int = 1
    """Shares of the columns; at most one per 256 columns is used."""
    serial: bool = False
    """One program computes all shares of a tile, in order; else one program each."""
    warps: int = 4
    stages: int = 4
    pdl: bool = False
    """Programmatic dependent launch: start while the kernel before still runs, and wait for it inside."""
    ahead: int = 0
    """Columns of each row of the weight that are asked for in the L2 cache before that wait."""

    def __post_init__(self) -> None:
        # A power of two, no more than any share has.
        assert self.ahead in (0, 32, 64, 128, QUANTUM.value), f"{self.ahead=}"

    def shared_bytes(self, itemsize: int, *, gated: bool, weight_itemsize: int | None = None) -> int:
        """Shared memory of the pipeline, about."""
        weights = self.block_e * (2 if gated else 1) * (weight_itemsize or itemsize)
        return self.stages * self.block_d * (weights + self.block_r * itemsize)


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
    launch: Launch, num_rows: int, E: int, D: int, *, gated: bool, rank: int = 0
) -> tuple[int, int]:
    """(floats, tiles) that one call needs; `rank`: of a LoRA that it adds."""
    splits = num_splits(launch, D)
    if (splits == 1 and rank == 0) or launch.serial:
        return 0, 0
    tiles = triton.cdiv(E, launch.block_e) * triton.cdiv(num_rows, launch.block_r)
    tiles += triton.cdiv(rank, launch.block_e)
    floats = tiles * splits * launch.block_e * launch.block_r * (2 if gated else 1)
    return floats if splits > 1 else 0, tiles


def with_pdl(launch: Launch, pdl: bool) -> Launch:
    """The launch with or without what a dependent one does ahead of its wait."""
    return replace(launch, pdl=pdl, ahead=AHEAD if pdl else 0)


def columns_ahead(launch: Launch, num_rows: int, D: int) -> int:
    """`ahead` where every share is as wide and one tile of rows asks: others would ask for the same."""
    return launch.ahead if D % QUANTUM.value == 0 and num_rows <= launch.block_r else 0


def num_splits(launch: Launch, D: int) -> int:
    """Shares that are really used of D columns."""
    return max(1, min(launch.splits, triton.cdiv(D, QUANTUM.value)))


def fixed_launch(num_rows: int, E: int, D: int, dtype: torch.dtype, *, gated: bool = False) -> Launch:
    """The launch of deterministic mode: its splits depend on the weight's shape, never on the rows.

    More rows than fit one tile of `FIXED_ROWS` become more tiles of the largest, each of which adds the
    shares up itself: there are then tiles enough to fill the device.
    """
    aim = max(1, FIXED_PROGRAMS // triton.cdiv(E, 64))
    splits = min(1 << (aim.bit_length() - 1), max(1, triton.cdiv(D, QUANTUM.value) // 2))
    if dtype.itemsize > 2:
        # One tile of rows for all: fp32 products are made of fma, in an order that follows the tile.
        narrow = Launch(block_r=16, block_d=32, splits=splits, stages=2)
        return replace(narrow, serial=num_rows > 16)
    for block_r in FIXED_ROWS[:-1]:
        if num_rows <= block_r:
            return Launch(block_r=block_r, block_d=64 if gated else 128, splits=splits)
    if num_rows <= 128:
        return Launch(block_r=128, block_d=64, splits=splits, warps=8)
    block_e = 64 if gated else 128
    return Launch(block_e=block_e, block_r=128, block_d=64, splits=splits, serial=True, warps=8)


def few_rows_launch(
    num_rows: int, E: int, D: int, dtype: torch.dtype, *, gated: bool = False, is_fp8: bool = False
) -> Launch | None:
    """The fastest launch of a decoding step, None where the library is faster. `is_fp8`: the weight's bytes,
    which the library would widen first, at several times the cost of reading them.
    """
    if is_fp8 and dtype.itemsize == 2 and FEW_ROWS < num_rows <= FIXED_ROWS[-1]:
        return fixed_launch(num_rows, E, D, dtype, gated=gated)
    tiles = triton.cdiv(E, 64)
    if gated and num_rows in GATED_ROWS and dtype.itemsize == 2 and tiles in GATED_TILES and not is_fp8:
        return Launch(block_r=64, block_d=64)
    if num_rows > FEW_ROWS or dtype.itemsize != 2:
        return None
    block_r = 16 if num_rows <= 16 else 32
    if not gated and FEW_PROGRAMS < tiles <= 2 * FEW_PROGRAMS:
        # Tiles of 64 would leave the second round of programs half empty.
        return Launch(block_e=128, block_r=block_r, block_d=64)
    most = min(FEW_PROGRAMS // tiles, triton.cdiv(D, QUANTUM.value))
    splits = 1 << max(0, most.bit_length() - 1)
    # With three stages, four programs of 16 rows fit a multiprocessor, or three of 32: then all run at once.
    at_once = 2 * FEW_PROGRAMS if block_r == 16 else 3 * FEW_PROGRAMS // 2
    stages = 3 if gated and FEW_PROGRAMS < tiles <= at_once else 4
    return Launch(block_r=block_r, block_d=64 if gated else 128, splits=splits, stages=stages)


def adds_lora(launch: Launch, num_rows: int, E: int, *, rank: int) -> bool:
    """Whether the launch of a SwiGLU can add a gated LoRA in its epilogue.

    Of a plain linear none does: there the kernel behind is as fast on an H200.
    """
    is_few = num_rows <= min(FEW_ROWS, launch.block_r) and rank <= MAX_RANKS
    return is_few and not launch.serial and E % launch.block_e == 0


def fits(launch: Launch, itemsize: int, weight_itemsize: int, *, gated: bool) -> bool:
    """Whether the pipeline fits one multiprocessor's shared memory."""
    return launch.shared_bytes(itemsize, gated=gated, weight_itemsize=weight_itemsize) <= SHARED_BYTES
