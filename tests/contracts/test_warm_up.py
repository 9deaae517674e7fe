"""Graphs captured ahead of traffic, with what stands for a graph on a CPU: the padded pass, run again."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from idlm.contracts import Constraint, SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.runtime.graphs import cuda_graphs as graphs
from idlm.infer.runtime.graphs import pass_shape as buckets
from idlm.infer.runtime.graphs import warm_up, warm_up_shapes
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.graphs.pass_shape import PassShape
from idlm.infer.runtime.stride_controller import StepLoad
from idlm.infer.state.batch import BlockLimits, PassRows
from tests.contracts.block.blocks import write_block_toy
from tests.contracts.engines import (
    CYCLE,
    PER_ROW,
    answers,
    assert_idle,
    build_engine,
    clear_answers,
    greedy,
    prompts_of,
    simulate_graphs,
)
from tests.toy import write_spelling_toy

PROMPTS = prompts_of([1, 7, 20, 3, 12, 5, 9, 33], vocab_size=CYCLE)
LETTERS = Constraint(kind="regex", text="(foo|bar)+[0-9]{3,8}")


@pytest.fixture(autouse=True)
def _simulated_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulate_graphs(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _step(engine: Engine) -> StaticStep:
    step = engine._parts.step
    assert isinstance(step, StaticStep)
    return step


def _after_traffic(directory: Path, decoder: str, prompts: list[list[int]], **options: Any) -> Engine:
    """A warm engine that captured nothing in traffic, and answered as without graphs; an adaptive one as AR
    does."""
    params = greedy(max_tokens=24)
    way = ("ar", {}) if options.get("adaptive") else (decoder, options)
    expected = clear_answers(build_engine(directory, way[0], graphs="off", **way[1]), prompts, params)
    engine = build_engine(directory, decoder, graphs="on", warmup="full", **options)
    ahead = engine.metrics()["graphs_captured_ahead"]
    found = engine.generate(prompts, params)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert engine.metrics()["graphs_captured_in_traffic"] == 0
    assert len(_step(engine)._graphs) == ahead > 0
    assert_idle(engine)
    return engine


@pytest.mark.sweep_but(1)
@pytest.mark.decides
@pytest.mark.parametrize(
    ("decoder", "options", "num_inflight"),
    [
        ("ar", {}, 4),
        ("isd", {"stride": 4, "rejection_strategy": "branch"}, 0),
        ("isd", {"stride": 4, "rejection_strategy": "tree"}, 4),
        ("isd", {"stride": 4, "adaptive": True}, 4),
    ],
    ids=str,
)
def test_traffic_after_a_warm_up_captures_nothing_and_answers_alike(
    foreseeing: Path, decoder: str, options: dict[str, Any], num_inflight: int
) -> None:
    engine = _after_traffic(foreseeing, decoder, PROMPTS, num_inflight_steps=num_inflight, **options)
    assert engine.metrics()["graphs_captured_ahead"] > 10


@pytest.mark.sweep
@pytest.mark.decides
def test_block_diffusion_has_graphs_of_its_reserved_rows(tmp_path: Path) -> None:
    directory = write_block_toy(tmp_path, shifted=False)
    prompts = prompts_of([5, 9, 14, 3, 8, 21, 6, 11] * 2)
    shapes = _step(_after_traffic(directory, "block", prompts, num_inflight_steps=2))._graphs
    assert {shape.num_sequences for shape in shapes} >= {1, 2, 4, 8, 16}
    assert all(shape.num_prompt_rows for shape in shapes), "clean blocks have rows"


@pytest.mark.sweep
@pytest.mark.decides
def test_traffic_of_focus_captures_nothing_after_a_warm_up(tmp_path: Path) -> None:
    """Passes run in captured capacities."""
    directory = write_block_toy(tmp_path, shifted=False)
    prompts = prompts_of([5, 9, 14, 3, 8, 21, 6, 11])
    way: dict[str, Any] = {"accelerators": "focus", "max_num_seqs": 8, "num_inflight_steps": 2}
    shapes = _step(_after_traffic(directory, "block", prompts, **way))._graphs
    assert all(shape.limits.capacity is not None for shape in shapes)


@pytest.mark.sweep_but(settings={"temperature": 0.7, "top_p": 0.8, "logprobs": 1})
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.8, "logprobs": 1}], ids=str)
def test_passes_with_grammars_have_graphs_too(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Those end with hidden states, whatever is asked of the logits."""
    path = write_spelling_toy(tmp_path)
    options: dict[str, Any] = {"stride": 4, "rejection_strategy": "tree"}
    params = SamplingParams(max_tokens=20, seed=3, constraint=LETTERS, **{"temperature": 0, **settings})
    plain = build_engine(path, "isd", graphs="off", **options)
    engine = build_engine(path, "isd", graphs="on", warmup="full", max_num_seqs=4, **options)
    step, before = _step(engine), set(_step(engine)._graphs)
    assert sum(not shape.decides for shape in before) >= 3
    prompts = prompts_of([1, 7, 3], vocab_size=40)
    assert answers(engine.generate(prompts, params)) == answers(plain.generate(prompts, params))
    assert set(step._graphs) == before and engine.metrics()["graphs_captured_in_traffic"] == 0
    assert not any(shape.num_prompt_rows == 0 for shape in step._num_eager)


