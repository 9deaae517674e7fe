"""What constraints may cost: memory that refused ones leave, and time that others wait for."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Constraint, SamplingParams
from idlm.errors import UserError
from idlm.infer.structured import grammar as budget
from idlm.infer.structured.grammar import GrammarCompiler
from tests.contracts.engines import build_engine
from tests.contracts.structured.test_structured import toy
from tests.errors import refused

__all__ = ["toy"]


class Matcher:
    """Stands for a matcher that has an error."""

    def get_error(self) -> str:
        return "too large"

    def deep_copy(self) -> Matcher:
        return self


@pytest.mark.parametrize("raises", [False, True])
def test_a_refused_constraint_keeps_no_matcher(
    toy: Path, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """However often it comes, and although the refusal is kept."""
    made: list[weakref.ref[Matcher]] = []

    def matcher(self: GrammarCompiler, constraint: Constraint) -> Any:
        found = Matcher()
        made.append(weakref.ref(found))
        if raises:
            raise ValueError(found.get_error())
        return found

    monkeypatch.setattr(GrammarCompiler, "_matcher", matcher)
    compiler = build_engine(toy, "ar")._parts.grammars()
    wrong, errors = Constraint(kind="regex", text="a"), list[UserError]()
    for _ in range(2):
        errors.append(refused("IDLM-0474.*too large", compiler.grammar, wrong))
    assert len(made) == 1 and made[0]() is None
    assert errors[0] is not errors[1]


def test_the_work_of_a_lexer_is_bounded(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested repetitions would take gigabytes; usual ones of the same length do not."""
    words = Constraint(kind="regex", text=r"(\w{1,30}[ ,.]){1,2000}")
    assert build_engine(toy, "ar")._parts.grammars().grammar(words).problem is None
    monkeypatch.setattr(budget, "LEXER_WORK", (1000, 500))
    refused("IDLM-0474.*lexer", build_engine(toy, "ar")._parts.grammars().grammar, words)


def test_slow_masks_have_one_budget_that_fills_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that finds it empty is refused for a time; fast masks cost nothing."""
    monkeypatch.setattr(budget, "SLOW_MASKS", 1.0)
    now = [0.0]
    shared = budget.Budget(lambda: now[0])
    first, second, fast = (budget.Cost(shared) for _ in range(3))
    half = 0.5 / budget.WORK_OF_MASK
    assert first.charge(half) and second.charge(half)
    assert not first.is_refused and not second.is_refused
    assert not fast.charge(budget.SLOW_MASK) and not fast.is_refused
    assert second.charge(0.1) and second.is_refused and not first.is_refused
    now[0] = budget.REFUSED_SECONDS + 1
    assert not second.is_refused
    second.charge(budget.SLOW_SHARE * budget.REFUSED_SECONDS / (2 * budget.WORK_OF_MASK))
    assert not second.is_refused


def test_only_a_grammar_that_is_often_slow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have used the budget up."""
    now = [0.0]
    shared = budget.Budget(lambda: now[0])
    one, other = budget.Cost(shared), budget.Cost(shared)
    other.charge(2 * budget.SLOW_MASKS)
    num = int(budget.OWN_SECONDS / (2 * budget.SLOW_MASK * budget.WORK_OF_MASK))
    for _ in range(3):
        assert all(one.charge(2 * budget.SLOW_MASK) and not one.is_refused for _ in range(num))
        now[0] += budget.REFUSED_SECONDS + 1
    assert any(one.charge(2 * budget.SLOW_MASK) and one.is_refused for _ in range(200))


def test_grammars_that_may_be_slow_run_one_at_a_time_while_the_budget_is_short(toy: Path) -> None:
    engine = build_engine(toy, "ar")
    params = {
        text: SamplingParams(max_tokens=4, constraint=Constraint(kind="regex", text=text))
        for text in ("a+", "b+", "c+")
    }
    begun = {text: engine.begin_grammar(each) for text, each in params.items()}
    costs = [grammar.result().cost for grammar in begun.values() if grammar is not None]
    assert all(map(engine.may_add, begun.values())) and engine.may_add(None)
    costs[0].budget.take(2 * budget.SLOW_MASKS)
    engine.add_request("0", [1], params["a+"])
    costs[2].num_fast = budget.FAST_PASSES
    assert [engine.may_add(each) for each in begun.values()] == [False, False, True]
    while engine.has_work:
        engine.step()
    assert costs[0].num_fast > 0 and all(map(engine.may_add, begun.values()))


def test_a_grammar_that_used_the_budget_up_is_refused_when_it_comes_again(toy: Path) -> None:
    compiler = build_engine(toy, "ar")._parts.grammars()
    slow, other = (Constraint(kind="regex", text=text) for text in ("ab*", "ba*"))
    answers = [compiler.grammar(slow) for _ in range(2)]
    answers[0].charge(2 * budget.SLOW_MASKS)
    assert all(one.problem == budget.TOO_SLOW for one in answers)
    refused("IDLM-0474.*too ambiguous", compiler.grammar, slow)
    assert compiler.grammar(other).problem is None


def test_a_refusal_for_its_time_is_for_a_while(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mask of this one is slow while the budget is empty."""
    compiler = build_engine(toy, "ar")._parts.grammars()
    one = Constraint(kind="regex", text="ab*")
    with monkeypatch.context() as patch:
        patch.setattr(budget.Budget, "take", lambda self, seconds: False)
        patch.setattr(budget.Grammar, "mask_seconds", lambda self: 2 * budget.OWN_SECONDS)
        refused("IDLM-0474", compiler.grammar, one)
    refused("IDLM-0474", compiler.grammar, one)
    compiler._cost(one)._until = 0.0
    assert compiler.grammar(one).problem is None
