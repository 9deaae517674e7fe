"""The head computes the rows that may be decided; a pass with fewer rows makes sequences wait, and no
answer shows it: against each request with rows for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Completion, SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.request import Request
from idlm.infer.runtime.graphs import pass_shape
from idlm.infer.runtime.model_runner import Runner
from idlm.infer.sparse.row_reservation import (
    MIN_PASSES,
    LateCounts,
    RowDemand,
    RowReservation,
    row_capacity,
    warm_up_capacities,
)
from idlm.infer.state.batch import BlockLimits, PassRows, Schedule, StepPlan, WantedRows
from tests.contracts.block.blocks import PROMPTS, params_of
from tests.contracts.engines import assert_idle, build_engine, watch_passes

pytestmark = pytest.mark.decides

SIZE = 8
CASES: list[tuple[bool, dict[str, Any]]] = [
    (False, {"strategy": "low_confidence_static", "steps": 3}),
    (True, {"strategy": "low_confidence_dynamic", "threshold": 0.5, "fused_commit": False}),
    (True, {"strategy": "low_confidence_static", "sub_block_size": 4, "dual_cache": True}),
    (False, {"mode": "quality"}),
    (False, {"accelerators": {"focus": {}, "mage": {"k": 5, "exact_layers": 1}}}),
    (
        False,
        {
            "accelerators": {"quest": {"k": 6, "page": 4, "exact_layers": 1}},
            "strategy": "entropy_bounded",
            "entropy_bound": 1.5,
        },
    ),
]
STATIC = {"graphs": "on", "num_inflight_steps": 3, "max_length": 64, "page_size": SIZE}


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


class Watch:
    """Wanted rows of each pass, and how long lanes waited."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.num_rows: list[int] = []
        self.num_waits: list[int] = []
        forward = Runner.forward

        def watched(runner: Runner, plan: StepPlan) -> WantedRows:
            self.num_rows.append(len(plan.logit_rows_X))
            self.num_waits.append(int(engine.decoder.blocks.num_waits_Z.max()))  # type: ignore[attr-defined]
            return forward(runner, plan)

        patch.setattr(Runner, "forward", watched)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(("shifted", "options"), CASES, ids=str)