def test_each_pass_runs_in_the_smallest_captured_shape_or_eagerly(
    foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(foreseeing, "ar", graphs="on", warmup="full", max_num_seqs=40)
    step, eager = _step(engine), []
    sizes = sorted({shape.num_sequences for shape in step._graphs})
    assert sizes[-1] == 40
    wide = next(shape for shape in step._graphs if shape.num_sequences == 40 and not shape.filters)
    for size in range(1, 41):
        holder = step._holder(replace(wide, num_sequences=size, num_rows=size))
        assert holder is not None
        assert holder.num_sequences == min(each for each in sizes if each >= size)
        assert not holder.filters, "sampling without filters is cheaper"
    assert step._holder(replace(wide, num_top=1)) is None
    others, step._graphs, step.eager_rows = step._graphs, {wide: step._graphs[wide]}, 32
    assert step._holder(replace(wide, num_sequences=36, num_rows=36)) == wide
    assert step._holder(replace(wide, num_sequences=35, num_rows=35)) is None, "many rows are hardly padded"
    step._graphs = others
    captured, batch = set(step._graphs), StaticStep._batch

    def recorded(self: StaticStep, shape: PassShape, columns_3B: Tensor) -> Any:
        eager.append(shape)
        return batch(self, shape, columns_3B)

    monkeypatch.setattr(StaticStep, "_batch", recorded)
    engine.generate(prompts_of([3] * 33, vocab_size=CYCLE), greedy(max_tokens=4))
    decoding = [shape for shape in eager if not shape.num_prompt_rows]
    assert decoding
    assert set(decoding) <= captured, "decoding has graphs"
    prompts = {shape.num_prompt_rows for shape in eager if shape.num_prompt_rows}
    assert prompts == {buckets.PROMPT_STEP}, "prompts are hardly padded"


@pytest.mark.sweep
def test_a_shape_that_keeps_coming_is_captured_when_idle_or_after_many_passes(
    foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_EAGER_PASSES", 6)
    engine = build_engine(foreseeing, "ar", graphs="on", warmup="full")
    assert not engine.capture_missed(), "nothing was missed"
    with_logprobs = greedy(max_tokens=5, logprobs=2)
    engine.generate(PROMPTS[:1], with_logprobs)
    assert engine.metrics()["graphs_captured_in_traffic"] == 0
    assert engine.capture_missed()
    assert not engine.capture_missed()
    assert engine.metrics()["graphs_captured_in_traffic"] == 0
    before = len(_step(engine)._graphs)
    engine.generate(PROMPTS[:1], greedy(max_tokens=20, logprobs=1))
    assert len(_step(engine)._graphs) == before, "one with more log-probabilities holds it"
    engine.generate(PROMPTS[:1], greedy(max_tokens=20, logprobs=3))
    assert engine.metrics()["graphs_captured_in_traffic"] == 1


def test_without_a_warm_up_shapes_are_captured_when_they_are_first_seen(foreseeing: Path) -> None:
    engine = build_engine(foreseeing, "ar", graphs="on", warmup="off")
    assert engine.metrics()["graphs_captured_ahead"] == 0
    engine.generate(PROMPTS[:2], greedy(max_tokens=4))
    assert engine.metrics()["graphs_captured_in_traffic"] == len(_step(engine)._graphs) > 0


@pytest.mark.sweep
def test_step_times_of_a_warm_up_are_kept_and_read_again(
    foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"stride": 4, "adaptive": True, "graphs": "on", "warmup": "full"}
    controllers = [build_engine(foreseeing, "isd", **options)._stride_controller]
    monkeypatch.setattr(
        StaticStep,
        "seconds",
        lambda _, shape: 1.0 if shape.num_prompt_rows else pytest.fail("the file has the times"),
    )
    controllers.append(build_engine(foreseeing, "isd", **options)._stride_controller)
    first, second = (controller.times for controller in controllers if controller is not None)
    assert first is not None
    assert first == second
    assert first.decoding(0, 8) == pytest.approx(1e-3 + PER_ROW * 8)
    monkeypatch.setattr(StaticStep, "seconds", lambda *_: 1.0)
    changed = build_engine(foreseeing, "isd", **{**options, "stride": 3})._stride_controller
    assert changed is not None
    assert changed.times is not None
    assert changed.times.decoding(0, 8) == 1.0, "other modes have times of their own"


@pytest.mark.sweep
def test_graphs_of_modes_that_measured_times_speak_for_come_first(
    foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock on which a row costs as much as a whole pass, drafts never pay: AR has the other graphs."""
    captured, capture = list[PassShape](), StaticStep.capture

    def note(self: StaticStep, shape: PassShape, *, frees_memory: bool) -> None:
        captured.append(shape)
        capture(self, shape, frees_memory=frees_memory)

    monkeypatch.setattr(StaticStep, "capture", note)
    monkeypatch.setattr(StaticStep, "seconds", lambda _, shape: 1.0 * shape.all_rows)
    engine = build_engine(foreseeing, "isd", stride=4, adaptive=True, graphs="on", warmup="full")
    controller, decoder = engine._stride_controller, engine.decoder
    assert controller is not None and controller.likely_modes(8) == {0} < set(range(len(decoder.modes)))
    limits = {"max_sequences": engine.settings.max_sequences, "max_length": engine.table.max_length}
    timed = warm_up_shapes.WarmUpShapes(decoder=decoder, **limits, max_prompt_rows=1).timed()
    others = captured[sum(shape in timed.values() for shape in captured) :]
    assert set(captured) - set(others) == set(captured) & set(timed.values()), (
        "those that are timed come first"
    )
    is_other_mode = [shape.mode > 0 for shape in others]
    assert is_other_mode == sorted(is_other_mode) and len(set(is_other_mode)) == 2


def test_a_warm_up_tells_what_passes_with_prompts_take(
    foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mode whose graphs are missing is not used beside prompts."""
    monkeypatch.setattr(warm_up_shapes, "PROMPT_GRAPHS", (128, 512))
    maximum: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 512}
    engine = build_engine(foreseeing, "isd", graphs="on", warmup="full", stride=2, adaptive=True, **maximum)
    costs, controller = engine.scheduler.costs, engine._stride_controller
    assert costs is not None and controller is not None and controller.captured is not None
    assert costs.graph_rows == (128, 512)
    assert costs.time(1, 0) / costs.time(4, 0, 500) == pytest.approx(
        (1e-3 + PER_ROW) / (1e-3 + PER_ROW * 516)
    )
    modes = range(len(engine.decoder.modes))
    assert controller.captured.maximum == dict.fromkeys(itertools.product(modes, (0, 128, 512)), 4)
    loads = [StepLoad(num_sequences=3, num_prompt_rows=9), StepLoad(num_sequences=3)]
    decoding = dict.fromkeys(itertools.product(modes, (0,)), 4)
    controller.captured = replace(controller.captured, maximum=decoding)
    assert [controller.choose(load) > 0 for load in loads] == [False, True]


@pytest.mark.sweep
def test_padding_teaches_no_times_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches none, so that a pass without sequences takes as long at every size."""
    from tests.unit.models.test_family_loading import write as write_family

    monkeypatch.setattr(StaticStep, "seconds", lambda *_: pytest.fail("a pass without experts was timed"))
    path = write_family(tmp_path / "experts", "Qwen3MoeForCausalLM", max_position_embeddings=128)
    engine = build_engine(path, "isd", stride=2, adaptive=True, graphs="on", warmup="full", mask_token_id=9)
    assert engine.metrics()["graphs_captured_ahead"] > 0
    assert engine._stride_controller is not None
    assert engine._stride_controller.times is None


def test_the_warm_up_ends_when_memory_is_short(foreseeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_prompts = 1 + 4  # Before the warm-up and each of its passes with prompts.
    free = itertools.chain([100] * num_prompts, [100, 90, 60, 60, 40], itertools.repeat(40))
    monkeypatch.setattr(warm_up, "memory_bytes", lambda _: (next(free), 100))
    engine = build_engine(foreseeing, "ar", graphs="on", warmup="full")
    assert engine.metrics()["graphs_captured_ahead"] == 4
    assert engine.generate(PROMPTS[:2], greedy(max_tokens=3))


def test_passes_with_blocks_run_in_a_larger_graph_until_it_wastes_a_capture(tmp_path: Path) -> None:
    directory = write_block_toy(tmp_path, shifted=False)
    engine = build_engine(directory, "block", graphs="on", accelerators="focus")
    step = _step(engine)
    wide = PassShape(
        mode=0,
        num_sequences=8,
        num_rows=4096,
        max_rows=8,
        num_prompt_rows=0,
        max_known=1024,
        filters=False,
        num_top=None,
        payload=BlockLimits(),
    )
    step.capture(wide)
    capacity = PassRows(fed=2048, retained=1024, head=512)
    limits, less = (BlockLimits(capacity=replace(capacity, retained=retained)) for retained in (1024, 512))
    assert all(step._holder(replace(wide, payload=each)) == wide for each in (limits, less))
    assert step._holder(replace(wide, filters=True, payload=limits)) is None, "sampling costs more"
    tight, num_passes = replace(wide, payload=limits), 1
    while not step._is_wasteful(tight, wide):
        num_passes += 1
    share = wide.weight / tight.weight - 1 - graphs.FREE_PADDING
    assert num_passes == pytest.approx(graphs.PASSES_PER_GRAPH / share, abs=1)
    step.capture(tight)
    assert step._holder(replace(tight, payload=less)) == tight
    assert not step._is_wasteful(tight, tight)
