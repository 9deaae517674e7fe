"""FOCUS against the slow reference, pass by pass, on random blocks that are decoded at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from idlm.infer.accelerators.focus import Focus, FocusConfig, FocusPass
from idlm.infer.sparse.accelerator import EngineSpec, PassView
from idlm.infer.sparse.sparse_pass import SparseKV
from idlm.infer.state.batch import ActiveBlocks, BlockDemand, PassRows, StepPlan
from idlm.infer.state.kv_cache import KVCache
from idlm.kernels.paged_attention import HeadShape
from idlm.kernels.row_compaction import find_index
from idlm.semantics import Semantics
from tests.focus_reference import (
    BlockState,
    FocusRules,
    Rows,
    Selection,
    assign_rows,
    fed_positions,
    note,
    select,
)

PAGE = 4
NUM_LAYERS = 3
HEAD_DIM = 8
SCALE = HEAD_DIM**-0.5
CASES = [
    (FocusConfig(), 8, 75),
    (FocusConfig(commit="unfrozen"), 8, 75),
    (FocusConfig(alpha=1.2), 16, 20),
    (FocusConfig(importance="block", alpha=1.8), 8, 50),
    (FocusConfig(importance="block", mean="request", commit="unfrozen"), 16, 20),
    (FocusConfig(mean="request", alpha=1.2), 32, 10),
    (FocusConfig(stability="off"), 4, 120),
    (FocusConfig(stability="plain", commit="unfrozen"), 4, 100),
    (FocusConfig(rule="published"), 8, 50),
    (FocusConfig(rule="published", mean="request", alpha=1.2), 16, 20),
]
"""Options, block size and number of blocks."""


@dataclass(kw_only=True)
class Lane:
    """A sequence, as the reference knows it. `keys`: of the block in work, by layer and position. `is_fed`:
    the pass decodes for it; `is_needed`: and the kv side needs all of its rows. The pass also stores the
    block before but for what is frozen there (`stays`): rows of which the host scheduled some.
    """

    num_stored: int
    masked: list[int]
    state: BlockState
    part: int
    num_blocks: int = 0
    keys: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    is_fed: bool = True
    is_needed: bool = False
    stays: set[int] = field(default_factory=set)
    num_stored_rows: int = 0
    num_scheduled: int = 0
    num_waits: int = 0

    @property
    def open(self) -> list[int]:
        """Masks that a pass may decide."""
        return [index for index in self.masked if index // self.part == self.masked[0] // self.part]


class Bench:
    """A Focus with lanes, and the cache that it reads."""

    def __init__(
        self, config: FocusConfig, size: int, generator: random.Random, *, num_lanes: int, heads: int
    ) -> None:
        self.size, self.generator, self.heads, self.num_kv_heads = size, generator, heads, 2
        self.rules = FocusRules(
            size=size,
            alpha=config.alpha,
            over=config.importance,
            mean=config.mean,
            stability=config.stability,
            commit=config.commit,
            margin=1e-9,
            published=config.rule == "published",
        )
        pages = 3 * size // PAGE
        self.table_BP = torch.randperm(num_lanes * pages).view(num_lanes, pages)
        self.cache = KVCache(
            (NUM_LAYERS, num_lanes * pages * PAGE, self.num_kv_heads, HEAD_DIM),
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        self.cache.keys.fill_(float("nan"))
        self.focus = Focus(config, index_of(size, num_lanes))
        self.focus.allocate()
        self.lanes = [self.fresh(index) for index in range(num_lanes)]
        self.num_done = self.num_waits = 0

    def fresh(self, lane: int, earlier: tuple[int, int] = (0, 0), num_blocks: int = 0) -> Lane:
        """A block that begins, some with the tail of a prompt."""
        tail = self.generator.randrange(self.size) if num_blocks == 0 and lane % 3 == 0 else 0
        return Lane(
            num_stored=self.generator.randrange(3) * self.size,
            masked=list(range(tail, self.size)),
            state=BlockState(earlier=earlier, is_new=num_blocks == 0),
            part=self.generator.choice((self.size, self.size // 2)),
            num_blocks=num_blocks,
        )

    def plan(self) -> StepPlan:
        """Fed are clean blocks before, here and there, and the blocks in work of those whose turn it is; some
        rows of padding behind.
        """
        rows: list[tuple[int, int, bool]] = []
        counts = []
        for number, lane in enumerate(self.lanes):
            lane.is_fed = self.generator.random() < 0.9
            lane.is_needed = self.generator.random() < 0.1
            feed = self.size if lane.num_stored and self.generator.random() < 0.3 else 0
            lane.num_stored_rows = feed - len(lane.stays) * (feed > 0)
            lane.num_scheduled = self.generator.choice((0, feed))
            known = [(number, lane.num_stored - feed + index, False) for index in range(feed)]
            active = [(number, lane.num_stored + index, index in lane.masked) for index in range(self.size)]
            rows += known + (active if lane.is_fed else [])
            counts.append(feed + self.size * lane.is_fed)
        num_padding = self.generator.randrange(4)
        sequence_R, slots_R, is_mask_R = (
            torch.tensor([row[axis] for row in [*rows, *[(len(counts) - 1, 0, False)] * num_padding]])
            for axis in range(3)
        )
        starts_B = torch.tensor([lane.num_stored for lane in self.lanes])
        limits_R = slots_R // self.size * self.size + self.size
        counts_B = torch.tensor(counts)
        capacity = self.capacity(len(rows))
        is_maskable_BW = torch.tensor(
            [[lane.is_fed and index in lane.open for index in range(self.size)] for lane in self.lanes]
        )
        return StepPlan(
            lanes_B=torch.arange(len(self.lanes)),
            cu_rows_B1=torch.nn.functional.pad(counts_B.cumsum(0), (1, 0)),
            sequence_R=sequence_R,
            token_ids_R=slots_R,
            positions_R=slots_R,
            slots_R=slots_R,
            limits_R=limits_R,
            branch_starts_R=limits_R,
            is_mask_R=is_mask_R,
            logit_rows_X=torch.zeros(is_maskable_BW.numel(), dtype=torch.int64),
            first_logit_B=torch.zeros_like(starts_B),
            num_feed_B=counts_B,
            samples_B=torch.tensor([lane.is_fed for lane in self.lanes]),
            advances_B=torch.ones(len(counts), dtype=torch.bool),
            max_rows=2 * self.size,
            max_slots=3 * self.size,
            payload=ActiveBlocks(
                starts_B=starts_B,
                is_maskable_BW=is_maskable_BW,
                num_passes_B=starts_B,
                num_steps_B=starts_B,
                size=self.size,
                num_scheduled_B=torch.tensor([lane.num_scheduled for lane in self.lanes]),
                capacity=capacity,
                num_waits_B=torch.tensor([lane.num_waits for lane in self.lanes]),
                is_exact=capacity is None,
                demand=BlockDemand(num_wanted_B=torch.zeros_like(starts_B), waits_B=starts_B < 0),
            ),
        )

    def capacity(self, num_rows: int) -> PassRows | None:
        """Too little, enough, or None: rows that the host counts."""
        kind = self.generator.choice(("tight", "roomy", "exact"))
        if kind == "exact":
            return None
        minimum = sum(lane.num_scheduled for lane in self.lanes) + 2 * self.size
        maximum = num_rows if kind == "tight" else num_rows + minimum
        fed, retained = (self.generator.randint(min(minimum, maximum), maximum) for _ in range(2))
        return PassRows(fed=fed, retained=min(fed, retained), head=len(self.lanes))

    def view(self, plan: StepPlan) -> PassView:
        """What an accelerator is shown of it."""
        assert plan.active is not None and plan.is_mask_R is not None
        rows_BW, is_mask_BW = find_index(
            plan.cu_rows_B1, plan.slots_R, plan.is_mask_R, plan.active.starts_B, self.size
        )
        return PassView(
            plan=plan,
            active=plan.active,
            cache=self.cache,
            block_table_BP=self.table_BP,
            page_size=PAGE,
            scale=SCALE,
            rows_BW=rows_BW,
            is_working_B=plan.samples_B,
            is_mask_BW=is_mask_BW,
            needs_all_rows_B=torch.tensor([lane.is_needed for lane in self.lanes]),
        )

    def store(self, layer: int, kv: SparseKV) -> Tensor:
        """Random queries of the rows still fed, NaN at padding; random keys are stored, as the reference is
        told.
        """
        plan, num_rows = kv.plan, len(kv.plan.slots_R)
        q_RNH = 2 * torch.randn(num_rows, self.heads, HEAD_DIM, dtype=torch.float64)
        q_RNH[int(plan.cu_rows_B1[-1]) :] = float("nan")
        for row in range(int(plan.cu_rows_B1[-1])):
            number, slot = int(plan.sequence_R[row]), int(plan.slots_R[row])
            key_KH = torch.randn(self.num_kv_heads, HEAD_DIM, dtype=torch.float64)
            physical = int(self.table_BP[number, slot // PAGE]) * PAGE + slot % PAGE
            self.cache.keys[layer, physical] = key_KH
            if slot >= self.lanes[number].num_stored:
                self.lanes[number].keys[layer, slot - self.lanes[number].num_stored] = key_KH
        return q_RNH


def index_of(size: int, num_lanes: int) -> EngineSpec:
    """An engine that FOCUS goes with."""
    return EngineSpec(
        decoder="block",
        decoder_options={"dual_cache": False},
        block_size=size,
        num_layers=NUM_LAYERS,
        heads=HeadShape(
            num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, dtype=torch.float32, kv_dtype=torch.float32
        ),
        semantics=Semantics(logit_shift=False),
        num_lanes=num_lanes,
        max_slots=3 * size,
        max_rows=64,
        page_size=PAGE,
        device=torch.device("cpu"),
        tensor_parallel=1,
        deterministic=False,
        graphs="auto",
    )


def initial_rows(kv: SparseKV, number: int, start: int) -> dict[int, int]:
    """By position the rows of a sequence's block that are still fed."""
    plan = kv.plan
    own = range(int(plan.cu_rows_B1[number]), int(plan.cu_rows_B1[number + 1]))
    return {int(plan.slots_R[row]) - start: row for row in own if int(plan.slots_R[row]) >= start}


