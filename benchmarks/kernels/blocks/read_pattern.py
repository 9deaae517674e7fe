"""How fast a cache of pages in random order can be read by KV head: the limit of a walk without arithmetic.

    python -m benchmarks.read_pattern [slots=786432] [pages=16,32,64,128,0]

Prints the rate of programs that read keys of 1, 2 or all 8 heads of a slot together (256, 512 or 2,048
bytes), over the rate of a read-only stream; page size 0: one page.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

from benchmarks.kernels.attention_step import numbers
from benchmarks.options import parse_options
from benchmarks.stream import Timer
from idlm.cli import command

DEFAULTS = {"slots": "786432", "pages": "16,32,64,128,0", "layers": "4"}
HEADS, HEAD_DIM, TILE_ROWS = 8, 128, 64


@triton.jit
def read_kernel(
    keys, table, out, num_slots, PAGE: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest of the keys of TOGETHER heads of a share of all slots."""
    PARTS: tl.constexpr = HEADS // TOGETHER
    part, worker = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    num_workers = tl.num_programs(0) // PARTS
    tiles = num_slots // SLOTS
    first = (worker.to(tl.int64) * tiles // num_workers).to(tl.int32)
    stop = ((worker + 1).to(tl.int64) * tiles // num_workers).to(tl.int32)
    columns, rows = tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    most = tl.full([SLOTS, WIDTH], float("-inf"), tl.float32)
    pages = tl.load(table + (first * SLOTS + rows) // PAGE)
    for tile in tl.range(first, stop, num_stages=STAGES):
        slots = tile * SLOTS + rows
        physical = pages * PAGE + slots % PAGE
        pages = tl.load(table + (slots + SLOTS) // PAGE, mask=tile + 1 < stop, other=0)
        at = physical[:, None] * (WIDTH * PARTS) + part * WIDTH + columns[None, :]
        most = tl.maximum(most, tl.load(keys + at))
    tl.store(out + tl.program_id(0) * SLOTS * WIDTH + rows[:, None] * WIDTH + columns[None, :], most)


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Print a line for each page size."""
    options = parse_options(arguments, DEFAULTS)
    timer, num_slots, num_layers = Timer(rounds=7), int(options["slots"]), int(options["layers"])
    keys = [
        torch.randn(num_slots, HEADS * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(num_layers)
    ]
    out = torch.empty(1 << 24, device="cuda", dtype=torch.bfloat16)
    print(f"stream {timer.bytes_per_us / 1e6:.3f} TB/s", flush=True)
    for page in numbers(options["pages"]):
        page = page or num_slots
        table = torch.randperm(num_slots // page, device="cuda")
        said = []
        for together in (1, 2, HEADS):
            for per_sm in (1, 2):
                grid, slots = (132 * per_sm // HEADS * HEADS,), TILE_ROWS // together

                def read(
                    layer: torch.Tensor, grid=grid, slots=slots, together=together, page=page, table=table
                ) -> None:
                    read_kernel[grid](
                        layer, table, out, num_slots, PAGE=page, HEADS=HEADS, TOGETHER=together, SLOTS=slots,
                        WIDTH=HEAD_DIM * together, STAGES=5, num_warps=4, num_stages=5,
                    )  # fmt: skip

                us = timer.us_per_call([lambda layer=layer, read=read: read(layer) for layer in keys])
                rate = num_slots * HEADS * HEAD_DIM * 2 / us / timer.bytes_per_us
                said.append(f"{together} x {per_sm}: {rate:.3f}")
        print(f"pages of {page:>7} slots, heads together x programs: {', '.join(said)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
