"""Masks of grammars: the same however a state was reached, by questions, lexers and threads."""

from __future__ import annotations

import importlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from idlm.contracts import Completion, Constraint
from idlm.infer.structured import grammar as grammars
from idlm.infer.structured.pass_grammars import Follower, PassGrammars, PassReadback
from tests.contracts.engines import answers, build_engine
from tests.contracts.structured.test_structured import (
    CONSTRAINTS,
    PROMPTS,
    VOCAB,
    _params,
    allowed,
    expected,
    toy,
)

__all__ = ["expected", "toy"]


def test_masks_do_not_depend_on_how_a_state_was_reached(toy: Path, expected: list[Completion]) -> None:
    """Token by token with masks in between, at once, and by a branch that went elsewhere before."""
    compiler = build_engine(toy, "ar")._parts.grammars()
    for completion, constraint in zip(expected, CONSTRAINTS, strict=True):
        if constraint is None:
            continue
        stepped = compiler.grammar(constraint)
        for index, token_id in enumerate(completion.token_ids):
            at_once = compiler.grammar(constraint)
            assert at_once.push(completion.token_ids[:index])
            masked = allowed(stepped)
            assert allowed(at_once) == masked and token_id in masked
            branch = stepped.branch()
            branch.push([token_id])
            assert allowed(stepped) == masked
            assert stepped.push([token_id])


def test_masks_and_questions_differ_in_forced_tokens_only(toy: Path, expected: list[Completion]) -> None:
    """Candidates that fit are found by questions, and tested with masks: a mask may forbid other spellings of
    a text that is certain, and nothing else."""
    compiler, num_forced = build_engine(toy, "ar")._parts.grammars(), 0
    for completion, constraint in zip(expected, CONSTRAINTS, strict=True):
        if constraint is None:
            continue
        grammar = compiler.grammar(constraint)
        for token_id in completion.token_ids:
            masked = allowed(grammar)
            fitting = {one for one in range(VOCAB) if grammar.matcher.validate_tokens([one])}
            assert masked == fitting or (len(masked) == 1 and masked < fitting)
            num_forced += masked != fitting
            assert grammar.push([token_id])
    assert num_forced


@pytest.mark.parametrize(
    "text", ['start: ("ab" | "é")+', "start: /[a-c]{1,9}/ /[0-9]*/", 'start: /[abz]/+ "é" "yes"']
)
def test_a_follower_is_where_a_fresh_grammar_is(toy: Path, text: str) -> None:
    """After random candidates, rejections and strides: the same masks as after the same tokens at once."""
    compiler, rng = build_engine(toy, "ar")._parts.grammars(), random.Random(3)
    num_drafted = 0
    for _ in range(20):
        committed = compiler.grammar(Constraint(kind="grammar", text=text))
        follower = Follower(committed)
        taken: list[int] = []
        drafts: list[int] = []
        for num_drafts in rng.choices(range(4), k=12):
            passed = PassGrammars({0: follower}, [0], [])
            passed.choose_drafts(num_drafts)
            drafts = follower.drafts[:num_drafts]
            bits_AW = passed.bits(torch.device("cpu"))[0]
            fresh = compiler.grammar(Constraint(kind="grammar", text=text))
            assert fresh.push(taken)
            if follower.is_over:
                assert fresh.is_finished
                break
            rows = [_of_words(bits_W) for bits_W in bits_AW[: 1 + len(drafts)].tolist()]
            for depth, row in enumerate(rows):
                after = compiler.grammar(Constraint(kind="grammar", text=text))
                assert after.push(taken + drafts[:depth])
                assert after.is_finished or row == allowed(after)
            num_accepted = 0
            while num_accepted < len(drafts) and drafts[num_accepted] in rows[num_accepted]:
                if rng.random() < 0.3:
                    break
                num_accepted += 1
            emitted = [*drafts[:num_accepted], rng.choice(sorted(rows[num_accepted]))]
            num_drafted += num_accepted
            taken += emitted
            likely = sorted(rows[0])
            candidates = [
                rng.choice(likely) if rng.random() < 0.7 else rng.randrange(VOCAB) for _ in range(9)
            ]
            shown = [len(emitted), *emitted, *[0] * (4 - len(emitted)), *candidates]
            follower.readback = PassReadback(torch.tensor([shown]), 4, 3), 0
    assert num_drafted > 20


def _of_words(bits_W: list[int]) -> set[int]:
    return {one for one in range(VOCAB) if bits_W[one // 32] >> one % 32 & 1}


@pytest.mark.sweep
def test_answers_do_not_depend_on_threads_and_lexers(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = [replace(params, n=3) for params in _params(temperature=1.0, seed=5)]
    wanted = build_engine(toy, "isd", stride=4).generate(PROMPTS, sampled)
    monkeypatch.setattr(grammars, "NUM_PEERS", 3)
    monkeypatch.setattr(grammars, "PEER_SECONDS", 1e9)
    threads = importlib.import_module("llguidance").LLExecutor(4)
    monkeypatch.setattr(grammars, "_executor", lambda: threads)
    engine = build_engine(toy, "isd", stride=4)
    compiler = engine._parts.grammars()
    constraints = [constraint for constraint in CONSTRAINTS if constraint is not None]
    compiled = [compiler.begin(constraint).result() for constraint in constraints]
    compiler._thread.submit(int).result()
    assert [len(grammar.peers) for grammar in compiled] == [3] * len(constraints)
    assert answers(engine.generate(PROMPTS, sampled)) == answers(wanted)
