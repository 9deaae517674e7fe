"""What `memory=mosaic` refuses, allocates and plans, as an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.mosaic import canvas, canvas_ops
from idlm.infer.mosaic.canvas_ops import CanvasPass
from idlm.infer.mosaic.planner import ArenaPlan
from idlm.kernels.experts import steps as expert_steps
from tests.contracts.engines import assert_idle, build_engine
from tests.contracts.full.canvases import PROMPTS, engine_of, params_of, write_family
from tests.errors import refused


def mosaic(directory: Path, **settings: Any) -> Engine:
    return engine_of(directory, {"order": "low_confidence"}, memory="mosaic", **settings)


def test_a_canvas_that_cannot_fit_is_refused_and_the_engine_goes_on(llada: Path) -> None:
    """The message names the op, the bytes and the nearest length, which does fit."""
    engine = mosaic(llada)
    runner: Any = engine._parts.runner
    runner.min_rows, runner.capacity = 4, 16_384
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    engine.add_request("short", [1] * 5, params)
    error = refused("IDLM-0466", engine.add_request, "long", [1] * 44, params)
    assert "a canvas of 64 rows, 20 of them wanted" in error.message
    assert "16384 bytes" in error.message and " needs " in error.message
    nearest = int(str(error.fix).split()[3])
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
    engine = mosaic(llada, max_num_batched_tokens=200)
    runner: Any = engine._parts.runner
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params_of(number, 0))
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
    engine = mosaic(llada, page_size=8)
    runner: Any = engine._parts.runner
    assert not hasattr(runner, "_cache") and runner.arena.num_bytes == 0
    engine.generate([[1, 2]], SamplingParams(max_tokens=4, seed=1))
    assert 0 < runner.arena.num_bytes <= runner.plan_of(6, 4).peak_bytes
    assert engine.settings.graphs == "off"


def test_plans_are_made_once_for_the_rows_of_a_pass(llada: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass of a request wants the most rows; later ones use its plan."""
    engine = mosaic(llada)
    runner: Any = engine._parts.runner
    made: list[tuple[int, int]] = []
    original = runner.plan_of

    def counted(num_rows: int, num_wanted: int, group: int, *, takes_best: bool) -> ArenaPlan:
        before = runner._plans.get((num_rows, takes_best))
        plan: ArenaPlan = original(num_rows, num_wanted, group, takes_best=takes_best)
        if plan is not before:
            made.append((num_rows, num_wanted))
        return plan

    runner.plan_of = counted
    engine.generate([[1] * 6], SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
    engine.generate([[2] * 6], SamplingParams(max_tokens=12, seed=2, ignore_eos=True))
    assert made == [(18, 12)]


@pytest.mark.sweep_but(words="deterministic=true")
@pytest.mark.sweep_but(words="attention=torch")
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
    error = refused("IDLM-0471", mosaic, llada, **settings)
    assert words in error.message


def test_a_decoder_that_keeps_pages_is_refused(tmp_path: Path) -> None:
    from tests.toy import write_toy_checkpoint

    write_toy_checkpoint(tmp_path)
    error = refused("IDLM-0471", build_engine, tmp_path, "ar", memory="mosaic")
    assert "stores pages" in error.message


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


@pytest.mark.sweep_but("llada")
@pytest.mark.parametrize("kind", ["llada", "llada_moe"])
def test_what_is_allocated_beside_the_workspace_does_not_grow_with_the_length(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces of 32 rows: at twice the length no op of a pass allocates more."""
    for module in (canvas_ops, canvas, expert_steps):
        monkeypatch.setattr(module, "PIECE_ROWS", 32)
    # On a CPU attention repeats rows so that bits stay the same; here memory counts.
    monkeypatch.setattr(canvas, "_cpu_piece", lambda low, high, num_rows: (low, high))
    engine = mosaic(write_family(kind, tmp_path), max_length=1024)
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
