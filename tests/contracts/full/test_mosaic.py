"""`memory=mosaic` answers as `memory=caching`: whole and in chunks, with poisoned ranges, mixed, aborted."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.planning import canvas
from idlm.infer.planning.lifetimes import relate
from idlm.infer.planning.planner import Plan, plan_template
from idlm.infer.planning.sizes import Sizes
from idlm.infer.planning.template import Step
from idlm.infer.runtime import canvas_attention, canvas_ops
from idlm.infer.runtime.canvas_ops import CanvasPass
from idlm.kernels.experts import steps as expert_steps
from tests.contracts.engines import assert_idle, build_engine, prompts_of
from tests.numerics import full_reference

FAMILIES = tuple(full_reference.CONFIGS)
PROMPTS = prompts_of([1, 7, 12, 3, 9])
LENGTHS = (12, 8, 16, 4, 24)
ORDERS: list[dict[str, Any]] = [
    {"order": "low_confidence"},
    {"order": "low_confidence", "block_length": 4, "threshold": 0.3},
    {"order": "random", "block_length": 4},
    {"order": "maskgit_plus", "steps": 4, "defer_eos": True},
    {"order": "topk_margin", "steps": 4},
    {"order": "entropy", "steps": 4, "order_temperature": 0.5},
    {"order": "origin", "steps": 4},
]
CHUNKS: list[dict[str, int]] = [
    {"logits": 5},
    {"ffn": 4, "experts": 4},
    {"query": 3},
    {"logits": 100, "ffn": 100, "experts": 100, "query": 100},
]


def directory_of(kind: str, directory: Path) -> Path:
    """A tiny random checkpoint of a family."""
    save_file(full_reference.random_tensors(kind), directory / "model.safetensors")
    config = full_reference.CONFIGS[kind] | {"stop_token_ids": None, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory_of("llada", tmp_path_factory.mktemp("llada"))


def engine_of(directory: Path, memory: str = "mosaic", **options: Any) -> Engine:
    defaults = {"max_length": 64, "max_num_batched_tokens": 40}
    return build_engine(directory, None, memory=memory, **{**defaults, **options})


def params_of(number: int) -> SamplingParams:
    settings: dict[str, Any] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.8},
    ][number % 3]
    return SamplingParams(**settings, seed=number, max_tokens=LENGTHS[number], ignore_eos=True)


def with_chunks(engine: Engine, chunks: dict[str, int]) -> None:
    """Plan every pass with these chunk counts (at most one row a chunk), whatever fits."""
    runner: Any = engine._parts.runner

    def plan_of(num_rows: int, num_wanted: int) -> Plan:
        known = {name: count for name, count in chunks.items() if name in runner._templates.chunk_counts}
        counts = {
            name: min(count, num_wanted if name == "logits" else num_rows) for name, count in known.items()
        }
        template = runner._templates.template(counts)
        return plan_template(template, Sizes(length=num_rows, wanted=num_wanted, chunks=counts))

    runner.plan_of = plan_of


def run(engine: Engine, *, abort: str | None = None) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Answers of mixed requests, and the logits of the wanted rows of every pass."""
    runner: Any = engine._parts.runner
    forward, logits = runner.forward, []

    def recorded(plan: Any) -> Any:
        wanted = forward(plan)
        proposals = wanted.proposals

        def recording(propose: Callable[..., Any], *, row_bytes: int = 0) -> Any:
            def both(logits_YV: torch.Tensor, rows: slice) -> Any:
                logits.append(logits_YV.clone())
                return propose(logits_YV, rows)

            return proposals(both, row_bytes=row_bytes)

        wanted.proposals = recording
        return wanted

    runner.forward = recorded
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params_of(number))
    found: dict[str, Any] = {}
    num_steps = 0
    while engine.has_work:
        for event in engine.step():
            if event.completion is not None:
                found[event.request_id] = event.completion.token_ids
        num_steps += 1
        if num_steps == 3 and abort is not None:
            engine.abort(abort)
        engine.pool.check()
    assert_idle(engine)
    return found, [torch.cat(logits)]


@functools.cache
def expected_of(directory: Path, abort: str | None = None, **options: Any) -> Any:
    """What `memory=caching` answers."""
    return run(engine_of(directory, "caching", **options), abort=abort)


def assert_equal(found: tuple[Any, list[torch.Tensor]], expected: tuple[Any, list[torch.Tensor]]) -> None:
    assert found[0] == expected[0]
    assert torch.equal(found[1][0], expected[1][0])


@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_it_answers_as_caching(directory: Path, options: dict[str, Any]) -> None:
    """Every order, mixed lengths in a pass: tokens, and logits bit for bit."""
    expected = expected_of(directory, **options)
    assert len(expected[0]) == len(PROMPTS)
    assert_equal(run(engine_of(directory, **options)), expected)


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_change_no_bit(directory: Path, chunks: dict[str, int]) -> None:
    options = {"order": "low_confidence", "block_length": 4}
    engine = engine_of(directory, **options)
    with_chunks(engine, chunks)
    assert_equal(run(engine), expected_of(directory, **options))


