"""Sets and bytes of accelerators on random blocks, in fp64.

Blocks lie anywhere on shuffled pages, beside prompt rows and clean blocks of the same pass; slots that were
never stored are NaN. B sequences, R rows, W positions of a block, K KV heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.infer.accelerators import prefix
from idlm.infer.sparse.accelerator import ACCELERATORS, EngineSpec, KVAccelerator, PassView
from idlm.infer.sparse.sparse_pass import SparseKV
from idlm.infer.state.batch import ActiveBlocks, StepPlan
from idlm.infer.state.kv_cache import KVCache
from idlm.kernels.backend import memory_bytes
from idlm.kernels.paged_attention import AttentionRows, HeadShape, plan_attention
from idlm.kernels.row_compaction import find_index
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


class World:
    """Sequences whose blocks are decoded: what is stored of them, and passes over them."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        num_slots = NUM_SEQUENCES * MAX_SLOTS
        shape = (NUM_LAYERS, num_slots, NUM_KV_HEADS, HEAD_DIM)
        self.cache = KVCache(shape, dtype=torch.float64, device=torch.device("cpu"))
        self.cache.keys.fill_(math.nan)
        self.cache.values.fill_(math.nan)
        pages = torch.randperm(NUM_SEQUENCES * NUM_PAGES, generator=self.generator)
        self.block_table_BP = pages.view(NUM_SEQUENCES, NUM_PAGES)
        self.lanes_B = torch.randperm(NUM_SEQUENCES + 2, generator=self.generator)[:NUM_SEQUENCES]
        self.stored = [0] * NUM_SEQUENCES

    def ints(self, low: int, high: int) -> list[int]:
        """One per sequence, in [low, high)."""
        found: list[int] = torch.randint(low, high, (NUM_SEQUENCES,), generator=self.generator).tolist()
        return found

    def indices(self) -> list[int]:
        """Some of a block's, one at least."""
        is_fed = torch.rand(SIZE, generator=self.generator) < 0.7
        return [spec for spec in range(SIZE) if is_fed[spec] or spec == 1]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def physical(self, b: int, slots: Any) -> Tensor:
        slots = torch.as_tensor(slots, dtype=torch.int64)
        return self.block_table_BP[b, slots // PAGE_SIZE] * PAGE_SIZE + slots % PAGE_SIZE

    def view(self, starts: list[int], steps: list[int], fed: list[list[int]]) -> PassView:
        """A pass that stores what is missing below each block and feeds the positions `fed` of it."""
        slots = [
            [*range(self.stored[b], starts[b]), *(starts[b] + spec for spec in fed[b])]
            for b in range(NUM_SEQUENCES)
        ]
        counts_B = torch.tensor([len(mine) for mine in slots])
        slots_R = torch.tensor([slot for mine in slots for slot in mine])
        sequence_R = torch.arange(NUM_SEQUENCES).repeat_interleave(counts_B)
        limits_R = (slots_R // SIZE + 1) * SIZE
        active = ActiveBlocks(
            starts_B=torch.tensor(starts),
            is_maskable_BW=torch.ones(NUM_SEQUENCES, SIZE, dtype=torch.bool),
            num_passes_B=torch.tensor(steps),
            num_steps_B=torch.full((NUM_SEQUENCES,), 3),
            size=SIZE,
        )
        nothing_R = torch.zeros_like(slots_R)
        plan = StepPlan(
            lanes_B=self.lanes_B,
            cu_rows_B1=torch.nn.functional.pad(counts_B.cumsum(0), (1, 0)),
            sequence_R=sequence_R,
            token_ids_R=nothing_R,
            positions_R=slots_R,
            slots_R=slots_R,
            limits_R=limits_R,
            branch_starts_R=limits_R,
            is_mask_R=nothing_R > 0,
            logit_rows_X=nothing_R,
            first_logit_B=counts_B,
            num_feed_B=counts_B,
            samples_B=counts_B > 0,
            advances_B=counts_B > 0,
            max_rows=int(counts_B.max()),
            max_slots=MAX_SLOTS,
            payload=active,
        )
        for b, mine in enumerate(slots):
            physical = self.physical(b, mine)
            new = (NUM_LAYERS, len(mine), NUM_KV_HEADS, HEAD_DIM)
            self.cache.keys[:, physical], self.cache.values[:, physical] = (
                self.normal(*new),
                self.normal(*new),
            )
        rows_BW, _ = find_index(plan.cu_rows_B1, plan.slots_R, None, active.starts_B, active.size)
        is_fed_BW = rows_BW >= 0
        return PassView(
            plan=plan,
            active=active,
            cache=self.cache,
            block_table_BP=self.block_table_BP,
            page_size=PAGE_SIZE,
            scale=SCALE,
            rows_BW=rows_BW,
            is_working_B=is_fed_BW.any(-1),
            is_mask_BW=is_fed_BW,
            needs_all_rows_B=torch.zeros(NUM_SEQUENCES, dtype=torch.bool),
        )


def make_plan(world: World, plan: StepPlan, listed_B: Tensor | None, num_listed: int) -> Any:
    of_lists: dict[str, Any] = {}
    if listed_B is not None:
        assert plan.active is not None
        of_lists = {"starts_B": plan.active.starts_B, "listed_B": listed_B, "num_listed": num_listed}
    return plan_attention(
        AttentionRows(
            cu_rows=plan.cu_rows_B1,
            block_table=world.block_table_BP,
            page_size=PAGE_SIZE,
            own_slots_R=plan.slots_R,
            limits_R=plan.limits_R,
            branch_starts_R=plan.branch_starts_R,
            max_rows=plan.max_rows,
            max_slots=MAX_SLOTS,
            **of_lists,
        )
    )


def accelerator_of(name: str, **options: Any) -> KVAccelerator:
    kind = ACCELERATORS.get(name)
    made = kind(kind.Config(**options), SPEC)
    assert isinstance(made, KVAccelerator)
    assert made.problems() == []
    made.allocate()
    made.allocate_pages(NUM_SEQUENCES * NUM_PAGES)
    return made


@pytest.mark.parametrize("name", ["mage", "sparsed"])
def test_a_pass_that_copies_the_rows_of_blocks_ranks_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows of prompts and of clean blocks among them; they are not kept."""
    found = []
    for kept_rows in (0, 1 << 20):
        monkeypatch.setattr(prefix, "STORED_ROWS", kept_rows)
        world, accelerator = World(5), accelerator_of(name, k=6, exact_layers=1)
        starts = [SIZE * start for start in world.ints(1, 16)]
        view = world.view(starts, [0] * NUM_SEQUENCES, [world.indices() for _ in starts])
        made: Any = accelerator.begin(view)
        kv = SparseKV(
            view.plan,
            view,
            view.plan.slots_R,
            kv=made,
            rows=None,
            make_plan=functools.partial(make_plan, world),
        )
        for layer in range(NUM_LAYERS):
            kv.attend(layer, world.normal(len(view.plan.slots_R), NUM_HEADS, HEAD_DIM))
            assert len(made._rows) <= 1 or kept_rows
        kv.finish()
        assert bool(made._positions) == (kept_rows == 0)
        assert all(each.shape[1] == NUM_SEQUENCES * SIZE for each in made._positions)
        sets: Any = accelerator
        found.append(sets.sets.slots_LZKC)
    assert torch.equal(found[0], found[1]) and bool((found[0] >= 0).any())


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
    prompts are kept for one layer at a time, however many layers there are.
    """
    kind, spec = ACCELERATORS.get(name), dataclasses.replace(SPEC, num_layers=40)
    made = kind(kind.Config(k=8), spec)
    index_bytes = NUM_HEADS * HEAD_DIM * 8 + 2 * NUM_HEADS * 4
    assert made.pass_bytes() > 38 * NUM_SEQUENCES * SIZE * index_bytes
    longer = kind(kind.Config(k=8), dataclasses.replace(spec, max_rows=SPEC.max_rows + 10_000))
    per_row = index_bytes + 2 * NUM_KV_HEADS * HEAD_DIM * 8
    assert 0 <= longer.pass_bytes() - made.pass_bytes() <= 10_000 * per_row
    assert accelerator_of("quest").pass_bytes() == 0
