"""Graphs captured before traffic, on a GPU: answers stay, nothing is captured later, memory comes back."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.runtime.graphs import warm_up
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from tests.contracts.block.blocks import write_block_toy
from tests.contracts.engines import CYCLE, prompts_of

PROMPTS = prompts_of([1 + 5 * k % 60 for k in range(40)], vocab_size=CYCLE)
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 32, "max_length": 128}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _params() -> list[SamplingParams]:
    """Greedy ones, some with filters (which change nothing), of different lengths."""
    return [
        SamplingParams(
            temperature=0, max_tokens=5 + k % 30, top_p=0.9 if k % 5 == 0 else 1.0, ignore_eos=True
        )
        for k in range(len(PROMPTS))
    ]


@pytest.mark.parametrize(
    ("decoder", "options"),
    [("ar", {}), ("isd", {"stride": 4}), ("isd", {"stride": 4, "adaptive": True})],
    ids=str,
)
def test_traffic_after_a_warm_up_captures_nothing_and_answers_alike(
    foreseeing: Path, decoder: str, options: dict[str, Any]
) -> None:
    common = {**OPTIONS, "deterministic": True}
    expected = Engine.from_pretrained(foreseeing, "ar", warmup="off", **common).generate(PROMPTS, _params())
    engine = Engine.from_pretrained(foreseeing, decoder, warmup="full", **common, **options)
    ahead = engine.metrics()
    assert ahead["graphs_captured_ahead"] >= 30
    found = engine.generate(PROMPTS, _params())
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert engine.metrics()["graphs_captured_in_traffic"] == 0
    if options.get("adaptive"):
        times = engine._stride_controller.times if engine._stride_controller is not None else None
        assert times is not None
        assert all(1e-6 < seconds < 1.0 for seconds in times.measured.values())


@pytest.mark.parametrize(
    ("decoder", "options"), [("ar", {}), ("isd", {"stride": 4, "adaptive": True})], ids=str
)
def test_all_kernels_are_compiled_before_the_first_pass(
    foreseeing: Path, decoder: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    compile_shapes, calls, late = warm_up.compile_shapes, list[int](), list[str]()

    def noting(*arguments: Any) -> int:
        calls.append(compile_shapes(*arguments))
        late.clear()
        return calls[-1]

    def heard(*, src: Any, **_: Any) -> None:
        late.append(src.name)

    monkeypatch.setattr(warm_up, "compile_shapes", noting)
    monkeypatch.setattr(knobs.compilation, "listener", heard)
    engine = Engine.from_pretrained(foreseeing, decoder, warmup="full", **OPTIONS, **options)
    assert len(calls) == 1
    engine.generate(PROMPTS, _params())
    assert not late, "kernels are compiled, or loaded from the cache, before the first pass"


def test_eager_passes_between_graphs_leave_answers_alone(
    foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No decoding pass of more than four rows finds a graph, so graphs and eager passes take turns."""
    common = {**OPTIONS, "deterministic": True}
    expected = Engine.from_pretrained(foreseeing, "ar", warmup="off", **common).generate(PROMPTS, _params())
    engine = Engine.from_pretrained(foreseeing, "ar", warmup="full", **common)
    step = engine._parts.step
    assert isinstance(step, StaticStep)
    for shape in [shape for shape in step._graphs if shape.num_sequences > 4]:
        del step._graphs[shape]
    monkeypatch.setattr("idlm.infer.runtime.graphs.cuda_graphs.MAX_EAGER_PASSES", 10**9)
    found = engine.generate(PROMPTS, _params())
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert engine.capture_missed()
    found = engine.generate(PROMPTS, _params())
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_block_diffusion_warms_up_too(tmp_path: Path) -> None:
    directory = write_block_toy(tmp_path / "block", shifted=False)
    common = {**OPTIONS, "max_num_seqs": 8}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = Engine.from_pretrained(directory, "block", warmup="off", **common).generate(
        PROMPTS[:8], params
    )
    engine = Engine.from_pretrained(directory, "block", warmup="full", **common)
    assert engine.metrics()["graphs_captured_ahead"] > 0
    found = engine.generate(PROMPTS[:8], params)
    agree = sum(a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True))
    assert agree >= 6, "only near ties may differ, because rows are padded differently"


def test_focus_captures_nothing_in_traffic_after_a_warm_up(tmp_path: Path) -> None:
    """Every pass finds a captured room; what was padded is captured while no request waits."""
    directory = write_block_toy(tmp_path / "block", shifted=False)
    common = {**OPTIONS, "max_num_seqs": 8, "accelerators": "focus"}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    engine = Engine.from_pretrained(directory, "block", warmup="full", **common)
    ahead = engine.metrics()["graphs_captured_ahead"]
    step = engine._parts.step
    assert isinstance(step, StaticStep)
    assert ahead == len(step._graphs) >= 8
    for _ in range(2):
        assert len(engine.generate(PROMPTS[:8], params)) == 8
        assert engine.metrics()["graphs_captured_in_traffic"] == 0
        while engine.capture_missed():
            pass


def test_a_closed_engine_gives_its_memory_back(foreseeing: Path) -> None:
    def in_use() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    Engine.from_pretrained(foreseeing, "ar", warmup="full", **OPTIONS).close()
    before = in_use()
    Engine.from_pretrained(foreseeing, "ar", warmup="full", **OPTIONS).close()
    assert in_use() <= before + (64 << 20)