def test_no_answer_depends_on_the_room(
    toys: dict[bool, Path], shifted: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = build_engine(toys[shifted], "block", **options, max_num_seqs=1, max_length=64, page_size=SIZE)
    expected = tokens(alone.generate(PROMPTS, params_of()))
    for num_wanted, settings in ((0, {}), (24, {"max_num_seqs": 5, "num_pages": 24})):
        with monkeypatch.context() as patch:
            patch.setattr(pass_shape, "head_bucket", lambda *_, num=num_wanted: num)
            engine = build_engine(toys[shifted], "block", **options, **STATIC, **settings)
            watch = Watch(engine, patch)
            assert tokens(engine.generate(PROMPTS, params_of())) == expected
        assert_idle(engine)
        assert max(watch.num_rows) < 8 * SIZE
        # One always fits, and who waited longest is the first.
        assert 1 <= max(watch.num_waits) <= 8 or num_wanted


def test_an_exact_pass_computes_no_row_that_is_decided(
    toys: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(toys[False], "block", strategy="sequential", max_length=64, page_size=SIZE)
    watch = Watch(engine, monkeypatch)
    engine.generate(PROMPTS[3:4], params_of()[3:4])
    assert watch.num_rows[:3] == [3, 2, 1], "a prompt of 5 tokens leaves three masks in its block of 8"


def test_the_host_reserves_the_mean_and_a_margin() -> None:
    rows = LateCounts()
    for _ in range(MIN_PASSES):
        assert rows.choose(64) is None
        rows.observe(17 * 64, 64)
    assert rows.choose(128) == 17 * 128
    for number in range(64):
        rows.observe((12 + 10 * (number % 2)) * 64, 64)
    reserved = rows.choose(64)
    assert reserved is not None and 22 * 64 < reserved < 32 * 64
    rows.observe(0, 0)
    assert rows.choose(64) == reserved, "a pass of prompts alone says nothing"


def demands(num: int, *, fed: int = 0, retained: int = 0, head: int = 0, **more: Any) -> list[RowDemand]:
    fields = {"samples": True, "waited": False, "certain": 0, **more}
    return [RowDemand(rows=PassRows(fed=fed, retained=retained, head=head), **fields)] * num


def schedule_of(num_feed: list[int], samples: list[bool]) -> Schedule:
    requests = [
        Request(
            request_id=str(number),
            index=0,
            prompt_ids=[1],
            params=SamplingParams(),
            stop_ids=frozenset(),
            max_length=64,
        )
        for number in range(len(num_feed))
    ]
    return Schedule(requests=requests, num_feed=num_feed, num_known=num_feed, samples=samples)


def test_rows_that_are_kept_are_foreseen_from_those_that_found_room_or_not() -> None:
    reservation = RowReservation(drops=True, block_size=32)
    schedule = schedule_of([64, 0, 0, 0], [False, True, True, True])
    for _ in range(MIN_PASSES):
        reservation.choose(schedule)
        whole = 64 + 3 * 32 + 12
        assert schedule.limits == BlockLimits(capacity=PassRows(fed=whole, retained=whole, head=96))
        prompt = demands(1, fed=64, retained=64, samples=False, certain=64)
        early = demands(1, fed=20, waited=True)  # It waited before it was known what it keeps.
        reservation.observe(
            [*prompt, *demands(3, fed=20, retained=8, head=5), *early],
            PassRows(fed=160, retained=128, head=32),
        )
    reservation.choose(schedule)
    assert schedule.limits == BlockLimits(capacity=PassRows(fed=64 + 60, retained=64 + 24, head=15))
    counts = reservation.counts
    assert (counts.num_passes, counts.num_pairs, counts.num_waits) == (4, 16, 4)
    assert counts.requested == PassRows(fed=4 * 144, retained=4 * 88, head=60)
    assert counts.computed == PassRows(fed=640, retained=512, head=128)
    dense = RowReservation(drops=False)
    for _ in range(MIN_PASSES):
        dense.observe(demands(4, head=5), PassRows(fed=32, retained=32, head=32))
    dense.choose(schedule)
    assert schedule.limits == BlockLimits(num_wanted=15)


@pytest.mark.parametrize(("num_sequences", "block_size"), [(1, 32), (3, 8), (128, 32), (256, 64)])
def test_rooms_of_graphs_hold_every_pass_with_little_padding(num_sequences: int, block_size: int) -> None:
    num_rows = 2 * num_sequences * block_size
    capacities = warm_up_capacities(num_sequences, block_size, num_rows)
    assert capacities[0] == PassRows(fed=num_rows, retained=num_rows, head=num_rows // 2)
    assert len(capacities) == len(set(capacities)) <= 60
    for retained in range(max(128, 2 * num_sequences), num_rows, 7):
        needed = PassRows(
            fed=min(num_rows // 2, 3 * retained), retained=retained, head=min(num_rows // 2, retained // 2)
        )
        held = min(capacity.retained for capacity in capacities if capacity >= needed)
        share = 1 / 8 if retained < 3 / 8 * num_rows / 2 else 1 / 4
        assert retained <= held <= (1 + share) * retained + 64 or held == num_rows


def test_scheduled_rows_and_one_sequence_always_have_room() -> None:
    sizes: dict[str, int] = {"num_rows": 4096, "num_sequences": 64, "block_size": 32}
    assert row_capacity(None, num_scheduled=0, **sizes) is None
    minimum = row_capacity(PassRows(fed=0, retained=0, head=0), num_scheduled=96, **sizes)
    assert minimum == PassRows(fed=192, retained=160, head=128)
    for retained, rounded in (
        (161, 176),
        (256, 256),
        (257, 272),
        (513, 544),
        (1023, 1024),
        (1025, 1088),
        (9000, 4096),
    ):
        capacity = row_capacity(PassRows(fed=9000, retained=retained, head=2048), num_scheduled=0, **sizes)
        assert capacity == PassRows(fed=4096, retained=rounded, head=2048)


def test_attention_is_laid_out_for_one_block_of_a_sequence(
    toys: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few sequences store a finished block in the same pass, and kernels are chosen by what most do."""
    engine = build_engine(toys[False], "block")
    passes, num_rows = watch_passes(engine, monkeypatch), list[int]()
    engine.generate(PROMPTS[:2], SamplingParams(temperature=0.0, max_tokens=12))
    for plan, _ in passes:
        assert plan.usual_rows == SIZE and plan.max_rows >= 2 * SIZE
        num_rows += plan.cu_rows_B1.diff().tolist()
    assert max(num_rows) > SIZE >= sorted(num_rows)[len(num_rows) // 2]
