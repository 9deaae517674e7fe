"""Which launch, or the library, for which shape: measured once at engine start or given, never mid-graph.

R rows, D input width, E output width (F of a SwiGLU).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from idlm.kernels.linear.launch import Launch, fits, fixed_launch, num_splits
from idlm.kernels.linear.op import linear

ROW_BUCKETS = (16, 32, 64, 128)
"""Rows are rounded up to these; above them the library is as fast."""
MARGIN = 0.98
"""Ours must take at most this share of the library's time, so that noise chooses nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A linear as the table knows it. `gated`: E is F, the weight has 2F rows. `is_fp8` of the weight."""

    rows: int
    E: int
    D: int
    gated: bool = False
    is_fp8: bool = False


Table = Mapping[Shape, Launch | None]
Measure = Callable[[Shape, Launch | None], float]


def row_bucket(num_rows: int) -> int | None:
    """Smallest bucket that holds the rows; None above all of them."""
    return next((bucket for bucket in ROW_BUCKETS if num_rows <= bucket), None)


def candidates(shape: Shape, *, itemsize: int = 2, pdl: bool = False) -> list[Launch]:
    """Launches worth measuring: tiles that fit, splits that make one to four programs per multiprocessor."""
    block_r = next((rows for rows in (16, 32, 64) if shape.rows <= rows), 128)
    found = []
    for block_e, block_d, stages in itertools.product((64, 128), (64, 128, 256), (3, 4, 6)):
        if shape.gated and block_e * block_r > 64 * 128:
            continue
        warps = 8 if block_e * block_r >= 128 * 128 else 4
        tiles = -(-shape.E // block_e)
        for splits in (1, 2, 4, 6, 8, 16):
            launch = Launch(
                block_e=block_e,
                block_r=block_r,
                block_d=block_d,
                splits=splits,
                warps=warps,
                stages=stages,
                pdl=pdl,
                prefetch=block_d if pdl else 0,
            )
            fills = tiles * splits <= 600 or splits == 1
            weight_itemsize = 1 if shape.is_fp8 else itemsize
            is_real = num_splits(launch, shape.D) == splits
            if fills and is_real and fits(launch, itemsize, weight_itemsize, gated=shape.gated):
                found.append(launch)
    return found


def choose(
    shapes: Iterable[Shape],
    measure: Measure,
    *,
    launches: Callable[[Shape], list[Launch]] = candidates,
) -> dict[Shape, Launch | None]:
    """Fastest launch of every shape by `measure` (any unit, lower is better); None where the library wins."""
    table: dict[Shape, Launch | None] = {}
    for shape in shapes:
        times = {launch: measure(shape, launch) for launch in launches(shape)}
        best = min(times, key=times.__getitem__, default=None)
        wins = best is not None and times[best] <= MARGIN * measure(shape, None)
        table[shape] = best if wins else None
    return table


def look_up(
    table: Table, num_rows: int, E: int, D: int, *, gated: bool = False, is_fp8: bool = False
) -> Launch | None:
    """The launch for this many rows; None: the library."""
    bucket = row_bucket(num_rows)
    if bucket is None:
        return None
    return table.get(Shape(rows=bucket, E=E, D=D, gated=gated, is_fp8=is_fp8))


def to_json(table: Table) -> list[dict[str, Any]]:
    """The table as plain values, to be kept beside a model or a machine's other measurements."""
    return [
        {"shape": asdict(shape), "launch": None if launch is None else asdict(launch)}
        for shape, launch in table.items()
    ]


def from_json(entries: Iterable[Mapping[str, Any]]) -> dict[Shape, Launch | None]:
    """The table that `to_json` wrote."""
    return {
        Shape(**entry["shape"]): None if entry["launch"] is None else Launch(**entry["launch"])
        for entry in entries
    }


def check_rows_agree(device: torch.device, dtype: torch.dtype, *, E: int = 256, D: int = 2048) -> bool:
    """Whether the fixed launches give a row the same bits at every number of rows on this device.

    It is what deterministic mode rests on; run it once at engine start. Waits for the device.
    """
    generator = torch.Generator().manual_seed(0)
    x_RD, weight_ED = (torch.randn(n, D, generator=generator).to(device, dtype) for n in (300, E))
    rows_of = (1, 7, 16, 17, 40, 64, 100, 128, 129, 300)
    results = [linear(x_RD[:n], weight_ED, launch=fixed_launch(n, E, D, dtype)) for n in rows_of]
    return all(torch.equal(result, results[-1][: len(result)]) for result in results)
