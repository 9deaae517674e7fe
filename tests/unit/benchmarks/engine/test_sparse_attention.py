"""The benchmark of sparse attention, tiny and on a CPU: traces, floors, and all its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.engine.decoding.harness import SAMPLING, Load, random_model
from benchmarks.engine.sparse_harness import SparseArm, floor_of, trace_of_passes

SMALL = ["model=tiny", "device=cpu", "dtype=float32", "block=8", "exact_layers=1", "rounds=1", "k=4"]


@pytest.mark.parametrize("num_passes", [32, 24, 16, 8])
def test_any_passes_in_a_row_decide_a_block(num_passes: int) -> None:
    decided = [1 + count for count in trace_of_passes(num_passes, 32).accepted]
    for start in range(num_passes):
        assert sum((decided * 2)[start : start + num_passes]) == 32
    assert min(decided) >= 1


def test_floors_follow_from_bytes() -> None:
    """128K and six sequences, k 1024, one of two layers exact."""
    model = random_model("tiny", device="cpu", dtype=torch.float32, block_size=32)
    load = Load(concurrency=6, context=1 << 17, num_tokens=0, sampling=SAMPLING["greedy"])
    arm = SparseArm(name="mage", stride=32, exact_layers=1)
    floor = floor_of(model, arm, load, stream=1e9, product=1e30)
    slots = 6 * 2 * 2 * 16 * 4  # Bytes of a slot of all sequences: keys and values, 2 heads of 16, a layer.
    everything, listed = slots * ((1 << 17) + 32), slots * (1024 + 32)
    weights = 1e6 * floor.exact_ms - 2 * everything
    assert weights == pytest.approx(1e6 * floor.sparse_ms - everything - listed)
    assert floor.rank_ms == pytest.approx(slots / 2 * (1 << 17) / 1e6)
    assert floor.block_ms(arm) == floor.exact_ms + floor.rank_ms + 31 * floor.sparse_ms
    assert floor.block_ms(replace(arm, name="exact")) == 32 * floor.exact_ms
    assert floor.block_ms(replace(arm, name="quest")) is None
