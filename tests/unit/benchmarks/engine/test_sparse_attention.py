"""The benchmark of sparse attention, tiny and on a CPU: traces, floors, and all its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.engine.decoding.harness import SAMPLING, Load
from benchmarks.engine.sparse_attention import SparseArm, block_floor_ms, trace_of_passes
from benchmarks.models import random_model, weight_bytes
from benchmarks.stream import Rates


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
    mage, rates = SparseArm(name="mage", stride=32, exact_layers=1), Rates(stream=1e9, product=1e30)

    def floor(arm: SparseArm) -> float:
        return 1e6 * (block_floor_ms(model, arm, load, rates) or 0.0)

    slots = 6 * 2 * 2 * 16 * 4  # Bytes of a slot of all sequences: keys and values, 2 heads of 16, a layer.
    everything, listed = slots * ((1 << 17) + 32), slots * (1024 + 32)
    exact = floor(replace(mage, name="exact")) / 32
    weights = exact - 2 * everything
    ranking = slots / 2 * (1 << 17)
    assert weights == pytest.approx(weight_bytes(model), rel=1e-3)
    assert floor(mage) == pytest.approx(exact + ranking + 31 * (weights + everything + listed))
    assert block_floor_ms(model, replace(mage, name="quest"), load, rates) is None
