"""Walks over drafts in plain torch against their definition; the kernels: interpreted/draft_walk.py."""

from __future__ import annotations

import re

import pytest
import torch

from idlm.kernels.draft_walk import Walk, top_candidates, walk
from idlm.kernels.sampling import draft_probs
from tests.kernels.cases.draft_walk import Case
from tests.kernels.hopper_compiler import compiled_launches


@pytest.mark.parametrize("filters", [False, True])
def test_a_walk_follows_its_definition(filters: bool) -> None:
    Case(3, "cpu", num_tokens=60).check(filters=filters)


def test_an_unwritten_lane_stays_as_it_is() -> None:
    drafts_ZJ, q_ZJV, _ = Case(0, "cpu", num_tokens=60).run(filters=False)
    assert bool((drafts_ZJ == -5).any()) and not q_ZJV[drafts_ZJ == -5].any()


@pytest.mark.sweep
def test_the_kernels_compile_for_hopper_without_spills() -> None:
    def launch() -> None:
        meta, (num_lanes, num_drafts, num_tokens) = torch.device("meta"), (9, 7, 151_936)

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=meta)

        def ints(*shape: int) -> torch.Tensor:
            return empty(*shape, dtype=torch.int64)

        floats = empty(num_lanes, dtype=torch.float64)
        store = draft_probs(num_lanes, num_drafts, num_tokens, dtype=torch.bfloat16, device=meta)
        for filters, width, dtype in (
            (False, 256, torch.bfloat16),
            (True, 256, torch.bfloat16),
            (True, 24, torch.float32),
        ):
            table = empty(num_tokens, width, dtype=dtype)
            walk(
                Walk(table, table, empty(28, width, dtype=dtype), ints(4)),
                top_candidates(empty(200, num_tokens), ints(28), 16),
                store,
                (floats, ints(num_lanes), floats, floats),
                filters=filters,
                rows_BJ=ints(4, num_drafts),
                lanes_B=ints(4),
                uniforms_BJ=empty(4, 15, dtype=torch.float64)[:, 8:],
                drafts_ZJ=ints(num_lanes, num_drafts),
            )

    found = compiled_launches(launch)
    names = {"group_largest", "candidates", "rest", "walk", "put_scores"}
    assert {name.removesuffix("_kernel") for name, _ in found} == names
    assert all(compiled.spilled_bytes == 0 for _, compiled in found)
    for _, compiled in found:
        shuffled = set(re.findall(r"shfl\.sync\.\S+\s+(%\w+)", compiled.ptx))
        added = {
            word for line in re.findall(r"\bfma\.\S+\s+(.*);", compiled.ptx) for word in line.split(", ")
        }
        assert not shuffled & added, "the lanes of a warp would have other bits of the same sum"
