"""Drafts that are looked up in a sequence's own tokens: greedy answers are those of AR, a text that repeats
takes fewer passes, and answers depend on the request alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from tests.contracts.engines import (
    CYCLE,
    MAX_STRIDE,
    answers,
    assert_idle,
    build_engine,
    clear_answers,
    greedy,
    prompts_of,
    tokens_per_forward,
    write_foreseeing_toy,
)

UNTRAINED_ID = 46
PROMPTS = prompts_of([21, 7, 14, 1, 28], vocab_size=CYCLE)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It walks a cycle of tokens; behind masks, which are not those of its training, it does not."""
    directory = write_foreseeing_toy(tmp_path_factory.mktemp("toys") / "toy")
    Semantics(mask_token_id=UNTRAINED_ID, stride=MAX_STRIDE).save(directory)
    return directory


def _engine(toy: Path, minimum: int, **options: Any) -> Engine:
    return build_engine(toy, "isd", prompt_lookup_min=minimum, **{"stride": 4, **options})


def _passes(engine: Engine, prompts: Sequence[Sequence[int]], params: Any) -> list[tuple[Any, ...]]:
    found = engine.generate(prompts, params)
    assert_idle(engine)
    return [(one.token_ids, one.tested_by_position, one.accepted_by_position) for one in found]


@pytest.mark.sweep_but("tree")
@pytest.mark.decides
@pytest.mark.parametrize("strategy", [*STRATEGIES.names(), "branch_2"])
def test_greedy_answers_are_those_of_ar_in_fewer_passes(toy: Path, strategy: str) -> None:
    walks = build_engine(toy, "ar").generate(PROMPTS, greedy(max_tokens=2 * CYCLE))
    prompts = [list(one.token_ids) for one in walks]
    expected = clear_answers(build_engine(toy, "ar"), prompts, greedy(max_tokens=40))
    options = {"rejection_strategy": strategy, "graphs": "on", "num_inflight_steps": 3}
    found, plain = (
        _engine(toy, minimum, **options).generate(prompts, greedy(max_tokens=40)) for minimum in (3, 0)
    )
    assert answers(found) == answers(plain) == answers(expected)
    assert tokens_per_forward(found) > tokens_per_forward(plain) + 1


def test_without_a_match_nothing_changes(toy: Path) -> None:
    """A walk of fewer tokens than the cycle has repeats none."""
    prompts, params = [[token] for token in range(CYCLE)], greedy(max_tokens=CYCLE - 2)
    walks = build_engine(toy, "ar").generate(prompts, params)
    prompts = [
        [start]
        for [start], one in zip(prompts, walks, strict=True)
        if len({start, *one.token_ids}) == CYCLE - 1
    ]
    assert len(prompts) > CYCLE // 2
    assert _passes(_engine(toy, 1), prompts, params) == _passes(_engine(toy, 0), prompts, params)


def test_answers_depend_on_the_request_alone(toy: Path) -> None:
    """The same seeds on few lanes, after preemptions, with cached prompts, in graphs and read late; next to
    one of a token per pass."""
    prompts = [*PROMPTS, PROMPTS[0]]
    changes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.2},
        {"temperature": 0.0},
        {"presence_penalty": 0.4, "top_p": 0.9},
        {"logit_bias": {3: 1.5}},
        {"decoder_options": {"stride": 1}},
    ]
    params = [
        SamplingParams(max_tokens=20, seed=seed, **{"temperature": 0.7, **one})
        for seed, one in enumerate(changes)
    ]
    ways: list[dict[str, Any]] = [
        {"max_num_seqs": 3},
        {"max_num_seqs": 1, "prefix_cache": True},
        {"num_pages": 18},
        {"graphs": "on", "num_inflight_steps": 4},
    ]
    first, *others = (_passes(_engine(toy, 2, **way), prompts, params) for way in ways)
    assert others == [first] * len(others)
    assert not any(first[-1][1]), "one token per pass has no drafts"
    assert first != _passes(_engine(toy, 0), prompts, params)


@pytest.mark.parametrize("minimum", [-1, 17])
def test_a_length_that_is_not_compared_is_refused(toy: Path, minimum: int) -> None:
    with pytest.raises(UserError, match=r"prompt_lookup_min=-?\d+ must be in \[0, 16\]"):
        _engine(toy, minimum)
