"""`memory=mosaic` answers as `memory=caching`: whole and in chunks, with poisoned ranges, mixed, aborted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.mosaic.canvas_ops import CanvasPass
from idlm.infer.mosaic.planner import ArenaPlan, plan_template
from idlm.infer.mosaic.template import OpCall, Sizes, relate
from tests.contracts.engines import assert_idle
from tests.contracts.full.canvases import PROMPTS, engine_of, params_of, spread
from tests.margins import assert_same_rows
from tests.prefix_simulation import check_pages
from tests.unit.planning.random_templates import ends_with

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
PARTS = {"logits": 3, "ffn": 3, "query": 3}
THREES = PARTS | {"experts": 3}


def with_chunks(engine: Engine, chunks: dict[str, int]) -> None:
    """Plan every pass with these chunk counts (at most one row a chunk), whatever fits."""
    runner: Any = engine._parts.runner

    def plan_of(num_rows: int, num_wanted: int, group: int = 1, *, takes_best: bool = False) -> ArenaPlan:
        templates = (takes_best and runner._best_templates) or runner._templates
        counts = {
            name: min(count, num_wanted // group if name == "logits" else num_rows)
            for name, count in chunks.items()
            if name in templates.chunk_counts
        }
        sizes = Sizes(length=num_rows, wanted=num_wanted, chunks=counts, group=group)
        return plan_template(templates.template(counts), sizes)

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
        engine.add_request(str(number), prompt, params_of(number, 0))
    found: dict[str, Any] = {}
    num_steps = 0
    while engine.has_work:
        for event in engine.step():
            if event.completion is not None:
                found[event.request_id] = event.completion.token_ids
        num_steps += 1
        if num_steps == 3 and abort is not None:
            engine.abort(abort)
        check_pages(engine.pool)
    assert_idle(engine)
    return found, [torch.cat(logits)]


def mosaic(directory: Path, **options: Any) -> Engine:
    return engine_of(directory, options, memory="mosaic")


@functools.cache
def expected_of(directory: Path, abort: str | None = None, **options: Any) -> Any:
    """What `memory=caching` answers."""
    return run(engine_of(directory, options), abort=abort)


def assert_equal(found: tuple[Any, list[torch.Tensor]], expected: tuple[Any, list[torch.Tensor]]) -> None:
    assert found[0] == expected[0]
    assert_same_rows(found[1][0], expected[1][0])


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(("family", "options"), spread(ORDERS), indirect=["family"], ids=str)
def test_it_answers_as_caching(family: tuple[str, Path], options: dict[str, Any]) -> None:
    """Every order, mixed lengths in a pass: tokens, and logits bit for bit."""
    _, directory = family
    expected = expected_of(directory, **options)
    assert len(expected[0]) == len(PROMPTS)
    assert_equal(run(mosaic(directory, **options)), expected)


@pytest.mark.sweep_but(chunks={"logits": 5})
@pytest.mark.parametrize(
    ("family", "chunks"),
    [
        *(("llada", chunks) for chunks in CHUNKS),
        ("dream", CHUNKS[2]),
        ("llada_moe", CHUNKS[1]),
        ("llada_moe", {"experts": 100}),
    ],
    indirect=["family"],
    ids=str,
)
def test_chunks_change_no_bit(family: tuple[str, Path], chunks: dict[str, int]) -> None:
    _, directory = family
    options = {"order": "low_confidence", "block_length": 4}
    engine = mosaic(directory, **options)
    with_chunks(engine, chunks)
    assert_equal(run(engine), expected_of(directory, **options))


def test_an_abort_leaves_the_others_as_they_are(llada: Path) -> None:
    options = {"order": "low_confidence", "block_length": 4, "max_num_seqs": 8}
    expected, _ = expected_of(llada, abort="2", **options)
    found, _ = run(mosaic(llada, **options), abort="2")
    assert found == expected and "2" not in found


@pytest.mark.sweep
def test_proposals_come_in_parts(llada: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder judges few rows of a chunk at a time when its copies are large."""
    expected = expected_of(llada, order="low_confidence")
    monkeypatch.setattr("idlm.infer.mosaic.canvas_ops.PROPOSAL_BYTES", 3 * 24 * 48)
    assert_equal(run(mosaic(llada, order="low_confidence")), expected)


def poison(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fill the range of every tensor with NaN when its lifetime ends; returns the names that ended."""
    execute, ended = CanvasPass.execute, []

    def poisoned(self: CanvasPass, step: OpCall, op: Any = None) -> None:
        execute(self, step, op)
        template, sizes = self.plan.template, dataclasses.replace(self.plan.sizes, wanted=len(self.rows_X))
        for name in ends_with(template, sizes, step):
            size = self.plan.num_bytes[name]
            self.arena.view(self.plan.offsets[name], (size,), torch.uint8).fill_(255)
            ended.append(name)

    monkeypatch.setattr(CanvasPass, "execute", poisoned)
    return ended


@pytest.mark.sweep_but("llada-chunks1")
@pytest.mark.parametrize(
    ("family", "chunks"), [("llada", {}), ("llada", THREES), ("llada_moe", THREES)], indirect=["family"]
)
def test_nothing_is_read_after_its_lifetime(
    family: tuple[str, Path], chunks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, directory = family
    options = {"order": "low_confidence", "block_length": 4}
    expected = expected_of(directory, **options)
    ended = poison(monkeypatch)
    engine = mosaic(directory, **options)
    with_chunks(engine, chunks)
    assert_equal(run(engine), expected)
    runner: Any = engine._parts.runner
    template = runner.plan_of(20, 10).template
    assert set(ended) == template.tensors.keys()


def shortened(template: Any, name: str) -> None:
    """Plant a fault: the lifetime of a tensor ends one op before the last one that reads it."""
    lifetimes = template.lifetimes
    last = max(index for index, op in enumerate(template.ops) if name in op.reads)
    storages = [
        dataclasses.replace(one, last=last - 1) if one.name == name else one for one in lifetimes.storages
    ]
    template.__dict__["lifetimes"] = relate(storages, len(template.ops))


@pytest.mark.sweep_but(3)
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        *(("heads", {}), ("logits", {}), ("gate_up", PARTS), ("q", {}), ("k", PARTS)),
        *(("attention_out", PARTS), ("ffn_in", {}), ("head_in", PARTS), ("logits", PARTS)),
    ],
)
def test_a_lifetime_that_is_too_short_is_caught(
    llada: Path, name: str, chunks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"order": "low_confidence", "block_length": 4}
    expected = expected_of(llada, **options)
    poison(monkeypatch)
    engine = mosaic(llada, **options)
    with_chunks(engine, chunks)
    runner: Any = engine._parts.runner
    shortened(runner.plan_of(20, 10).template, name)
    with pytest.raises((AssertionError, UserError)):
        assert_equal(run(engine), expected)
