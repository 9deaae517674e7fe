"""The ranking of prefixes in plain torch against its definition; its kernels compiled for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from idlm.kernels.prefix_ranking import op
from tests.kernels.cases.sparse.prefix_ranking import Sizes, check_selection, hard_scores, make_case

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


TYPES = dict.fromkeys(("block_table", "rows_BW", "starts_B", "counts_B", "lanes_B"), "*i64")
TYPES |= dict.fromkeys(("ranks_B", "is_selected_B"), "*i1")
TYPES |= dict.fromkeys(("max_LRN", "sum_LRN", "k_scale_LK", "shares_LBKS", "scores_LBKS"), "*fp32")
TYPES |= dict.fromkeys(("scratch", "slots_LZKC"), "*i32")
TYPES |= {"q_LRNH": "*bf16", "keys_LSKH": "*bf16", "scale_log2": "fp32"}
SHARED_BYTES = 227 << 10


class _Types(dict[str, str]):
    """Types of arguments; those not named are integers."""

    def __missing__(self, name: str) -> str:
        return "i32"


def compiled(kernel: Any, constants: dict[str, Any], warps: int, **types: str) -> Any:
    from tests.kernels.hopper_compiler import compile_for_hopper

    return compile_for_hopper(kernel, _Types(TYPES | types), constants, num_warps=warps)


@pytest.mark.sweep
@pytest.mark.parametrize(("group", "keys"), [(8, "*bf16"), (4, "*fp8e4nv")])
def test_the_kernel_of_shares_compiles_for_hopper_without_spills(group: int, keys: str) -> None:
    pytest.importorskip("triton")
    from idlm.kernels.prefix_ranking.kernel import share_kernel
    from idlm.kernels.prefix_ranking.op import choose

    launch, is_fp8 = choose(torch.bfloat16, 32 * group, 128), keys == "*fp8e4nv"
    constants = {"W": 32, "K": 8, "G": group, "H": 128, "PAGE": 32, "SCALED": is_fp8, "PARTS": 1}
    constants |= {
        "BLOCK_B": 8,
        "BLOCK_W": 32,
        "BLOCK_M": 32 * group,
        "BLOCK_N": launch.block_n,
        "BLOCK_H": 128,
    }
    constants |= {"STAGES": launch.stages, "PRECISION": "tf32", "IS_NARROW": True} | (
        {} if is_fp8 else {"k_scale_LK": None}
    )
    made = compiled(share_kernel, constants, launch.warps, keys_LSKH=keys, stride_layer="i64")
    assert made.spilled_bytes == 0 and made.shared_bytes <= SHARED_BYTES
    assert f"m64n{32 * group}k16" in made.ptx and "cp.async" in made.ptx
    if group == 4:
        assert made.registers * 32 * launch.warps * launch.per_sm <= 1 << 16, "so many programs fit at once"
        assert made.shared_bytes * launch.per_sm <= SHARED_BYTES


@pytest.mark.sweep
def test_the_kernel_of_lists_compiles_for_hopper() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.prefix_ranking.kernel_select import select_kernel
    from idlm.kernels.prefix_ranking.op import USUAL

    constants = {"K": 8, "GROUP_BITS": 4, "TILE": USUAL.tile, "GROUPS": USUAL.read // 16}
    made = compiled(select_kernel, constants, USUAL.select_warps)
    assert made.spilled_bytes <= 16 and made.shared_bytes <= SHARED_BYTES // 3
