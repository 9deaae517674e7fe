"""The kernels of the ranking of prefixes in Triton's interpreter: started by test_interpreted.py.

float32 and float16: the interpreter has no bfloat16."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from idlm.kernels.prefix_ranking import op
from tests.kernels.cases.sparse.prefix_ranking import Sizes, check_selection, hard_scores, make_case

SMALL = op.RankingLaunch(block_n=32, max_queries=16, stages=1, per_sm=1, tile=256, read=256)
SMALL_TILES = op.RankingLaunch(tile=64, read=64)
SIZES = (
    Sizes(),
    Sizes(layers=1, sequences=1, width=1, kv_heads=1, group=1, max_slots=40, page_size=1, listed=3),
    Sizes(sequences=5, width=7, group=3, head_dim=24, page_size=8, max_slots=120, listed=130),
    Sizes(layers=3, sequences=2, width=5, kv_heads=3, group=4, max_slots=200, listed=5),
)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "choose", lambda *_: SMALL)
    monkeypatch.setitem(op.select_largest.__kwdefaults__, "launch", SMALL)


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize(
    ("seed", "sizes"), [(number % 2, sizes) for number, sizes in enumerate(SIZES)], ids=str
)
def test_the_kernels_equal_the_definition(seed: int, sizes: Sizes) -> None:
    make_case(seed, sizes, (torch.float32, torch.float16)[seed], fp8=seed == 1).check()


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("seed", range(3))
def test_the_largest_scores_are_listed(seed: int) -> None:
    select = partial(op.select_largest, launch=SMALL_TILES)
    for counts, num in (([333, 0, 57, 5], 9), ([300, 100, 17, 5], 70)):
        check_selection(hard_scores(seed, (1, 4, 1, 333)), counts, num, device="cpu", select=select)