def stored_slots(kv: SparseKV, number: int, start: int) -> list[int]:
    """Slots before the active block that have a row."""
    own = slice(int(kv.plan.cu_rows_B1[number]), int(kv.plan.cu_rows_B1[number + 1]))
    return [slot for slot in kv.plan.slots_R[own].tolist() if slot < start]


def waits_for_rows(bench: Bench, demand: list[int], capacity: int | None, waits: list[bool]) -> list[bool]:
    """Who waits from here on."""
    if capacity is None:
        return waits
    scheduled = [min(lane.num_scheduled, lane.num_stored_rows) for lane in bench.lanes]
    found = assign_rows(demand, scheduled, [lane.num_waits for lane in bench.lanes], capacity)
    late = [b for b, lane in enumerate(bench.lanes) if lane.num_waits]
    if sum(scheduled) + sum(demand[b] - scheduled[b] for b in late) <= capacity:
        assert not any(found[b] for b in late), "none waits twice where those that waited fit"
    return [before or now for before, now in zip(waits, found, strict=True)]


def run_pass(bench: Bench) -> None:
    """One pass of all lanes, compared step by step; then some of what may be decided is."""
    plan = bench.plan()
    view = bench.view(plan)
    capacity, lanes = view.active.capacity, bench.lanes
    focus = bench.focus.begin(view)
    assert isinstance(focus, FocusPass)
    slot_mapping_R = torch.zeros_like(plan.slots_R)
    kv = SparseKV(plan, view, slot_mapping_R, kv=None, rows=focus, make_plan=lambda _: None)  # type: ignore[arg-type,return-value]
    fed = [
        list(range(bench.size)) if lane.is_needed else fed_positions(lane.state, bench.rules)
        for lane in lanes
    ]
    fed = [indices if lane.is_fed else [] for indices, lane in zip(fed, lanes, strict=True)]
    stored = [lane.num_stored_rows for lane in lanes]
    demand = [rows + len(indices) for rows, indices in zip(stored, fed, strict=True)]
    waits = waits_for_rows(bench, demand, None if capacity is None else capacity.fed, [False] * len(lanes))
    assert view.waits_B.tolist() == waits
    queries: dict[int, list[Rows]] = {number: [] for number in range(len(lanes))}
    for layer in (0, 1):
        q_RNH = bench.store(layer, kv)
        for number, lane in enumerate(lanes):
            before = initial_rows(kv, number, lane.num_stored)
            assert sorted(before) == ([] if waits[number] else fed[number])
            has_stored = lane.num_stored_rows and (lane.num_scheduled or not waits[number])
            indices = [index for index in range(bench.size) if index not in lane.stays] if has_stored else []
            assert [index % bench.size for index in stored_slots(kv, number, lane.num_stored)] == indices
            queries[number].append({index: q_RNH[row] for index, row in before.items()})
        rows_I = kv.select_rows(layer, q_RNH)
        assert layer == 1 or rows_I is None
    selections = [
        expected(bench, lane, queries[number]) if lane.is_fed and not waits[number] else None
        for number, lane in enumerate(lanes)
    ]
    demand = [
        rows + (0 if selection is None else len(selection.retained))
        if not wait
        else min(rows, lane.num_scheduled)
        for rows, selection, wait, lane in zip(stored, selections, waits, lanes, strict=True)
    ]
    waits = waits_for_rows(bench, demand, None if capacity is None else capacity.retained, waits)
    assert view.waits_B.tolist() == waits
    assert kv.select_rows(2, bench.store(2, kv)) is None
    kv.finish()
    assert focus.budget_B is not None
    bench.num_waits += sum(waits)
    for number, (lane, selection) in enumerate(zip(lanes, selections, strict=True)):
        lane.num_waits = lane.num_waits + 1 if waits[number] else 0
        after = initial_rows(kv, number, lane.num_stored)
        if selection is None or waits[number]:
            assert not after
            continue
        assert tuple(sorted(after)) == selection.retained
        assert lane.is_needed or int(focus.budget_B[number]) == selection.budget
        limits = {int(kv.plan.limits_R[row]) for row in after.values()}
        assert limits == {lane.num_stored + selection.limit}
        decide(bench, number, lane, selection)


