"""Accelerators through the registries: every decoder with every stack, at full budget and sparse; what they
keep against slow references, pass by pass; state that ends with its block."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.contracts import Completion
from idlm.errors import UserError
from idlm.infer.accelerators import prefix
from idlm.infer.decoders.base import DECODERS
from idlm.infer.sparse.accelerator import ACCELERATORS, KVPass, PassView
from tests.accelerator_reference import SlowLists, share_of, top
from tests.block_reference import Sampling
from tests.contracts.accelerators.cases import (
    KINDS,
    LOSSY,
    NUM_LAYERS,
    PARAMS,
    PROMPTS,
    RULES,
    SETTINGS,
    SIDES,
    STACKS,
    STRATEGY,
    THIN,
    TOGETHER,
    Trace,
    engine_of,
    exactly,
    rules_of,
    thinly,
    tokens,
    watch_layers,
    watch_lists,
)
from tests.contracts.engines import assert_idle, build_engine, watch_passes
from tests.errors import refused
from tests.ranks import group_engine, group_of_threads


@pytest.fixture(scope="module")
def plain_answers(toys: dict[str, Path]) -> Any:
    """Tokens without an accelerator, which the tests of all accelerators share."""
    known: dict[str, Any] = {}

    def answers(kind: str, prompts: Sequence[int], params: Sequence[int], decoding: dict[str, Any]) -> Any:
        key = repr((kind, prompts, params, decoding))
        if key not in known:
            engine = engine_of(toys, kind, **decoding)
            known[key] = tokens(engine.generate([PROMPTS[i] for i in prompts], [PARAMS[i] for i in params]))
        return known[key]

    return answers


@pytest.mark.sweep_but("ar-quest", "isd-focus")
@pytest.mark.sweep_but(decoder="ar", stack=("focus", "quest"))
@pytest.mark.parametrize("stack", STACKS, ids="+".join)
@pytest.mark.parametrize("decoder", [name for name in DECODERS.names() if name != "full"])
def test_at_full_budget_every_stack_is_exact_or_refused(
    toys: dict[str, Path], decoder: str, stack: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = PROMPTS[:4], PARAMS[:4]
    kind = "block" if decoder == "block" else "causal"
    plain = build_engine(toys[kind], decoder, **TOGETHER)
    needs = [name for name in stack if ACCELERATORS.get(name).needs_blocks]
    if needs and plain.decoder.kv_policy.num_lookahead_tokens:
        error = refused("IDLM-0460", build_engine, toys[kind], decoder, accelerators=exactly(stack))
        assert all(f"{name}: decoder={decoder} has no blocks" in str(error) for name in needs)
        return
    engine = build_engine(toys[kind], decoder, accelerators=exactly(stack), **TOGETHER)
    expected_passes, passes = watch_passes(plain, monkeypatch), watch_passes(engine, monkeypatch)
    expected, found = plain.generate(prompts, params), engine.generate(prompts, params)
    assert tokens(found) == tokens(expected)
    for (_, mine), (_, theirs) in zip(passes, expected_passes, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)
    is_lossy = any(ACCELERATORS.get(name).exactness == "lossy" for name in stack)
    assert {completion.exactness for completion in found} == {"lossy" if is_lossy else "exact"}
    assert_idle(engine)


DYNAMIC = {"strategy": "low_confidence_dynamic", "threshold": 0.5, "steps": None}
EDITS = DYNAMIC | {"edit_threshold": 0.3, "threshold": 0.3}
PARTS = {"sub_block_size": 4, "dual_cache": True}


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize(
    ("name", "decoding"),
    [
        *(("focus", DYNAMIC), ("quest", DYNAMIC), ("mage", PARTS), ("sparsed", PARTS), ("focus", PARTS)),
        *(
            ("mage", EDITS),
            ("focus", EDITS),
            ("quest", {"kv_cache": "fp8"}),
            ("sparsed", {"kv_cache": "fp8"}),
        ),
    ],
    ids=str,
)
def test_full_budget_is_exact_however_blocks_are_decoded(
    toys: dict[str, Path], plain_answers: Any, name: str, decoding: dict[str, Any]
) -> None:
    prompts, params = [PROMPTS[0], PROMPTS[2], PROMPTS[3]], PARAMS[:3]
    engine = None
    with contextlib.suppress(UserError):
        engine = engine_of(toys, accelerators=exactly((name,)), **decoding)
    if engine is None:
        refused(f"(?s)IDLM-0460.*{name}: ", engine_of, toys, accelerators=exactly((name,)), **decoding)
        return
    found = engine.generate(prompts, params)
    assert tokens(found) == plain_answers("block", (0, 2, 3), (0, 1, 2), decoding)


@pytest.fixture(scope="module")
def slow_answers(toys: dict[str, Path]) -> Any:
    known: dict[tuple[str, str], list[tuple[list[int], Trace, SlowLists]]] = {}

    def answers(kind: str, name: str) -> list[tuple[list[int], Trace, SlowLists]]:
        if (kind, name) not in known:
            slow = SlowLists(toys[kind], rules_of(kind), RULES[name]())
            known[kind, name] = [
                (slow.answer(prompt, Sampling(seed=seed, **setting))[0], slow.trace, slow)
                for seed, (prompt, setting) in enumerate(zip(PROMPTS, SETTINGS, strict=True))
            ]
        return known[kind, name]

    return answers


@pytest.mark.sweep_but("mage-shifted")
@pytest.mark.decides
@pytest.mark.parametrize("kind", ["block", "shifted"])
@pytest.mark.parametrize("name", sorted(RULES))
def test_every_pass_sees_what_the_equations_say(
    toys: dict[str, Path], slow_answers: Any, plain_answers: Any, kind: str, name: str
) -> None:
    engine = engine_of(toys, kind, accelerators={name: THIN[name]}, max_num_seqs=len(PROMPTS))
    traces = watch_lists(engine)
    found = engine.generate(PROMPTS, PARAMS)
    expected = slow_answers(kind, name)
    assert [list(completion.token_ids) for completion in found] == [ids for ids, _, _ in expected]
    for lane, (_, trace, _) in enumerate(expected):
        assert traces[lane] == trace
    every = range(len(PROMPTS))
    assert plain_answers(kind, every, every, {}) != tokens(found), (
        "the budget must matter, or nothing was tested"
    )


@pytest.mark.parametrize("name", ["mage", "sparsed"])
def test_a_pass_that_copies_the_rows_of_blocks_ranks_the_same(
    toys: dict[str, Path], slow_answers: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "STORED_ROWS", 0)
    engine = engine_of(toys, "block", accelerators={name: THIN[name]}, max_num_seqs=len(PROMPTS))
    traces = watch_lists(engine)
    engine.generate(PROMPTS, PARAMS)
    for lane, (_, trace, _) in enumerate(slow_answers("block", name)):
        assert traces[lane] == trace


@pytest.fixture(scope="module")
def thin_answers(toys: dict[str, Path]) -> Any:
    """Tokens of each stack in passes of a few sequences, which two tests compare with others."""

    @functools.cache
    def answers(stack: tuple[str, ...]) -> Any:
        engine = engine_of(toys, accelerators=thinly(stack), max_num_seqs=2)
        return tokens(engine.generate(PROMPTS, PARAMS))

    return answers


ABORTS = {3: 0, 7: 2, 20: 4}
"""Number of the request aborted, by number of steps."""
WAYS: list[dict[str, Any]] = [
    {"num_pages": 30, "max_num_seqs": 4, "max_num_batched_tokens": 16},
    {
        "graphs": "on",
        "num_inflight_steps": 3,
        "max_num_seqs": 5,
        "fused_commit": False,
        "prefix_cache": False,
    },
]


def _fail(schedule: object) -> None:
    raise ValueError("lost")


@pytest.mark.sweep_but("mage")
@pytest.mark.parametrize("stack", [*STACKS[1:5], ("focus", "mage")], ids="+".join)
def test_no_stack_depends_on_the_batch_or_on_earlier_sequences(
    toys: dict[str, Path], thin_answers: Any, stack: tuple[str, ...]
) -> None:
    """Prompts, clean blocks and blocks at any step share passes; requests are aborted, preempted and fail."""
    expected, way = thin_answers(stack), WAYS[1 - STACKS.index(stack) % 2]
    engine = engine_of(toys, accelerators=thinly(stack), **way)
    done: dict[str, Completion] = {}
    for round_ in range(2):
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(f"{round_}-{number}", prompt, params)
        for step in itertools.count():
            if not engine.has_work:
                break
            if step in ABORTS:
                engine.abort(f"{round_}-{ABORTS[step] + round_}")
            if round_ and step == 4:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(engine._worker, "launch", _fail)
                    with pytest.raises(ValueError, match="lost"):
                        engine.step()
            done.update({e.request_id: e.completion for e in engine.step() if e.completion is not None})
        assert_idle(engine)
    assert len(done) >= len(PROMPTS)
    assert (engine.scheduler.num_preemptions > 0) == ("num_pages" in way)
    for request_id, completion in done.items():
        assert completion.token_ids == expected[int(request_id.split("-")[1])]


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in LOSSY if KINDS[name].shards][:2])
def test_ranks_list_slots_for_their_own_heads(toys: dict[str, Path], name: str) -> None:
    settings: dict[str, Any] = {**TOGETHER, **STRATEGY, "accelerators": thinly((name,)), "num_pages": 30}
    expected = tokens(engine_of(toys, **settings).generate(PROMPTS, PARAMS))
    with group_of_threads(2) as group:
        engine = group_engine(group, toys["block"], "block", **settings)
        assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
        engine.close()


@pytest.mark.parametrize("rows", SIDES["rows"])
def test_both_sides_at_once(toys: dict[str, Path], rows: str) -> None:
    """Rows are dropped, but none in the pass that ranks, whose sets hold for what is left of the block."""
    engine = engine_of(toys, accelerators=thinly((rows, "mage")))
    sets, num_dropped = {}, 0

    def note(view: PassView, made: KVPass, layer: int, q_RNH: Tensor, slots_BKC: Tensor | None) -> None:
        nonlocal num_dropped
        for b in view.is_working_B.nonzero()[:, 0].tolist():
            start, step = int(view.active.starts_B[b]), int(view.active.num_passes_B[b])
            key = int(view.plan.lanes_B[b]), start, layer
            dropped = int((view.rows_BW[b] < 0).sum())
            if layer >= 2 and step == 0:
                assert not dropped
                assert not made.is_sparse_B[b]
                rows_W, size = view.rows_BW[b], view.page_size
                q_WNH = torch.where((rows_W >= 0)[:, None, None], q_RNH[rows_W.clamp(min=0)], 0).double()
                slots_P = torch.arange(start)
                physical_P = view.block_table_BP[b, slots_P // size] * size + slots_P % size
                k_PKH = view.cache.layer(layer)[0][physical_P].double()
                sets[key] = [top(share_of(q_WNH, k_PKH, head), THIN["mage"]["k"]) for head in range(2)]
            elif layer >= 2:
                assert slots_BKC is not None
                assert [sorted(slots[slots >= 0].tolist()) for slots in slots_BKC[b]] == sets[key]
                num_dropped += dropped

    watch_layers(engine, note)
    engine.generate(PROMPTS, PARAMS)
    assert num_dropped > 100


def test_a_lane_used_again_has_no_state(toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of one length on one lane, the first aborted in its block: its sets must not be used."""

    def first_lists(invalidate: bool) -> list[list[int]] | None:
        engine = engine_of(toys, accelerators={"mage": THIN["mage"]}, max_num_seqs=1)
        if not invalidate:
            monkeypatch.setattr(engine._parts.stack.kv, "reset", lambda lanes: None)
        engine.add_request("first", PROMPTS[0], PARAMS[0])
        for _ in range(3):
            engine.step()
        engine.abort("first")
        traces = watch_lists(engine)
        engine.generate([PROMPTS[3][:16]], PARAMS[:1])
        return traces[0][2, 0, NUM_LAYERS - 1]

    assert first_lists(True) is None
    assert first_lists(False) is not None


