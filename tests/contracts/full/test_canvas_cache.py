"""The caches of decoder `full` answer as the slow decoder does, which keeps keys and values in lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import Completion, SamplingParams
from idlm.infer.decoders.full import FullDecoder
from idlm.infer.decoders.full_config import FullConfig
from idlm.infer.decoders.full_rows import CACHES
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from tests.contracts.engines import assert_idle, drain
from tests.contracts.full.canvases import (
    FAMILIES,
    LENGTHS,
    MASK_ID,
    PROMPTS,
    engine_of,
    expected_of,
    params_of,
    slow_canvas,
    spread,
    watched,
)
from tests.errors import refused

CASES: list[dict[str, Any]] = [
    {"order": "low_confidence", "block_length": 4, "cache": "prefix"},
    {"order": "low_confidence", "cache": "prefix", "steps": 4},
    {"order": "low_confidence", "block_length": 4, "cache": "dual"},
    {"order": "low_confidence", "block_length": 4, "cache": "dual", "threshold": 0.3},
    {"order": "low_confidence", "block_length": 4, "cache": "dual", "factor": 1.0},
    {"order": "maskgit_plus", "block_length": 4, "cache": "dual", "order_temperature": 0.5},
    {"order": "random", "block_length": 4, "cache": "dual"},
    {"order": "entropy", "cache": "dual", "steps": 4},
    {"order": "low_confidence", "cache": "delayed", "cache_refresh": 3},
    {"order": "low_confidence", "block_length": 4, "cache": "delayed"},
    {"order": "topk_margin", "cache": "delayed", "steps": 4},
    {"order": "origin", "cache": "delayed", "cache_refresh": 2, "steps": 4},
]
STATIC: list[dict[str, Any]] = [
    {"graphs": "off"},
    {"graphs": "on"},
    {"graphs": "on", "num_inflight_steps": 3},
]


def found_by(engine: Engine, cases: list[tuple[SamplingParams, Any, Any]]) -> list[Completion]:
    """The answers of one batch."""
    return engine.generate(PROMPTS[: len(cases)], [case[0] for case in cases])


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(("family", "options"), spread(CASES), indirect=["family"], ids=str)
def test_it_equals_the_slow_decoder(family: tuple[str, Path], options: dict[str, Any]) -> None:
    """In mixed batches, of which the budget feeds a part at a time, every second case in static shapes, the
    others in dynamic ones and when the host is some passes behind; and alone."""
    kind, directory = family
    slow = slow_canvas(kind, options)
    cases = [expected_of(slow, number) for number in range(len(PROMPTS))]
    for settings in STATIC[CASES.index(options) % 2 :: 2]:
        engine = engine_of(directory, options, **settings)
        for (_, tokens, num_passes), found in zip(cases, found_by(engine, cases), strict=True):
            assert found.token_ids == tokens, f"{settings=}"
            assert found.exactness == "lossy"
            if settings != STATIC[2]:
                assert found.num_forwards == num_passes
        assert_idle(engine)
    params, tokens, _ = cases[2]
    [alone] = engine.generate([PROMPTS[2]], params)
    assert alone.token_ids == tokens


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("family", "cache"),
    [("llada", "prefix"), ("dream", "dual"), ("llada_moe", "delayed")],
    indirect=["family"],
)
def test_an_answer_survives_the_loss_of_its_pages(family: tuple[str, Path], cache: str) -> None:
    """A failed pass, or a preemption: the pages then hold the KV of others, and the answer is the same."""
    kind, directory = family
    options = {"order": "low_confidence", "block_length": 4, "cache": cache}
    cases = [expected_of(slow_canvas(kind, options), number) for number in range(3)]
    for lose in (_preempt, _requeue):
        for num_steps in (1, 6):
            engine = engine_of(directory, options)
            for number, (params, _, _) in enumerate(cases):
                engine.add_request(str(number), PROMPTS[number], params)
            events = [event for _ in range(num_steps) for event in engine.step()]
            lose(engine)
            found = {event.request_id: event.completion for event in events if event.completion is not None}
            found |= drain(engine)
            for number, (_, tokens, _) in enumerate(cases):
                assert found[str(number)].token_ids == tokens, f"{num_steps=} {lose=}"
            assert_idle(engine)


def _preempt(engine: Engine) -> None:
    """The youngest sequence loses its pages as in a shortage, and something else is written there."""
    victim, scheduler = engine.scheduler.running[-1], engine.scheduler
    assert victim.lane is not None
    engine.pool.release(victim.lane)
    victim.num_computed = victim.num_passes = 0
    _spoil(engine)
    # Those that keep their pages lose what is in them too: all begin anew.
    for request in scheduler.running[:-1]:
        assert request.lane is not None
        engine.pool.release(request.lane)
        request.num_computed = request.num_passes = 0


def _requeue(engine: Engine) -> None:
    engine.scheduler.requeue_all()
    _spoil(engine)


def _spoil(engine: Engine) -> None:
    cache: Any = engine._parts.runner._cache
    cache.keys.normal_()
    cache.values.normal_()


@pytest.mark.sweep_but("llada-off")
@pytest.mark.parametrize("static", ["off", "on"])
def test_rows_that_are_fed(family: tuple[str, Path], static: str) -> None:
    """Prompt 12, answer 16 in blocks of 4, one token a pass; a shifted block feeds the position before it."""
    kind, directory = family
    shift, canvas, options = int(kind == "dream"), 28, {"order": "low_confidence", "block_length": 4}
    assert len(PROMPTS[2]) + LENGTHS[2] == canvas
    rows: dict[str, list[int]] = {}
    for cache in CACHES.names():
        engine = engine_of(directory, {**options, "cache": cache}, graphs=static)
        passes = watched(engine)
        engine.generate([PROMPTS[2]], params_of(2, 1))
        rows[cache] = [int(plan.cu_rows_B1[-1]) for plan, _ in passes]
    blocks = range(4)
    assert rows["dual"][: 1 + 3] == [canvas, *[4 + shift] * 3] or shift
    assert all(
        4 <= num <= 4 + shift for block in blocks for num in rows["dual"][4 * block + 1 : 4 * block + 4]
    )
    for block in blocks:
        reused = rows["prefix"][4 * block + 1 : 4 * block + 4]
        assert rows["prefix"][4 * block] == canvas
        assert all(canvas - 12 - 4 * block <= num <= canvas - 12 - 4 * block + shift for num in reused)
        # Three, two, one mask are left, and the token that the last pass decided, and later blocks.
        later = canvas - 12 - 4 * block - 4
        for num, left in zip(rows["delayed"][4 * block + 1 : 4 * block + 4], (3, 2, 1), strict=True):
            assert later + left + 1 <= num <= later + left + 1 + shift * left


def test_each_layer_has_keys_and_values_of_its_own(llada: Path) -> None:
    for cache in (None, "dual"):
        engine = engine_of(llada, {"order": "low_confidence", "cache": cache})
        kept: Any = engine._parts.runner._cache
        assert len(kept.keys) == (1 if cache is None else engine._parts.model.spec.num_layers)
        assert engine.pool.cache is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache": "dul"}, "did you mean 'dual'"),
        ({"cache_refresh": 4}, "needs decoder.cache of"),
        ({"cache": "dual", "cache_refresh": 4}, "needs decoder.cache of"),
        ({"cache": "delayed", "cache_refresh": 0}, "below 1"),
        ({"factor": 0.0}, "above 0"),
        ({"factor": 1.0, "threshold": 0.5}, "exclude each other"),
        ({"factor": 1.0, "order": "entropy"}, "no probabilities"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(llada: Path, options: dict[str, Any], words: str) -> None:
    refused(words, engine_of, llada, {"order": "low_confidence", **options})


def test_a_request_sets_its_own_factor(llada: Path) -> None:
    """A factor of two decides all at once where the model is sure of nothing less."""
    engine = engine_of(llada, {"order": "low_confidence", "block_length": 4, "cache": "dual"})
    params = [
        SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, decoder_options=options)
        for options in ({"factor": 100.0}, {"factor": 1e-9})
    ]
    found = engine.generate([PROMPTS[1]] * 2, params)
    assert [completion.num_forwards for completion in found] == [2, 8]


def test_stale_keys_and_values_are_what_the_reference_reads() -> None:
    """The reference itself: a pass that feeds everything ignores what was kept, another one does not."""
    from tests.numerics import full_reference

    for kind in FAMILIES:
        tensors, ids = full_reference.random_tensors(kind), PROMPTS[2]
        whole_LV = full_reference.logits(kind, tensors, ids)
        kv: full_reference.KV = []
        full_reference.logits(kind, tensors, [7, *ids[1:]], kv=kv)
        part_LV = full_reference.logits(kind, tensors, ids, fed=[3, 4], kv=kv)
        assert part_LV[:3].isnan().all() and not torch.allclose(part_LV[3:5], whole_LV[3:5])
        torch.testing.assert_close(full_reference.logits(kind, tensors, ids, kv=kv), whole_LV)


def test_rows_that_the_host_plans_with() -> None:
    """The whole canvas in a refresh, or where results are still to come; else no more than can be fed."""
    semantics = Semantics(causality="full", mask_token_id=MASK_ID, logit_shift=True)
    rows = {
        name: FullDecoder(FullConfig(cache=name, block_length=size), semantics).kv_policy.num_decoding_rows
        for name, size in ((None, 8), ("prefix", 8), ("dual", 8), ("delayed", 8))
    }
    found = {
        name: [each(100, num_known=60, num_passes=number) for number in (0, 1, 8, None)]
        for name, each in rows.items()
    }
    assert found == {
        None: [100] * 4,
        "prefix": [100, 41, 41, 100],
        "dual": [100, 9, 9, 100],
        "delayed": [100, 41, 100, 100],
    }
    # The last block, and an answer that is one block.
    assert rows["dual"](100, num_known=95, num_passes=3) == 6
    whole = FullDecoder(FullConfig(cache="dual"), semantics).kv_policy
    assert whole.num_decoding_rows(100, num_known=60, num_passes=3) == 41
