"""Block diffusion under load: requests at steps of their own are as alone; none of many that come, go and are
thrown out leaves anything behind."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.state.batch import lane_of
from tests.contracts.engines import MASK_ID, answers_and_margins, assert_idle, build_engine, prompts_of
from tests.contracts.test_scheduler_soak import ROOMY, TINY, Arrival, _Soak
from tests.prefix_simulation import check_pages

SIZE = 4
STEPS = (None, 1, 2, 3)
WAYS: list[dict[str, Any]] = [
    {"mode": "quality", "num_inflight_steps": 3, "graphs": "on"},
    {"strategy": "entropy_bounded", "sub_block_size": 2, "prefix_cache": False, "num_inflight_steps": 2},
]


class BlockSoak(_Soak):
    """A block that is known need not be stored yet, and the device may have stored more than it told."""

    def _check_books(self) -> None:
        scheduler, pool, table = self.engine.scheduler, self.engine.pool, self.engine.table
        check_pages(pool)
        lanes = [lane_of(request) for request in scheduler.running]
        assert sorted([*lanes, *scheduler._free_lanes]) == list(range(self.engine.settings.max_num_seqs))
        assert all(pool.num_owned(lane) == 0 for lane in scheduler._free_lanes)
        for request in scheduler.running:
            lane = lane_of(request)
            known, computed = int(table.num_known_Z[lane]), int(table.num_computed_Z[lane])
            assert known >= request.num_known and computed % SIZE == 0
            assert computed <= known // SIZE * SIZE
            if request.num_inflight == 0:
                assert (known, computed) == (request.num_known, request.num_computed)


def arrivals_of(count: int, seed: int, *, edits: bool) -> list[Arrival]:
    """Prompts of 1 to 30 tokens, half of which begin alike."""
    rng = random.Random(seed)
    begin = prompts_of([19], seed=seed)[0]
    tails = prompts_of([rng.randint(1, 11) for _ in range(count)], seed=seed + 1)
    found = []
    for number, tail in enumerate(tails):
        options: dict[str, Any] = {"steps": rng.choice(STEPS), "threshold": rng.choice((0.3, 0.6, 0.9))}
        if edits:
            options["edit_threshold"] = rng.choice((None, 0.2, 1.0))
        params = SamplingParams(
            max_tokens=rng.randint(1, 24),
            temperature=rng.choice((0.0, 0.7, 1.0)),
            top_k=rng.choice((0, 0, 5)),
            seed=rng.randrange(2**63),
            stop_token_ids=rng.choice(((), (), (2,))),
            decoder_options=options,
        )
        found.append(
            Arrival(
                request_id=f"q{number}",
                prompt=begin[: rng.choice((0, 0, 8, 19))] + tail,
                params=params,
                abort_after=rng.choice((-1, 1, 2, 3, 6)) if rng.random() < 0.4 else None,
            )
        )
    return found


def soak(toy: Path, count: int, options: dict[str, Any]) -> None:
    arrivals = arrivals_of(count, seed=count, edits="mode" in options)
    run = BlockSoak(
        engine=build_engine(toy, "block", **(TINY | {"num_pages": 34} | options)), finished={}, struck={}
    )
    run.run(arrivals)
    assert_idle(run.engine)
    assert run.engine.scheduler.num_preemptions > count // 50
    assert {"queued", "decoding"} <= run.struck.keys(), run.struck
    assert len(run.finished) + sum(run.struck.values()) == count
    assert sum(run.struck.values()) > count // 5
    plain = {key: value for key, value in options.items() if key not in ("num_inflight_steps", "graphs")}
    roomy = build_engine(toy, "block", **(ROOMY | plain | {"prefix_cache": False}))
    expected, is_clear = answers_and_margins(
        roomy, [a.prompt for a in arrivals], [a.params for a in arrivals]
    )
    assert sum(is_clear) > 0.9 * count, "too few answers are free of near ties"
    for arrival, undisturbed, clear in zip(arrivals, expected, is_clear, strict=True):
        survivor = run.finished.get(arrival.request_id)
        if survivor is not None and clear:
            assert survivor.token_ids == undisturbed.token_ids, arrival
            assert survivor.finish_reason == undisturbed.finish_reason


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(
    ("shifted", "count", "options"), [(False, 30, WAYS[0]), (True, 60, WAYS[0]), (False, 60, WAYS[1])]
)
def test_many_with_aborts_leak_nothing(
    toys: dict[bool, Path], shifted: bool, count: int, options: dict[str, Any]
) -> None:
    soak(toys[shifted], count, options)


def drive(engine: Engine, arrivals: list[Arrival]) -> dict[str, tuple[int, ...]]:
    """One request arrives with every pass, so that sequences are rarely at the same step."""
    found, waiting = {}, list(reversed(arrivals))
    while waiting or engine.has_work:
        if waiting:
            arrival = waiting.pop()
            engine.add_request(arrival.request_id, arrival.prompt, arrival.params)
        for event in engine.step():
            if event.completion is not None:
                found[event.request_id] = event.completion.token_ids
    return found


@pytest.mark.sweep
def test_requests_at_steps_of_their_own_are_as_one_by_one(toys: dict[bool, Path]) -> None:
    """Prompts of every length from one token on, answers of up to four blocks."""
    arrivals = [
        dataclasses.replace(
            one,
            prompt=prompts_of([1 + number % 33], seed=number)[0],
            params=dataclasses.replace(one.params, max_tokens=6 + number % 7, stop_token_ids=()),
        )
        for number, one in enumerate(arrivals_of(36, seed=5, edits=True))
    ]
    options = {"mode": "speed", "max_edit_passes": 3, "max_length": 96, "max_num_seqs": 64}
    engine = build_engine(toys[True], "block", **options, graphs="on", num_inflight_steps=2)
    together = drive(engine, arrivals)
    assert_idle(engine)
    alone = build_engine(toys[True], "block", **options, prefix_cache=False)
    _, is_clear = answers_and_margins(alone, [a.prompt for a in arrivals], [a.params for a in arrivals])
    assert sum(is_clear) > 30, "too few answers are free of near ties"
    for arrival, clear in zip(arrivals, is_clear, strict=True):
        [found] = alone.generate([arrival.prompt], arrival.params)
        assert together[arrival.request_id] == found.token_ids or not clear, arrival
        assert MASK_ID not in found.token_ids