def expected(bench: Bench, lane: Lane, queries: list[Rows]) -> Selection:
    """What the reference makes of the pass."""
    if lane.is_needed:
        return Selection(retained=tuple(range(bench.size)), budget=0, limit=bench.size)
    keys = [{index: lane.keys[layer, index] for index in range(bench.size)} for layer in (0, 1)]
    layers = (queries[0], keys[0]), (queries[1], keys[1])
    return select(lane.state, lane.masked, lane.open, layers, SCALE, bench.rules)


def decide(bench: Bench, number: int, lane: Lane, selection: Selection) -> None:
    """At random, one at least; the next block of the sequence, or another sequence, where none is left."""
    able = [index for index in lane.open if index in selection.retained]
    chosen = bench.generator.sample(able, bench.generator.randint(1, min(len(able), 4)))
    note(lane.state, lane.masked, selection, len(chosen), bench.rules)
    frozen = bench.focus.memory.frozen_ZW[number].nonzero()[:, 0].tolist()
    assert set(frozen) == lane.state.frozen
    assert set(bench.focus.memory.processed_ZW[number].nonzero()[:, 0].tolist()) == lane.state.processed
    lane.masked = [index for index in lane.masked if index not in chosen]
    if lane.masked:
        return
    bench.num_done += 1
    state = lane.state
    earlier = state.earlier[0] + state.num_decoded, state.earlier[1] + state.num_passes
    stays = lane.num_stored < 2 * bench.size
    new = bench.fresh(number, earlier if stays else (0, 0), lane.num_blocks + 1)
    new.state.is_new = not stays
    new.num_stored = lane.num_stored + bench.size if stays else new.num_stored
    new.stays = lane.state.frozen if stays and bench.rules.commit == "unfrozen" else set()
    if not stays:
        bench.focus.reset([number])
    bench.lanes[number] = new


@pytest.mark.sweep_but(num_blocks=120)
@pytest.mark.parametrize(("config", "size", "num_blocks"), CASES, ids=str)
def test_random_blocks_lose_rows_as_on_paper(config: FocusConfig, size: int, num_blocks: int) -> None:
    torch.manual_seed(size)
    bench = Bench(config, size, random.Random(size), num_lanes=12, heads=4 if size < 32 else 2)
    while bench.num_done < num_blocks:
        run_pass(bench)
    assert bench.num_waits > num_blocks // 10
