"""Compaction in plain torch against the reference; the kernels compiled."""

from __future__ import annotations

import pytest

from tests.kernels.cases.sparse.row_compaction import (
    check,
    check_gather,
    check_places,
    check_wanted,
    make_case,
)


@pytest.mark.parametrize("seed", range(150))
def test_plain_compaction_equals_the_reference(seed: int) -> None:
    check(make_case(seed))


@pytest.mark.parametrize("seed", range(12))
def test_plain_gathers_equal_indexing(seed: int) -> None:
    check_gather(seed)


@pytest.mark.sweep
def test_the_kernels_compile_for_hopper_without_spills() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.row_compaction.kernel import (
        count_kernel,
        find_kernel,
        gather_kernel,
        place_kernel,
        spread_kernel,
    )
    from idlm.kernels.row_compaction.kernel_wanted import place_wanted_kernel, search_wanted_kernel
    from tests.kernels.hopper_compiler import compile_for_hopper

    kernels = (
        count_kernel,
        place_kernel,
        gather_kernel,
        find_kernel,
        spread_kernel,
        search_wanted_kernel,
        place_wanted_kernel,
    )
    names = {name for kernel in kernels for name in kernel.arg_names}
    types = dict.fromkeys(names, "i32")
    types |= dict.fromkeys([name for name in names if "_" in name and name[-1].isupper()], "*i64")
    types |= {name: "*i64" for name in names if name.endswith("_B1")}
    types |= {"place_BW": "*i32"}
    bools = ("keep_R", "needs_all_B", "waited_B", "waits_B", "mask_R", "is_mask_I", "is_mask_BW", "kept_BW")
    types |= dict.fromkeys(bools, "*i1")
    types |= {name: "*i32" for name in names if name.startswith(("source", "target"))}
    places = {"SIZE": 32, "BLOCK_W": 32}
    shape = {**places, "HAS_ROOM": True, "DROPS_STORED": True}
    constants = (
        {**shape, "HAS_SCHEDULED": True, "BLOCK_B": 256},
        {**shape, "HAS_LIMITS": True, "HAS_MASKS": True, "BLOCK": 128},
        {"BLOCK": 1024},
        {**places, "HAS_MASKS": True},
        places,
        {"BLOCK_W": 32},
        {"PACKS": True, "BLOCK_B": 256, "BLOCK_W": 32, "BLOCK": 128},
    )
    warps = (8, 4, 4, 1, 1, 1, 1)
    for kernel, own, num_warps in zip(kernels, constants, warps, strict=True):
        assert compile_for_hopper(kernel, types, own, num_warps=num_warps).spilled_bytes == 0


@pytest.mark.parametrize("seed", range(40))
def test_places_are_found_and_spread_again(seed: int) -> None:
    check_places(seed)


@pytest.mark.parametrize("seed", range(100))
def test_wanted_rows_that_are_left_equal_the_reference(seed: int) -> None:
    check_wanted(seed)
