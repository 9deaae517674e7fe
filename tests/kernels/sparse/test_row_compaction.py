"""The kernels of row_compaction compiled for Hopper; `test_seeded.py` compares the op with its reference."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.row_compaction import (
    Drop,
    PackedRows,
    RowCapacity,
    compact_rows,
    find_index,
    gather_rows,
    retain_wanted,
    spread_index,
)
from tests.kernels.hopper_compiler import compiled_launches


@pytest.mark.sweep
def test_the_kernels_compile_for_hopper_without_spills() -> None:
    of_R, of_B = (torch.empty(num, dtype=torch.int64, device="meta") for num in (9999, 200))
    of_BW, flags_B = of_B.new_empty(200, 32), of_B.bool()
    rows = PackedRows(of_B.new_empty(201), *[of_R] * 8, is_mask_R=of_R.bool())
    drop = Drop(of_BW, of_R.bool(), flags_B, flags_B, of_R, of_B)

    def run() -> None:
        compact_rows(
            rows, drop, num_left=8000, num_origins=5, limit=RowCapacity(8000, of_B), drops_stored=True
        )
        gather_rows(of_R, [of_R.new_empty(9999, 64), of_R[:, None].bfloat16()])
        find_index(rows.cu_rows_B1, of_R, of_R.bool(), of_B, 32)
        spread_index(of_BW.bool(), of_B, of_B, of_BW, 9999)
        retain_wanted(of_R, of_B, of_B, flags_B, of_R, size=32, num_head=99)

    made = compiled_launches(run)
    assert len({name for name, _ in made}) == 7
    assert all(each.spilled_bytes == 0 for _, each in made)