def test_bounds_are_those_of_stored_keys(toys: dict[str, Path], slow_answers: Any) -> None:
    engine = engine_of(toys, accelerators={"quest": THIN["quest"]}, max_num_seqs=1, prefix_cache=False)
    prompt, params = PROMPTS[4], PARAMS[4]
    engine.generate([prompt], params)
    slow = SlowLists(toys["block"], rules_of("block"), RULES["quest"]())
    slow.answer(prompt, Sampling(seed=4, **SETTINGS[4]))
    num_stored = int(engine.table.num_computed_Z[0])
    assert num_stored >= 48
    quest, cache = engine._parts.stack.kv, engine._parts.runner._cache
    pages = engine.pool.block_table_ZP[0, : num_stored // 4]
    for layer in range(NUM_LAYERS):
        keys_PFKH = cache.keys[layer].view(-1, 4, *cache.keys.shape[2:])[pages]
        expected_PFKH = slow.kv[layer][0][:num_stored].view_as(keys_PFKH)
        torch.testing.assert_close(keys_PFKH, expected_PFKH, atol=1e-4, rtol=1e-4)
        if layer >= 2:
            bounds = quest.bounds[layer - 2]  # type: ignore[union-attr]
            assert torch.equal(bounds.min_CKH[pages], keys_PFKH.amin(1))
            assert torch.equal(bounds.largest_CKH[pages], keys_PFKH.amax(1))
