"""Lookups in plain torch against their definition; the kernel: interpreted/drafts/prompt_lookup.py."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.prompt_lookup import look_up
from idlm.kernels.sampling import draft_probs
from tests.kernels.drafts.lookups import check_lookups
from tests.kernels.hopper_compiler import assert_unspilled


def test_lookups_follow_their_definition() -> None:
    found = [check_lookups(seed) for seed in range(60)]
    assert 60 < sum(found) < 300, "matches and texts without one"


@pytest.mark.sweep
def test_the_kernel_compiles_for_hopper_without_spills() -> None:
    def launch() -> None:
        meta, (num_lanes, num_drafts, num_tokens) = torch.device("meta"), (9, 7, 151_936)

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device=meta)

        look_up(
            ints(num_lanes, 32_769),
            ints(num_lanes),
            draft_probs(num_lanes, num_drafts, num_tokens, dtype=torch.bfloat16, device=meta),
            lanes_B=ints(4),
            active_B=torch.empty(4, dtype=torch.bool, device=meta),
            minimum=3,
            drafts_ZJ=ints(num_lanes, num_drafts),
            layout_Z=ints(num_lanes),
            layout=7,
        )

    assert_unspilled(launch, "look_up_kernel")
