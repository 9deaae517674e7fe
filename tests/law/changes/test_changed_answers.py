"""Answers with penalties, biases and bans: greedy ISD as AR, lengths and runs to the token, block diffusion
as its slow decoder, and neighbours, preemption, grammars and log-probabilities that do not notice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Constraint, SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.rejection import STRATEGIES
from tests.adapters import write_adapter
from tests.block_reference import NEVER, Sampling, SlowBlocks
from tests.contracts.block.blocks import PROMPTS, SETTINGS, rules_of, write_block_toy
from tests.contracts.engines import (
    CYCLE,
    MASK_ID,
    acceptance_of,
    answers,
    build_engine,
    clear_answers,
    greedy,
    prompts_of,
)
from tests.errors import refused
from tests.kernels.references.logit_changes import Settings, changed_reference
from tests.law.structured import LANGUAGES, REGEX_TOY, write_structured_toy
from tests.law.structured import build_engine as build_structured

PENALTIES: dict[str, Any] = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
CHANGED: tuple[dict[str, Any], ...] = (
    PENALTIES,
    {"logit_bias": {3: 4.0, 5: -100}, "repetition_penalty": 0.8},
    {"no_repeat_ngram_size": 3, **PENALTIES},
    {},
)
LENGTHS = [1, 7, 30, 5, 17, 3, 9, 12]


def greedy_params(**settings: Any) -> list[SamplingParams]:
    """Of each of the prompts of `LENGTHS`."""
    return [greedy(max_tokens=24, **settings, **CHANGED[number % 4]) for number in range(len(LENGTHS))]


@pytest.mark.sweep_but(strategy="tree")
@pytest.mark.parametrize(
    ("strategy", "is_adapter"),
    [*zip((*STRATEGIES.names(), "branch_2"), itertools.cycle((False, True)), strict=False)],
)
def test_greedy_answers_are_those_of_ar(
    foreseeing: Path, tmp_path: Path, strategy: str, *, is_adapter: bool
) -> None:
    """Few lanes and pages: requests with and without changes follow one another, and are preempted."""
    prompts = prompts_of(LENGTHS, vocab_size=CYCLE)
    expected = clear_answers(build_engine(foreseeing, "ar"), prompts, greedy_params())
    checkpoint = foreseeing
    if is_adapter:
        checkpoint = write_adapter(tmp_path, foreseeing, mask_token_id=MASK_ID, stride=4, size=0.12)
    options = {"stride": 4, "rejection_strategy": strategy, "max_num_seqs": 3, "num_pages": 20}
    engine = build_engine(checkpoint, "isd", **options)
    found = engine.generate(prompts, greedy_params())
    assert answers(found) == answers(expected)
    assert engine.scheduler.num_preemptions > 0 and 0.1 < acceptance_of(found) < 0.95


def test_the_bans_hold(foreseeing: Path) -> None:
    """A run of three tokens comes once, a bias of -100 is never drawn, one of 100 always."""
    prompts = prompts_of(LENGTHS, vocab_size=CYCLE)
    plain = build_engine(foreseeing, "isd", stride=4)
    for prompt, done in zip(prompts, plain.generate(prompts, greedy(max_tokens=30)), strict=True):
        tokens = [*prompt, *done.token_ids]
        assert len(set(_runs(tokens, 3))) < len(tokens) - 2, "without a ban runs come again"
    for prompt, done in zip(
        prompts, plain.generate(prompts, greedy(max_tokens=30, no_repeat_ngram_size=3)), strict=True
    ):
        runs = list(_runs([*prompt, *done.token_ids], 3))
        in_answer = runs[max(0, len(prompt) - 2) :]
        assert all(run not in runs[:index] for index, run in enumerate(runs) if run in in_answer)
    drawn = SamplingParams(max_tokens=30, seed=1, logit_bias={4: 100.0}, ignore_eos=True)
    assert set(plain.generate([prompts[1]], drawn)[0].token_ids) == {4}


def _runs(tokens: list[int], size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1))


@pytest.mark.parametrize("decoder", ["ar", "isd"])
def test_no_stop_token_comes_before_the_shortest_length(foreseeing: Path, decoder: str) -> None:
    """A stop token that would be drawn at once comes right after as many tokens as `min_tokens`."""
    engine = build_engine(foreseeing, decoder, **({"stride": 4} if decoder == "isd" else {}))
    shortest = [0, 1, 2, 3, 4, 5, 6, 11]
    stopping: dict[str, Any] = {"stop_token_ids": (7,), "logit_bias": {7: 50.0}, "max_tokens": 20}
    params = [greedy(min_tokens=number, **stopping) for number in shortest]
    found = engine.generate(prompts_of(LENGTHS, vocab_size=CYCLE), params)
    assert [len(done.token_ids) - 1 for done in found] == shortest
    assert {(done.finish_reason, done.token_ids[-1]) for done in found} == {("stop", 7)}


@pytest.mark.parametrize("decoder", ["ar", "isd"])
def test_changes_leave_neighbours_and_log_probabilities(foreseeing: Path, decoder: str) -> None:
    """Log-probabilities are the model's own; a request without changes answers as it does alone."""
    engine = build_engine(foreseeing, decoder, **({"stride": 4} if decoder == "isd" else {}))
    prompts = prompts_of(LENGTHS, vocab_size=CYCLE)
    changed = replace(greedy_params()[0], logprobs=2)
    [scored, *_], [plain, *_] = (
        engine.generate(prompts, [one, *greedy_params()[1:]]) for one in (changed, greedy_params()[0])
    )
    assert scored.token_ids == plain.token_ids and scored.logprobs is not None
    given = SamplingParams(prompt_logprobs=0, max_tokens=1)
    whole = engine.generate([[*prompts[0], *scored.token_ids]], given)[0].prompt_logprobs
    assert whole is not None
    own = [one.logprob for one in whole[len(prompts[0]) :] if one is not None]
    assert [one.logprob for one in scored.logprobs] == pytest.approx(own, abs=1e-4)
    together = engine.generate(prompts, greedy_params())
    alone = engine.generate([prompts[3]], [greedy_params()[3]])
    assert answers([together[3]]) == answers(alone)