def test_an_abort_leaves_the_others_as_they_are(directory: Path) -> None:
    options = {"order": "low_confidence", "block_length": 4, "max_num_batched_tokens": 200}
    expected, _ = expected_of(directory, abort="2", **options)
    found, _ = run(engine_of(directory, **options), abort="2")
    assert found == expected and "2" not in found


def test_proposals_come_in_parts(llada: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder judges few rows of a chunk at a time when its copies are large."""
    expected = expected_of(llada, order="low_confidence")
    monkeypatch.setattr("idlm.infer.runtime.canvas_rows.PROPOSAL_BYTES", 3 * 24 * 48)
    assert_equal(run(engine_of(llada, order="low_confidence")), expected)


def poison(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fill the range of every tensor with NaN when its lifetime ends; returns the names that ended."""
    execute, ended = CanvasPass.execute, []

    def poisoned(self: CanvasPass, step: Step, op: Any = None) -> None:
        execute(self, step, op)
        for name in step.ends:
            # The largest view of the storage: an alias may be larger than its target.
            template = self.plan.template
            size = max(
                [number for view, number in self.plan.num_bytes.items() if template.root(view) == name]
            )
            self.arena.view(self.plan.offsets[name], (size,), torch.uint8).fill_(255)
            ended.append(name)

    monkeypatch.setattr(CanvasPass, "execute", poisoned)
    return ended


@pytest.mark.parametrize("chunks", [{}, {"logits": 3, "ffn": 3, "experts": 3, "query": 3}], ids=str)
def test_nothing_is_read_after_its_lifetime(
    directory: Path, chunks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"order": "low_confidence", "block_length": 4}
    expected = expected_of(directory, **options)
    ended = poison(monkeypatch)
    engine = engine_of(directory, **options)
    with_chunks(engine, chunks)
    assert_equal(run(engine), expected)
    runner: Any = engine._parts.runner
    template = runner.plan_of(20, 10).template
    results = {"tokens", "confidences"}
    assert set(ended) == template.tensors.keys() - template.aliases.keys() - results


def shortened(template: Any, name: str) -> None:
    """Plant a fault: the lifetime of a tensor ends one op before the last one that reads it."""
    lifetimes = template.lifetimes
    last = max(
        place for place, op in enumerate(template.ops) if name in {template.root(read) for read in op.reads}
    )
    storages = [
        dataclasses.replace(one, last=last - 1) if one.name == name else one for one in lifetimes.storages
    ]
    template.__dict__["lifetimes"] = relate(storages, len(template.ops), template.aliases)
    template.__dict__.pop("_ends", None)


@pytest.mark.parametrize(
    "name", ["q", "k", "heads", "attention_out", "ffn_in", "gate_up", "head_in", "logits"]
)
@pytest.mark.parametrize("chunks", [{}, {"logits": 3, "ffn": 3, "query": 3}], ids=str)
def test_a_lifetime_that_is_too_short_is_caught(
    llada: Path, name: str, chunks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"order": "low_confidence", "block_length": 4}
    expected = expected_of(llada, **options)
    poison(monkeypatch)
    engine = engine_of(llada, **options)
    with_chunks(engine, chunks)
    runner: Any = engine._parts.runner
    shortened(runner.plan_of(20, 10).template, name)
    with pytest.raises((AssertionError, UserError)):
        assert_equal(run(engine), expected)


def test_a_canvas_that_cannot_fit_is_refused_and_the_engine_goes_on(directory: Path) -> None:
    """The message names the op, the bytes and the nearest length, which does fit."""
    engine = engine_of(directory, order="low_confidence")
    runner: Any = engine._parts.runner
    runner.min_rows, runner.capacity = 4, 16_384
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    engine.add_request("short", [1] * 5, params)
    with pytest.raises(UserError, match="IDLM-0466") as caught:
        engine.add_request("long", [1] * 44, params)
    assert "a canvas of 64 rows, 20 of them wanted" in caught.value.message
    assert "16384 bytes" in caught.value.message and " needs " in caught.value.message
    nearest = int(str(caught.value.fix).split()[3])
    assert 25 <= nearest < 64
    runner.check_canvas(nearest, round(nearest * 20 / 64))
    while engine.has_work:
        [engine.step()]
    [found] = engine.generate([[1] * 5], params)
    assert len(found.token_ids) == 20
    assert max(plan.peak_bytes for plan in runner._plans.values()) <= 16_384
    assert engine._parts.runner.arena.num_bytes <= 16_384
    assert_idle(engine)


def test_a_pass_that_the_device_refuses_fails_one_request(llada: Path) -> None:
    """More memory is taken by others than when the engine was built: smaller passes, then one error."""
    engine = engine_of(llada, order="low_confidence", max_num_batched_tokens=200)
    runner: Any = engine._parts.runner
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params_of(number))
    runner.capacity, runner.min_rows = 16_384, 64
    done, failed = [], []
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                assert event.error.code == "IDLM-0448" and "does not fit" in event.error.message
                failed.append(event.request_id)
            elif event.completion is not None:
                done.append(event.request_id)
    assert done and len(done) + len(failed) == len(PROMPTS)
    assert_idle(engine)


