"""Sequences whose rows exceed a pass's capacity wait, and no answer of FOCUS shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idlm.infer.request import Request
from idlm.infer.scheduler import Scheduler
from idlm.infer.sparse import row_reservation
from idlm.infer.sparse.stack import SparseKV
from idlm.infer.state.batch import PassRows
from tests.contracts.accelerators.cases import FOCUS, PARAMS, PROMPTS, SIZE, TIGHT, engine_of, force, tokens
from tests.contracts.engines import assert_idle, drain

STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "low_confidence_dynamic", "threshold": 0.5, "steps": None},
    {
        "strategy": "low_confidence_dynamic",
        "threshold": 0.5,
        "edit_threshold": 0.3,
        "max_edit_passes": 2,
        "steps": None,
    },
    {"strategy": "sequential", "steps": 5, "fused_commit": False},
    {"strategy": "entropy_bounded", "entropy_bound": 1.5, "steps": None, "sub_block_size": 4},
]


FOCUS_CASES = [
    *((FOCUS[0], options) for options in STRATEGIES[:2]),
    (FOCUS[1], STRATEGIES[3]),
    (FOCUS[2], STRATEGIES[2]),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("stack", "options"), FOCUS_CASES, ids=str)
def test_waiting_changes_no_answer_of_focus(
    toys: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    stack: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """By late counts, and with the least capacity: for rows that are fed and kept, or for the head alone."""
    exact = engine_of(toys, accelerators=stack, max_num_seqs=1, **options)
    expected = tokens(exact.generate(PROMPTS, PARAMS))
    assert exact.row_counts.num_waits == 0
    everything = len(PROMPTS) * 2 * SIZE
    capacities = [None, TIGHT]
    if options == STRATEGIES[0]:
        capacities += [PassRows(fed=everything, retained=0, head=everything)]
        capacities += [PassRows(fed=everything, retained=everything, head=0)]
    for capacity in capacities:
        way = {"graphs": "on", "num_inflight_steps": 3}
        with monkeypatch.context() as patch:
            if capacity is not None:
                force(patch, capacity)
                patch.setattr(row_reservation, "MIN_POSITIONS", 0)
                way |= {"num_pages": 20, "max_num_seqs": 5}
            engine = engine_of(toys, accelerators=stack, **way, **options)
            assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
        assert_idle(engine)
        counts = engine.row_counts
        if capacity == TIGHT:
            assert counts.num_waits and engine.scheduler.num_preemptions
            assert counts.computed.head < counts.computed.fed


def test_every_sequence_finds_room_within_three_passes(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two of six whole blocks fit, each does in the third pass at the latest."""
    engine = engine_of(toys, accelerators="focus", max_num_seqs=6, graphs="on")
    num_waits: list[int] = []
    finish = SparseKV.finish

    def watched(kv: SparseKV) -> Any:
        num_waits_B = kv.view.active.num_waits_B
        assert num_waits_B is not None
        num_waits.append(int(num_waits_B.max()))
        return finish(kv)

    monkeypatch.setattr(SparseKV, "finish", watched)
    force(monkeypatch, TIGHT)
    engine.generate(PROMPTS, PARAMS)
    assert 1 <= max(num_waits) <= 2


def test_an_answer_that_is_decoded_again_to_other_tokens_fails_alone(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding of 16 bits may do that; here the first token of the first preempted request is changed."""
    stack = {"focus": {"commit": "unfrozen"}}
    options = {**STRATEGIES[0], "graphs": "on", "num_inflight_steps": 3, "num_pages": 20, "max_num_seqs": 5}
    engine = engine_of(toys, accelerators=stack, **options)
    changed: list[str] = []
    forget = Scheduler._forget

    def changing(self: Scheduler, request: Request) -> None:
        forget(self, request)
        if request.num_again and not changed:
            changed.append(request.request_id)
            request.token_ids[0] ^= 1

    monkeypatch.setattr(Scheduler, "_forget", changing)
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(number), prompt, params)
    done = drain(engine)
    [failed] = changed
    assert {name for name, found in done.items() if found.finish_reason == "error"} == {failed}
    assert len(done) == len(PROMPTS) and "IDLM-0473" in str(done[failed].error)
    assert_idle(engine)
