"""The ranking of prefixes in plain torch against its definition; its kernels compiled for Hopper."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.backend import FP8
from idlm.kernels.prefix_ranking import op
from tests.kernels.cases.sparse.prefix_ranking import Sizes, check_selection, hard_scores, make_case
from tests.kernels.hopper_compiler import compiled_launches

SIZES = (
    Sizes(),
    Sizes(layers=1, sequences=1, width=1, kv_heads=1, group=1, max_slots=40, page_size=1, listed=3),
    Sizes(sequences=5, width=7, group=3, head_dim=24, page_size=8, max_slots=120, listed=130),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_plain_torch_equals_the_definition(seed: int, sizes: Sizes, dtype: torch.dtype) -> None:
    make_case(seed, sizes, dtype, fp8=seed == 1 and dtype != torch.float64).check()


@pytest.mark.parametrize("seed", range(3))
def test_the_largest_scores_are_listed(seed: int) -> None:
    scores_LBKS = hard_scores(seed, (2, 4, 2, 333))
    for counts, num in (([333, 0, 57, 5], 9), ([300, 100, 17, 5], 400)):
        check_selection(scores_LBKS, counts, num, device="cpu")


def test_the_workspace_is_bounded() -> None:
    for sequences, slots in ((1, 1 << 16), (6, 1 << 17), (26, 1 << 15), (13, 1 << 16), (1, 100)):
        maximum = op.layers_at_once(34, sequences, 8, slots)
        assert 1 <= maximum <= 34
        assert op.workspace_bytes(34, sequences, 8, slots) <= op.MAX_SHARE_BYTES
    assert op.layers_at_once(34, 1, 8, 1 << 16) == 34
    assert op.layers_at_once(34, 512, 64, 1 << 20) == 1


SHARED_BYTES = 227 << 10


@pytest.mark.sweep
@pytest.mark.parametrize(("group", "is_fp8"), [(8, False), (4, True)])
def test_the_kernels_compile_for_hopper(group: int, is_fp8: bool) -> None:
    """Of blocks of 32 positions in 8 sequences with 8 KV heads."""

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q_LRNH, keys_LSKH = empty(2, 256, 8 * group, 128, dtype=torch.bfloat16), empty(2, 4096, 8, 128, dtype=FP8)
    statistics_LRN = empty(2, 256, 8 * group, dtype=torch.float32)
    ranking = op.RankingPass(
        q_LRNH=q_LRNH,
        max_LRN=statistics_LRN,
        sum_LRN=statistics_LRN,
        keys_LSKH=keys_LSKH if is_fp8 else keys_LSKH.bfloat16(),
        block_table_BP=empty(8, 64),
        page_size=32,
        rows_BW=empty(8, 32),
        starts_B=empty(8),
        ranks_B=empty(8, dtype=torch.bool),
        max_slots=2048,
        scale=0.1,
        k_scale_LK=empty(2, 8, dtype=torch.float32) if is_fp8 else None,
    )
    lists_LZKC = empty(2, 9, 8, 512, dtype=torch.int32)
    made = dict(compiled_launches(lambda: op.rank_prefix(ranking, empty(8), lists_LZKC)))
    shares, lists = made["share_kernel"], made["select_kernel"]
    assert shares.spilled_bytes == 0 and shares.shared_bytes <= SHARED_BYTES
    assert f"m64n{32 * group}k16" in shares.ptx and "cp.async" in shares.ptx
    if group == 4:
        launch = op.USUAL
        assert shares.registers * 32 * launch.warps * launch.per_sm <= 1 << 16, "so many programs fit at once"
        assert shares.shared_bytes * launch.per_sm <= SHARED_BYTES
    assert lists.spilled_bytes <= 16 and lists.shared_bytes <= SHARED_BYTES // 3