def test_grammars_and_changes_go_together(tmp_path: Path) -> None:
    """Biases choose among the tokens that a grammar allows, whatever else they favour."""
    directory = write_structured_toy(tmp_path)
    for decoder, options in (("ar", {}), ("isd", {"stride": 4})):
        engine = build_structured(directory, decoder, num_lanes=4, **options)
        biases = {0: 100.0, 4: 60.0, 8: -20.0}
        params = SamplingParams(max_tokens=6, constraint=REGEX_TOY, logit_bias=biases, temperature=0)
        [favoured] = engine.generate([[1, 4]], [params])
        assert favoured.text == "1,1,1"
        [other] = engine.generate([[1, 4]], [replace(params, frequency_penalty=2, logit_bias={8: -20.0})])
        assert other.text != favoured.text


@pytest.mark.parametrize(("decoder", "options"), [("ar", {}), ("isd", {"stride": 3})])
def test_an_answer_ends_where_its_grammar_does(tmp_path: Path, decoder: str, options: dict[str, Any]) -> None:
    """`min_tokens` is longer than most texts that match; no stop token comes where another may follow."""
    engine = build_structured(write_structured_toy(tmp_path), decoder, **options)
    for constraint, texts in LANGUAGES.items():
        params = SamplingParams(
            max_tokens=6, min_tokens=6, constraint=constraint, n=150, seed=3, logit_bias={8: 9.0}
        )
        found = engine.generate([[1, 4]], params)
        assert all(done.text in texts or done.finish_reason == "length" for done in found)
        assert min(len(done.token_ids) for done in found) >= 3


class _SlowChanged(SlowBlocks):
    """The slow decoder of blocks, whose rows change by all tokens that are decided but their own."""

    changes: Settings

    def _rows_of(self, before: list[int], work: list[int | None]) -> dict[int, list[float]]:
        rows = super()._rows_of(before, work)
        for index, row in rows.items():
            num_fixed = max(0, self.changes.num_prompt - len(before))
            others = [token for at, token in enumerate(work) if at != index and at >= num_fixed]
            drafts = [token for token in others if token is not None]
            known = [*before, *(token for token in work[:num_fixed] if token is not None)]
            position = len(before) + index
            options: dict[str, Any] = {"rounded": lambda numbers: numbers, "lowest": NEVER}
            rows[index] = changed_reference(row, self.changes, known, drafts, position, **options)
        return rows


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize(
    ("options", "is_sampled"),
    [({}, False), ({}, True), ({"strategy": "sequential"}, True), ({"mode": "quality"}, False)],
    ids=str,
)
def test_blocks_are_those_of_the_slow_decoder(
    tmp_path: Path, options: dict[str, Any], *, is_sampled: bool
) -> None:
    directory = write_block_toy(tmp_path, shifted=False)
    biases, shortest, stops = {3: 2.0, 9: -4.0}, 6, (11, 12)
    chosen = [number for number, one in enumerate(SETTINGS) if (one["temperature"] > 0) == is_sampled]
    params = [
        SamplingParams(
            seed=number,
            ignore_eos=True,
            stop_token_ids=stops,
            logit_bias=biases,
            min_tokens=min(shortest, SETTINGS[number]["max_tokens"]),
            **PENALTIES,
            **SETTINGS[number],
        )
        for number in chosen
    ]
    found = build_engine(directory, "block", **options).generate([PROMPTS[n] for n in chosen], params)
    slow = _SlowChanged(directory, rules_of(4, options))
    for number, one, done in zip(chosen, params, found, strict=True):
        num_prompt = len(PROMPTS[number])
        slow.changes = Settings(
            num_prompt=num_prompt,
            repetition=one.repetition_penalty,
            presence=one.presence_penalty,
            frequency=one.frequency_penalty,
            free_from=num_prompt + one.min_tokens,
            biases=biases,
            stops=frozenset(stops),
        )
        expected, _ = slow.answer(PROMPTS[number], Sampling(seed=number, stops=stops, **SETTINGS[number]))
        assert list(done.token_ids) == expected


def test_what_a_decoder_does_not_support_is_refused(tmp_path: Path, foreseeing: Path) -> None:
    block = build_engine(write_block_toy(tmp_path, shifted=False), "block")
    many = dict.fromkeys(range(1000), 1.0)
    for engine, settings, code, words in (
        (block, {"no_repeat_ngram_size": 2}, "IDLM-0479", "no_repeat_ngram_size"),
        (build_engine(foreseeing, "ar"), {"logit_bias": many}, "IDLM-0411", "logit_bias"),
        (build_engine(foreseeing, "ar"), {"min_tokens": 600}, "IDLM-0401", "min_tokens=600"),
    ):
        error = refused(words, engine.generate, [[1, 2]], SamplingParams(**settings))
        assert error.code == code
    with pytest.raises(UserError, match="no_repeat_ngram_size=2"):
        SamplingParams(no_repeat_ngram_size=2, constraint=Constraint(kind="json_object"))