def test_there_are_no_pages_of_keys_and_values(llada: Path) -> None:
    engine = engine_of(llada, order="low_confidence", page_size=8)
    runner: Any = engine._parts.runner
    assert not hasattr(runner, "_cache") and runner.arena.num_bytes == 0
    engine.generate([[1, 2]], SamplingParams(max_tokens=4, seed=1))
    assert 0 < runner.arena.num_bytes <= runner.plan_of(6, 4).peak_bytes
    assert engine.settings.graphs == "off"


def test_plans_are_made_once_for_the_rows_of_a_pass(llada: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass of a request wants the most rows; later ones use its plan."""
    engine = engine_of(llada, order="low_confidence")
    runner: Any = engine._parts.runner
    made: list[tuple[int, int]] = []
    original = runner.plan_of

    def counted(num_rows: int, num_wanted: int) -> Plan:
        before = runner._plans.get(num_rows)
        plan: Plan = original(num_rows, num_wanted)
        if plan is not before:
            made.append((num_rows, num_wanted))
        return plan

    runner.plan_of = counted
    engine.generate([[1] * 6], SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
    engine.generate([[2] * 6], SamplingParams(max_tokens=12, seed=2, ignore_eos=True))
    assert made == [(18, 12)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"graphs": "on"}, "graphs=on"),
        ({"deterministic": True}, "deterministic=true"),
        ({"attention": "torch"}, "attention=torch"),
        ({"accelerators": "quest"}, "accelerators=[quest]"),
        ({"tensor_parallel": 2}, "tensor_parallel=2"),
        ({"weights": "fp8", "device": "cpu"}, "weights=fp8"),
    ],
    ids=str,
)
def test_what_has_no_place_in_the_template_is_refused(
    llada: Path, settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idlm.infer.models.fp8.check_device", lambda device: None)
    with pytest.raises(UserError, match="IDLM-0471") as caught:
        engine_of(llada, **settings)
    assert words in caught.value.message


def test_a_decoder_that_keeps_pages_is_refused(tmp_path: Path) -> None:
    from tests.toy import write_toy_checkpoint

    write_toy_checkpoint(tmp_path)
    with pytest.raises(UserError, match="IDLM-0471") as caught:
        build_engine(tmp_path, "ar", memory="mosaic")
    assert "keeps pages" in caught.value.message


class LargestAllocation(TorchDispatchMode):
    """The largest tensor that an op returns in memory that no argument and no arena owns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        made = func(*args, **kwargs)
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in known:
                self.num_bytes = max(self.num_bytes, each.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("kind", ["llada", "llada_moe"])
def test_what_is_allocated_beside_the_workspace_does_not_grow_with_the_length(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces of 32 rows: at twice the length no op of a pass allocates more."""
    for module in (canvas_ops, canvas_attention, expert_steps):
        monkeypatch.setattr(module, "PIECE_ROWS", 32)
    # On a CPU attention repeats rows so that bits stay the same; here memory counts.
    monkeypatch.setattr(canvas_attention, "_cpu_piece", lambda low, high, num_rows: (low, high))
    engine = engine_of(directory_of(kind, tmp_path), order="low_confidence", max_length=1024)
    runner: Any = engine._parts.runner
    largest = {}
    for num_rows in (400, 800):
        inputs = torch.arange(num_rows)
        plan = runner.plan_of(num_rows, 100)
        runner.arena.resize(plan.peak_bytes)
        one = CanvasPass(
            trunk=runner._trunk,
            plan=plan,
            arena=runner.arena,
            token_ids_R=inputs % 40,
            positions_R=inputs,
            rows_X=inputs[:100],
            bounds=(0, num_rows),
        )
        with torch.inference_mode(), LargestAllocation() as found:
            for step in plan.steps(100):
                one.execute(step, (lambda run, step: None) if step.op.name == "choose_tokens" else None)
        largest[num_rows] = found.num_bytes
    assert largest[400] == largest[800] > 0
    bound = 32 * 4 * max(runner.shape.width, runner.shape.num_heads * runner.shape.head_dim)
    assert largest[800] <= 8 * bound < 400 * 32 * 4


def test_bytes_of_libraries_are_constant_and_taken_off_the_workspace() -> None:
    from tests.unit.planning.shapes import LLADA_8B

    assert canvas.library_bytes(LLADA_8B) < 200 << 20
    assert canvas.library_bytes(LLADA_8B) > canvas.PROPOSAL_BYTES


@pytest.mark.parametrize("arena", ["plain", "mapped"])
def test_both_arenas_can_be_asked_for(llada: Path, arena: str) -> None:
    """On a CPU the mapped one falls back to the plain one, and says so."""
    engine = engine_of(llada, order="low_confidence", memory_arena=arena)
    [found] = engine.generate([[1, 2]], SamplingParams(max_tokens=4, seed=1, ignore_eos=True))
    assert len(found.token_ids) == 4
