"""Sets and bytes of accelerators on random blocks, in fp64.

Blocks lie anywhere on shuffled pages, beside prompt rows and clean blocks of the same pass; slots that were
never stored are NaN. B sequences, R rows, W positions of a block, K KV heads, H head dim."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from idlm.infer.sparse.accelerator import ACCELERATORS, EngineSpec, KVAccelerator
from idlm.kernels.backend import memory_bytes
from idlm.kernels.paged_attention import HeadShape
from idlm.semantics import Semantics

NUM_SEQUENCES = 25
SIZE, PAGE_SIZE, NUM_PAGES = 4, 8, 10
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 3, 4, 2, 8
MAX_SLOTS = NUM_PAGES * PAGE_SIZE
SCALE = HEAD_DIM**-0.5
SPEC = EngineSpec(
    decoder="block",
    decoder_options={},
    block_size=SIZE,
    num_layers=NUM_LAYERS,
    heads=HeadShape(
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float64,
        kv_dtype=torch.float64,
    ),
    semantics=Semantics(logit_shift=False),
    num_lanes=NUM_SEQUENCES + 2,
    max_slots=MAX_SLOTS,
    max_rows=NUM_SEQUENCES * MAX_SLOTS,
    page_size=PAGE_SIZE,
    device=torch.device("cpu"),
    tensor_parallel=1,
    deterministic=False,
    graphs="auto",
)


def accelerator_of(name: str, **options: Any) -> KVAccelerator:
    kind = ACCELERATORS.get(name)
    made = kind(kind.Config(**options), SPEC)
    assert isinstance(made, KVAccelerator)
    assert made.problems() == []
    made.allocate()
    made.allocate_pages(NUM_SEQUENCES * NUM_PAGES)
    return made


def test_quest_reports_the_bytes_of_a_page() -> None:
    for page in (4, 6, 8, 16):
        quest: Any = accelerator_of("quest", page=page)
        held = sum(one.min_CKH[:-1].nbytes + one.largest_CKH[:-1].nbytes for one in quest.bounds)
        assert held == quest.page_bytes() * NUM_SEQUENCES * NUM_PAGES
    spec = dataclasses.replace(SPEC, num_layers=1)
    assert ACCELERATORS.get("quest")(ACCELERATORS.get("quest").Config(), spec).page_bytes() == 0


@pytest.mark.parametrize("name", ["mage", "sparsed"])
def test_lists_that_do_not_fit_are_refused_before_they_are_allocated(name: str) -> None:
    """With the bytes that they and a pass's copy of them take, and the largest k that fits."""
    spec = dataclasses.replace(SPEC, num_lanes=1 << 28, max_slots=1 << 12)
    kind, slot_bytes = ACCELERATORS.get(name), 8 * (NUM_LAYERS - 2) * (1 << 28) * NUM_KV_HEADS
    [problem] = kind(kind.Config(k=1 << 20), spec).problems()
    free = memory_bytes(SPEC.device)[0]
    assert f"take {slot_bytes << 12:,} bytes" in problem
    assert f"k up to {free // slot_bytes}," in problem


@pytest.mark.parametrize("name", ["mage", "sparsed"])
def test_memory_for_ranking_is_asked_for(name: str) -> None:
    """At least what a pass keeps: queries of the blocks' rows of each sparse layer, and their sums. Rows of
    prompts are kept for one layer at a time, however many layers there are."""
    kind, spec = ACCELERATORS.get(name), dataclasses.replace(SPEC, num_layers=40)
    made = kind(kind.Config(k=8), spec)
    index_bytes = NUM_HEADS * HEAD_DIM * 8 + 2 * NUM_HEADS * 4
    assert made.pass_bytes() > 38 * NUM_SEQUENCES * SIZE * index_bytes
    longer = kind(kind.Config(k=8), dataclasses.replace(spec, max_rows=SPEC.max_rows + 10_000))
    per_row = index_bytes + 2 * NUM_KV_HEADS * HEAD_DIM * 8
    assert 0 <= longer.pass_bytes() - made.pass_bytes() <= 10_000 * per_row
    assert accelerator_of("quest").pass_bytes() == 0
