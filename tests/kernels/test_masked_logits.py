"""The kernels of `masked_logits` compiled for Hopper; the interpreter compares them with the definition.

X wanted rows, V vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.hopper_compiler import compiled_launches

SHARED_BYTES = 227 << 10


def compiled(num_rows: int, *, tma: bool = True, entropy: bool = False, forbidden: int = 1) -> dict[str, Any]:
    """What a pass over so many wanted rows in bf16 launches, by kernel."""
    pytest.importorskip("triton")
    from idlm.kernels.masked_logits import launch

    weight = torch.empty(126_464, 4096, dtype=torch.bfloat16, device="meta")
    rows_X, forbidden_S = (
        torch.empty(num, dtype=torch.int64, device="meta") for num in (num_rows, forbidden)
    )
    chosen = replace(launch.choose(num_rows, weight.dtype), tma=tma)
    options: dict[str, Any] = {"forbidden_S": forbidden_S, "entropy": entropy, "launch": chosen}
    return dict(compiled_launches(lambda: launch.run(weight[:num_rows], rows_X, weight, **options)))


@pytest.mark.sweep
@pytest.mark.parametrize(("num_rows", "tma"), [(8192, True), (64, False)])
def test_the_greedy_kernel_compiles_for_hopper_without_spills(num_rows: int, tma: bool) -> None:
    made = compiled(num_rows, tma=tma)["parts_kernel"]
    assert made.spilled_bytes == 0 and made.shared_bytes <= SHARED_BYTES
    assert "m64n256k16" in made.ptx and ("cp.async.bulk" in made.ptx) == tma
    assert "cp.async.cg" in made.ptx, "rows are gathered into shared memory"


@pytest.mark.sweep
@pytest.mark.parametrize("entropy", [True, False])
def test_what_full_diffusion_asks_compiles_for_hopper(entropy: bool) -> None:
    """The mask and two stop tokens are forbidden: with `forbid_eos`, few bytes spill."""
    made = compiled(64 if entropy else 8192, entropy=entropy, forbidden=3)
    assert made["parts_kernel"].spilled_bytes <= 64 and made["parts_kernel"].shared_bytes <= SHARED_BYTES
    assert made["combine_kernel"].spilled_bytes == 0


def test_the_workspace_holds_the_numbers_of_all_ranges() -> None:
    pytest.importorskip("triton")
    from idlm.kernels.masked_logits import WORKSPACE_BYTES, WORKSPACE_ROW_BYTES
    from idlm.kernels.masked_logits.launch import max_splits

    for num_fields in (3, 4):
        for num_rows in (1, 64, 5000, 32768, 1_000_003, 20_000_000):
            splits = max_splits(num_rows, num_fields)
            assert splits >= 1
            num_bytes = 4 * num_fields * num_rows * splits
            assert num_bytes <= WORKSPACE_BYTES + num_rows * WORKSPACE_ROW_BYTES
