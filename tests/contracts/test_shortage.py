"""Out of memory at any allocation of a pass: no answer changes, or one request reports the reason; the engine
goes on and no page is lost."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer import scheduler as schedulers
from idlm.infer.engine import Engine, StreamEvent
from idlm.infer.request import QueueOrder
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.model_runner import Runner
from idlm.infer.state.batch import StepPlan
from tests.contracts.engines import (
    CYCLE,
    MAX_STRIDE,
    Shortage,
    assert_idle,
    build_engine,
    clear_answers,
    greedy,
    prompts_of,
)
from tests.errors import refused
from tests.prefix_simulation import check_pages
from tests.ranks import group_engine, group_of_threads

DECODERS: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    ("isd", {"stride": 4, "rejection_strategy": "branch"}),
]
WAYS: list[dict[str, Any]] = [{}, {"graphs": "on", "num_inflight_steps": 2}]
LENGTHS = (3, 22, 9, 13, 5)
MAX_PASSES = 400


def _prompts() -> list[list[int]]:
    """The first tokens of three are the same: the prefix cache has something to do."""
    prompts = prompts_of(LENGTHS, vocab_size=CYCLE)
    return [prompts[1][:12] + prompt if k % 2 else prompt for k, prompt in enumerate(prompts)]


def _engine(foreseeing: Path, decoder: str, **options: Any) -> Engine:
    return build_engine(foreseeing, decoder, max_num_seqs=4, **options)


def _add(engine: Engine, max_tokens: int = 8) -> None:
    for number, prompt in enumerate(_prompts()):
        engine.add_request(str(number), prompt, greedy(max_tokens=max_tokens))


def _drain(engine: Engine, shortage: Shortage | None = None) -> dict[str, Completion]:
    """All answers; the books are checked after every pass."""
    done: dict[str, Completion] = {}
    for _ in range(MAX_PASSES):
        if not engine.has_work:
            assert shortage is None or shortage.is_over
            return done
        with contextlib.nullcontext() if shortage is None or shortage.is_over else shortage:
            events = engine.step()
        done |= {event.request_id: event.completion for event in events if event.completion is not None}
        check_pages(engine.pool)
    raise AssertionError("the engine never comes to an end")


def _check_survivors(found: dict[str, Completion], expected: dict[str, Completion]) -> list[Completion]:
    """Requests that did not fail have the answers of an engine with enough memory; returns the others."""
    assert found.keys() == expected.keys()
    failed = []
    for name, answer in found.items():
        if answer.finish_reason == "error":
            failed.append(answer)
            assert answer.error is not None
            assert answer.error.startswith("IDLM-0448")
            assert name in answer.error
            assert answer.token_ids == expected[name].token_ids[: len(answer.token_ids)]
        else:
            assert (answer.token_ids, answer.text) == (expected[name].token_ids, expected[name].text)
            assert answer.error is None
    return failed


def _shortages(
    foreseeing: Path,
    decoder: str,
    options: dict[str, Any],
    way: dict[str, Any],
    failures: Iterable[tuple[int, int]],
) -> None:
    """`failures`: the number of the allocation that fails first, and how many fail in a row."""
    engine = _engine(foreseeing, decoder, **options, **way)
    _add(engine)
    expected = _drain(engine)
    for number, num_failing in failures:
        _add(engine)
        found = _drain(engine, Shortage("cpu", set(range(number, number + num_failing))))
        failed = _check_survivors(found, expected)
        assert len(failed) == num_failing - 1, f"{number=}"
        assert_idle(engine)
        engine.pool.reset()


def test_a_shortage_costs_no_answer_and_two_in_a_row_cost_one_request(foreseeing: Path) -> None:
    _shortages(foreseeing, *DECODERS[0], WAYS[1], itertools.product(range(1, 101, 24), (1, 2)))


@pytest.mark.sweep
@pytest.mark.parametrize("number", [0, 1], ids=["ar", "isd"])
def test_a_shortage_at_many_allocations(foreseeing: Path, number: int) -> None:
    """Every second one fails twice in a row."""
    failures = ((first, 1 + first % 2) for first in range(1, 101, 5))
    _shortages(foreseeing, *DECODERS[number], WAYS[1 - number], failures)


def _fail_passes(monkeypatch: pytest.MonkeyPatch, engine: Engine, fails: Any) -> list[int]:
    """Passes for which `fails(rows)` run out of memory; returns the list of the rows of all passes."""
    launch, sizes = engine._worker.launch, []

    def launching(schedule: Any) -> Any:
        sizes.append(sum(schedule.num_feed))
        result = launch(schedule)
        if fails(sizes[-1]):
            raise torch.OutOfMemoryError("as it was told to")
        return result

    monkeypatch.setattr(engine._worker, "launch", launching)
    return sizes


@pytest.mark.sweep
def test_prompts_that_are_too_much_at_once_are_fed_in_smaller_pieces(
    foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that always holds; and later, when it does no more, the old pieces come back."""
    monkeypatch.setattr(schedulers, "STEPS_TO_RESTORE", 4)
    engine = _engine(foreseeing, "ar", max_num_batched_tokens=48)
    _add(engine)
    expected = _drain(engine)
    engine.pool.reset()
    maximum = 30
    sizes = _fail_passes(monkeypatch, engine, lambda rows: rows > maximum)
    _add(engine)
    assert not _check_survivors(_drain(engine), expected)
    assert max(sizes) > maximum
    maximum, num_seen = 1000, len(sizes)
    for _ in range(2):
        _add(engine, max_tokens=30)
        _drain(engine)
        engine.pool.reset()
    assert max(sizes[num_seen:]) > 48
    assert engine.scheduler._row_budget == 48


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_modes_that_do_not_fit_into_memory_cost_no_answer(
    foreseeing: Path, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stride 1 always fits: the controller tries wider passes, and goes on without them."""
    expected = clear_answers(build_engine(foreseeing, "ar"), _prompts(), greedy(max_tokens=40))
    engine = _engine(foreseeing, "isd", stride=MAX_STRIDE, adaptive=True, **way)
    forward, num_failed = Runner.forward, 0

    def short(runner: Runner, plan: StepPlan) -> Any:
        nonlocal num_failed
        if len(plan.token_ids_R) > 80:
            num_failed += 1
            raise torch.OutOfMemoryError("as it was told to")
        return forward(runner, plan)

    monkeypatch.setattr(Runner, "forward", short)
    found = engine.generate(_prompts(), greedy(max_tokens=40))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert num_failed


def test_memory_that_stays_short_ends_every_request_the_youngest_of_a_pass_first(
    foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(foreseeing, "isd", stride=4)
    with monkeypatch.context() as patch:
        sizes = _fail_passes(patch, engine, lambda rows: True)
        _add(engine)
        found = _drain(engine)
    assert {answer.finish_reason for answer in found.values()} == {"error"}
    assert next(iter(found)) == "1", "the second pass, of a smaller budget, feeds no younger request"
    assert len(sizes) == len(LENGTHS) + 1
    assert_idle(engine)
    _add(engine)
    assert {answer.finish_reason for answer in _drain(engine).values()} == {"length"}


def test_generate_and_stream_raise_for_their_own_requests_only(
    foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(foreseeing, "ar", max_num_batched_tokens=512)
    short = {"passes": 0}

    def fails(rows: int) -> bool:
        short["passes"] -= 1
        return short["passes"] >= 0

    _fail_passes(monkeypatch, engine, fails)
    engine.add_request("other", _prompts()[0], greedy(max_tokens=20))
    short["passes"] = 2
    with pytest.raises(UserError, match="IDLM-0448.*'r1'.*told to") as caught:
        engine.generate(_prompts()[:2], greedy(max_tokens=4), request_ids=["r0", "r1"])
    assert caught.value.__context__ is None, "its traceback would hold the tensors of the pass"
    engine.step()
    short["passes"] = 2
    refused("IDLM-0448", list, engine.stream(_prompts()[3], greedy(max_tokens=4)))
    assert list(engine._active) == ["other"]
    engine.step()
    short["passes"] = 2
    engine.add_request("young", _prompts()[2], SamplingParams(max_tokens=5, seed=1, n=2))
    events: list[StreamEvent] = []
    while engine.has_work:
        events += engine.step()
    [failed] = [event for event in events if event.error is not None]
    assert (failed.request_id, failed.index) == ("young", 1)
    ended = {(e.request_id, e.index): e.completion.finish_reason for e in events if e.completion is not None}
    assert ended == {("other", 0): "length", ("young", 0): "length", ("young", 1): "error"}
    assert_idle(engine)


def test_other_errors_reach_the_caller(foreseeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But one that comes of giving up a capture, for which memory was short, is a shortage."""
    engine = _engine(foreseeing, "ar")
    launch = engine._worker.launch

    def failing(schedule: Any) -> Any:
        monkeypatch.setattr(engine._worker, "launch", launch)
        raise RuntimeError("a kernel's")

    monkeypatch.setattr(engine._worker, "launch", failing)
    _add(engine)
    with pytest.raises(RuntimeError, match="a kernel's"):
        engine.step()

    def abandoned(schedule: Any) -> Any:
        monkeypatch.setattr(engine._worker, "launch", launch)
        try:
            raise torch.OutOfMemoryError("first")
        finally:
            raise RuntimeError("capture was not ended")

    monkeypatch.setattr(engine._worker, "launch", abandoned)
    assert engine.step() == []
    assert {answer.finish_reason for answer in _drain(engine).values()} == {"length"}


def test_ranks_end_with_the_reason(foreseeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idlm.infer.distributed.launcher.FAILURE_REASON_TIMEOUT", 0.1)
    with group_of_threads(2) as group:
        engine = group_engine(group, foreseeing, "ar")
        step = engine._parts.step
        monkeypatch.setattr(type(step), "__call__", _short_on_rank_0(engine, type(step).__call__))
        for _ in range(2):
            with pytest.raises(UserError, match=r"IDLM-0428.*OutOfMemoryError") as caught:
                engine.generate([[1, 2, 3]], greedy(max_tokens=4))
            assert "max_num_batched_tokens" in caught.value.fix


def _short_on_rank_0(engine: Engine, call: Any) -> Any:
    def stepping(step: Any, schedule: Any) -> Any:
        if step is engine._parts.step:
            # The other rank's thread should not wait for this one.
            call(step, schedule)
            raise torch.OutOfMemoryError("rank 0 is short")
        return call(step, schedule)

    return stepping


class _Graph:
    """What stands for a captured graph."""

    def __init__(self, shape: Any) -> None:
        self.graph, self.result, self.columns = self, shape, None
        self.columns_3B = torch.empty(3, shape.num_sequences, dtype=torch.int64)

    def replay(self) -> None:
        """Nothing to do."""


def test_graphs_are_few_and_those_in_use_stay(foreseeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idlm.infer.runtime.graphs.cuda_graphs.MAX_CUDA_GRAPHS", 3)
    engine = _engine(foreseeing, "ar", graphs="on")
    step = engine._parts.step
    assert isinstance(step, StaticStep)
    _add(engine)
    schedule = engine.scheduler.next()
    assert schedule is not None
    captured: list[int] = []

    def capture(self: StaticStep, shape: Any, **_: Any) -> _Graph:
        assert len(self._graphs) < 3, "room is made before the capture"
        captured.append(shape.mode)
        return _Graph(shape)

    monkeypatch.setattr(StaticStep, "_capture", capture)
    monkeypatch.setattr(step, "captures", True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    for mode in (0, 1, 2, 0, 3, 0, 1, 3, 0):
        schedule.mode = mode
        step(schedule)
    assert captured == [0, 1, 2, 3, 1]
    step.clear()
    step(schedule)
    assert captured == [0, 1, 2, 3, 1, 0]


def test_a_reserved_lane_is_for_a_client_that_has_none(foreseeing: Path) -> None:
    """All other lanes are one client's: the request of another has its first token a few passes later."""
    engine = build_engine(foreseeing, "isd", stride=3, max_num_seqs=3)
    engine.scheduler.num_reserved_lanes = 1
    prompts = prompts_of([5, 9, 3, 7], vocab_size=CYCLE)
    for number in range(3):
        params = greedy(max_tokens=60, ignore_eos=True)
        engine.add_request(str(number), prompts[number], params, turn=QueueOrder("many"))

    def step() -> set[str]:
        return {event.request_id for event in engine.step() if event.token_ids}

    assert set().union(*(step() for _ in range(6))) == {"0", "1"}
    engine.add_request("3", prompts[3], greedy(max_tokens=9, ignore_eos=True), turn=QueueOrder("few"))
    assert set().union(*(step() for _ in range(6))) == {"0", "1", "3"}
    while engine.has_work:
        step()
    assert_idle(engine)
