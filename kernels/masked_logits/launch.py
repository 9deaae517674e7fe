"""Launch parameters and launches of the kernel. Nothing here waits for the device.

Shapes: X wanted rows, V vocabulary, D width, S ranges of the vocabulary, F numbers per range."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from idlm.kernels.backend import num_multiprocessors
from idlm.kernels.masked_logits.kernel import TILE_TOKENS, combine_kernel, parts_kernel
from idlm.kernels.masked_logits.types import WORKSPACE_BYTES, Proposals

MAX_SPLITS = 256
ALIGNED_BYTES = 16
COMBINED = 1024
"""Numbers of one field that a program combines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsLaunch:
    """A program computes tiles of `block_x` rows, `block_d` columns at a time, with `stages` buffers; `group`
    tiles of rows run side by side. `tma`: the weight is read by tensor descriptors where its layout permits.
    `flat`: the next tile of the vocabulary is loaded while one is reduced."""

    block_x: int
    block_d: int
    warps: int
    stages: int
    group: int = 12
    tma: bool = True
    flat: bool = True


MANY_ROWS = LogitsLaunch(block_x=128, block_d=64, warps=8, stages=4)
FEW_ROWS = LogitsLaunch(block_x=64, block_d=64, warps=4, stages=4)
FP32 = LogitsLaunch(block_x=32, block_d=32, warps=8, stages=2, tma=False)


def choose(num_rows: int, dtype: torch.dtype) -> LogitsLaunch:
    """Launch parameters for a number of wanted rows, chosen by the compiler's report; not measured."""
    if dtype == torch.float32:
        return FP32
    return FEW_ROWS if num_rows <= FEW_ROWS.block_x else MANY_ROWS


def max_splits(num_rows: int, num_fields: int) -> int:
    """Most ranges: one whatever the rows are, and as many more as the constant bytes allow."""
    return min(MAX_SPLITS, 1 + WORKSPACE_BYTES // (4 * num_fields * num_rows))


@functools.lru_cache(maxsize=1024)
def range_tiles(row_tiles: int, token_tiles: int, max_splits: int, num_programs: int) -> int:
    """Tiles of a range of the vocabulary, so that the last round of programs leaves few multiprocessors idle:
    the longest ranges of all that take at most 1 % more rounds of tiles than the best."""
    rounds = {}
    for tiles in range(-(-token_tiles // max_splits), token_tiles + 1):
        programs = row_tiles * -(-token_tiles // tiles)
        rounds[tiles] = -(-programs // num_programs) * tiles
    minimum = min(rounds.values())
    return max(tiles for tiles, needed in rounds.items() if needed <= 1.01 * minimum)


def run(
    hidden_RD: Tensor,
    rows_X: Tensor,
    weight_VD: Tensor,
    *,
    forbidden_S: Tensor | None,
    entropy: bool,
    workspace: Tensor | None = None,
    launch: LogitsLaunch | None = None,
) -> Proposals:
    """See `masked_logits`."""
    num_rows, (num_tokens, width) = len(rows_X), weight_VD.shape
    proposals = _empty(num_rows, hidden_RD.device, entropy=entropy)
    if num_rows == 0:
        return proposals
    launch = choose(num_rows, hidden_RD.dtype) if launch is None else launch
    num_fields = 4 if entropy else 3
    row_tiles, token_tiles = triton.cdiv(num_rows, launch.block_x), triton.cdiv(num_tokens, int(TILE_TOKENS))
    maximum = max_splits(num_rows, num_fields)
    # One program per multiprocessor runs at the same time.
    tiles = range_tiles(row_tiles, token_tiles, maximum, num_multiprocessors(hidden_RD.device))
    splits = triton.cdiv(token_tiles, tiles)
    shape = (num_fields, num_rows, splits)
    if workspace is None:
        workspace = hidden_RD.new_empty(math.prod(shape), dtype=torch.float32)
    parts_FXS = workspace[: math.prod(shape)].view(shape)
    tma = launch.tma and _has_descriptor(weight_VD)
    parts_kernel[(row_tiles * splits,)](
        hidden_RD,
        rows_X,
        _descriptor(weight_VD, launch.block_d) if tma else weight_VD,
        rows_X if forbidden_S is None else forbidden_S,
        parts_FXS,
        num_rows,
        num_tokens,
        width,
        hidden_RD.stride(0),
        weight_VD.stride(0),
        splits,
        tiles,
        FORBIDDEN=0 if forbidden_S is None else len(forbidden_S),
        ENTROPY=entropy,
        TMA=tma,
        EVEN=width % launch.block_d == 0,
        BLOCK_X=launch.block_x,
        BLOCK_D=launch.block_d,
        GROUP=launch.group,
        STAGES=launch.stages,
        FLAT=launch.flat,
        PRECISION="ieee" if hidden_RD.dtype == torch.float32 else "tf32",
        num_warps=launch.warps,
    )
    _combine(parts_FXS, rows_X, proposals, num_tokens)
    return proposals


def _combine(parts_FXS: Tensor, rows_X: Tensor, proposals: Proposals, num_tokens: int) -> None:
    num_rows, splits = parts_FXS.shape[1:]
    padded = triton.next_power_of_2(splits)
    block_x = max(1, COMBINED // padded)
    combine_kernel[(triton.cdiv(num_rows, block_x),)](
        parts_FXS,
        rows_X,
        proposals.token_X,
        proposals.own_X,
        proposals.is_nonfinite_X.view(torch.int8),
        proposals.own_X if proposals.entropy_X is None else proposals.entropy_X,
        num_rows,
        num_tokens,
        splits,
        ENTROPY=proposals.entropy_X is not None,
        BLOCK_X=block_x,
        SPLITS=padded,
    )


def _empty(num_rows: int, device: torch.device, *, entropy: bool) -> Proposals:
    return Proposals(
        token_X=torch.empty(num_rows, dtype=torch.int64, device=device),
        own_X=torch.empty(num_rows, dtype=torch.float64, device=device),
        is_nonfinite_X=torch.empty(num_rows, dtype=torch.bool, device=device),
        entropy_X=torch.empty(num_rows, dtype=torch.float64, device=device) if entropy else None,
    )


def _has_descriptor(weight_VD: Tensor) -> bool:
    """Whether a tensor descriptor can describe the weight."""
    stride_bytes = weight_VD.stride(0) * weight_VD.element_size()
    return stride_bytes % ALIGNED_BYTES == 0 and weight_VD.data_ptr() % ALIGNED_BYTES == 0


def _descriptor(weight_VD: Tensor, block_d: int) -> Any:
    return TensorDescriptor(weight_VD, [*weight_VD.shape], [*weight_VD.stride()], [int(TILE_TOKENS), block_d])
