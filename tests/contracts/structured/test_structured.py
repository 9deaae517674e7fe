"""Answers that match a grammar: greedy ISD equals greedy AR, other requests do not change, and ends, stops,
preemption and refusals."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Completion, Constraint, SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.resume import of_request
from idlm.infer.engine import Engine
from idlm.infer.runtime.worker import Worker
from idlm.infer.structured import grammar as grammars
from idlm.infer.structured.grammar import Grammar, GrammarCompiler
from idlm.semantics import Semantics
from tests.contracts.engines import answers, assert_idle, build_engine, drain
from tests.errors import refused
from tests.toy import write_spelling_toy, write_toy_checkpoint

VOCAB, EOS_ID = 335, 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["é", "日本", "👩"]},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "kind", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}
JSON = Constraint(kind="json_schema", text=json.dumps(SCHEMA))
DIGITS = Constraint(kind="regex", text="(foo|bar)+[0-9]{3,8}")
CHOICES = ("yes", 'a "quoted" one', "日本語")
CHOICE = Constraint(kind="choice", text=json.dumps(CHOICES))
REPEATED = Constraint(kind="grammar", text='start: ("ab" | "é")+')
PROMPTS = [list(range(40, 40 + length)) for length in (3, 1, 15, 7, 9, 2)]
CONSTRAINTS = (JSON, None, DIGITS, CHOICE, None, REPEATED)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spelling_toy(tmp_path_factory.mktemp("structured"))


def _params(**settings: Any) -> list[SamplingParams]:
    settings = {"temperature": 0, "max_tokens": 50, **settings}
    return [SamplingParams(constraint=constraint, **settings) for constraint in CONSTRAINTS]


def allowed(grammar: Grammar) -> set[int]:
    """The tokens that may follow."""
    bits = grammar.matcher.compute_bitmask()
    return {one for one in range(8 * len(bits)) if bits[one // 8] >> one % 8 & 1}


@pytest.fixture(scope="module")
def expected(toy: Path) -> list[Completion]:
    """Greedy AR's answers."""
    return build_engine(toy, "ar").generate(PROMPTS, _params())


def _check(completion: Completion, constraint: Constraint | None) -> None:
    """The text of a finished answer matches."""
    text = completion.text
    if constraint is JSON:
        value = json.loads(text)
        assert list(value) == ["name", "kind", "ok"]
        assert len(value["name"]) <= 4 and value["kind"] in SCHEMA["properties"]["kind"]["enum"]
    elif constraint is DIGITS:
        assert len(text) >= 6 and text.lstrip("fobar").isdigit()
    elif constraint is CHOICE:
        assert text in CHOICES


def test_finished_answers_match(expected: list[Completion]) -> None:
    for completion, constraint in zip(expected, CONSTRAINTS, strict=True):
        if constraint in (JSON, DIGITS, CHOICE):
            assert completion.finish_reason == "stop", completion
        if completion.finish_reason == "stop":
            _check(completion, constraint)


@pytest.mark.sweep_but("3-alternate")
@pytest.mark.decides
@pytest.mark.parametrize(
    ("stride", "strategy"), [(1, "cold"), (2, "branch"), (3, "alternate"), (4, "tree"), (4, "cold")]
)
def test_greedy_isd_equals_greedy_ar(
    toy: Path, expected: list[Completion], stride: int, strategy: str
) -> None:
    """In one batch with requests without a constraint, in eager passes and in static ones that run ahead."""
    for options in ({}, {"graphs": "on", "num_inflight_steps": 3, "max_num_seqs": 3}):
        engine = build_engine(toy, "isd", stride=stride, rejection_strategy=strategy, **options)
        assert answers(engine.generate(PROMPTS, _params())) == answers(expected)
        assert_idle(engine)


def test_other_requests_do_not_change(toy: Path) -> None:
    """Sampled answers without a constraint are the same bits beside requests with one."""
    engine = build_engine(toy, "isd", stride=4)
    sampled = _params(temperature=1.0, seed=5, logprobs=0)
    others = engine.generate(PROMPTS, sampled)
    plain = [number for number, constraint in enumerate(CONSTRAINTS) if constraint is None]
    alone = engine.generate([PROMPTS[n] for n in plain], [sampled[n] for n in plain])
    assert answers(alone) == answers([others[n] for n in plain])
    # Log-probabilities are those of the model, without the mask.
    assert all(0 > one.logprob > -100 for completion in others for one in completion.logprobs or ())


def test_the_mode_may_change_between_passes(toy: Path, expected: list[Completion]) -> None:
    engine = build_engine(toy, "isd", stride=4, adaptive=True)
    controller, calls = engine._stride_controller, iter(range(10**6))
    assert controller is not None
    num_modes, observed = len(engine.decoder.modes), []
    controller.choose = lambda load: next(calls) % num_modes  # type: ignore[method-assign]
    controller.observe_time = lambda *times: observed.append(times)  # type: ignore[method-assign]
    constrained = [n for n, constraint in enumerate(CONSTRAINTS) if constraint is not None]
    found = engine.generate([PROMPTS[n] for n in constrained], [_params()[n] for n in constrained])
    assert answers(found) == answers([expected[n] for n in constrained])
    assert len(observed) <= 4, "times of passes that wait for the host teach nothing about others"


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{"num_pages": 24}, {"num_pages": 24, "prefix_cache": False}])
def test_preempted_answers_do_not_change(toy: Path, options: dict[str, Any]) -> None:
    sampled = _params(temperature=1.0, seed=5)
    wanted = build_engine(toy, "isd", stride=4).generate(PROMPTS, sampled)
    engine = build_engine(toy, "isd", stride=4, **options)
    assert answers(engine.generate(PROMPTS, sampled)) == answers(wanted)
    assert engine.scheduler.num_preemptions > 0
    assert_idle(engine)


def test_an_answer_goes_on_after_passes_that_failed(
    toy: Path, expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some passes fail; their requests start anew with the tokens that they have."""
    engine, calls = build_engine(toy, "isd", stride=3), iter(range(10**6))
    original = Worker.launch

    def launch(self: Worker, schedule: Any) -> Any:
        result = original(self, schedule)
        if next(calls) in (6, 7, 14, 25):
            raise RuntimeError("planted")
        return result

    monkeypatch.setattr(Worker, "launch", launch)
    for number, (prompt, params) in enumerate(zip(PROMPTS, _params(), strict=True)):
        engine.add_request(str(number), prompt, params)
    engine.add_request("gone", PROMPTS[0], _params()[0])
    found: dict[str, Completion] = {}
    while engine.has_work:
        try:
            events = engine.step()
        except RuntimeError:
            continue
        engine.abort("gone")
        found |= {event.request_id: event.completion for event in events if event.completion is not None}
    assert answers([found[str(number)] for number in range(len(PROMPTS))]) == answers(expected)


def test_the_end_of_a_grammar_stops_without_a_stop_token(toy: Path) -> None:
    """Also where a stop token could follow; stop strings and limits end it earlier."""
    engine = build_engine(toy, "isd", stride=4)

    def answer(constraint: Constraint, **settings: Any) -> Completion:
        params = SamplingParams(temperature=0, constraint=constraint, **settings)
        return engine.generate([PROMPTS[0]], params)[0]

    fixed = Constraint(kind="regex", text="foo[0-9]")
    done = answer(fixed)
    assert done.finish_reason == "stop" and EOS_ID not in done.token_ids and len(done.text) == 4
    assert answer(fixed, ignore_eos=True).text == done.text
    assert answer(fixed, max_tokens=2).finish_reason == "length"
    assert answer(fixed, stop=("oo",)).text == "f"
    empty = answer(Constraint(kind="regex", text="()"), ignore_eos=True)
    assert (empty.token_ids, empty.text, empty.finish_reason) == ((EOS_ID,), "", "stop")


def test_a_stop_token_ends_only_what_matches(toy: Path) -> None:
    """Where the grammar may end or go on, sampled answers do both; none ends in its middle."""
    engine = build_engine(toy, "isd", stride=4)
    params = SamplingParams(constraint=REPEATED, n=40, seed=1, max_tokens=12)
    found = engine.generate([PROMPTS[1]], params)
    stopped = [completion for completion in found if completion.finish_reason == "stop"]
    assert 0 < len(stopped) < len(found)
    for completion in stopped:
        assert completion.token_ids[-1] == EOS_ID
        assert completion.text and not completion.text.replace("ab", "").replace("é", "")


def test_large_constraints_compile(toy: Path) -> None:
    """llguidance limits the alternatives of a rule, and recurses over rules."""
    compiler = build_engine(toy, "ar")._parts.grammars()
    rules = "".join(f'r{number}: r{number + 1} | "a"\n' for number in range(1500))
    assert not compiler.grammar(Constraint(kind="grammar", text=f'start: r0\n{rules}r1500: "a"')).problem
    choices = [f"a{number:04d}" for number in range(2500)]
    grammar = compiler.grammar(Constraint(kind="choice", text=choices))
    assert grammar.push([min(allowed(grammar))]) and grammar.problem is None


def test_what_no_token_can_spell_is_refused_or_fails(tmp_path: Path) -> None:
    """The vocabulary of letters lacks digits: before anything is queued, or where an answer comes to it."""
    engine = _lettered(tmp_path)
    digits, quoted = (
        Constraint(kind="regex", text="[0-9]"),
        Constraint(kind="json_schema", text='{"type": "string"}'),
    )
    for constraint, why in ((digits, ""), (quoted, """ \\(it begins with '"'\\)""")):
        with pytest.raises(UserError, match=f"IDLM-0474.*no token can begin it{why}"):
            engine.add_request("a", [1], SamplingParams(constraint=constraint))
    params = SamplingParams(constraint=Constraint(kind="regex", text="(a|b)(a|b)[0-9]"), seed=0)
    engine.add_request("b", [1], params)
    events = []
    while engine.has_work:
        events += engine.step()
    [error] = [event.error for event in events if event.error is not None]
    assert error.code == "IDLM-0478" and "after 2 tokens" in error.message
    assert sum(len(event.token_ids) for event in events) == 2


SLOW_ITEMS = 200
"""Alternatives of an ambiguous grammar whose masks take some 0.1 s each, within llguidance's limits."""


def _ambiguous(num_alternatives: int, begin: str) -> Constraint:
    """Each of many rules may be any of them again, so that everything is read in many ways."""
    each = range(num_alternatives)
    rules = "".join(f"e{n}: e | /[a-f]{{1,{3 + n % 40}}}/\n" for n in each)
    either = " | ".join(f"e{n} e" for n in each)
    return Constraint(kind="grammar", text=f'start: {begin}e\ne: {either} | "a"\n{rules}')


@pytest.mark.sweep
def test_ambiguous_grammars_fail_without_their_neighbours(
    toy: Path, expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their first mask before they are queued, or by later ones: by the number of states, on a slow or
    busy CPU by time, whichever limit comes first."""
    engine = build_engine(toy, "isd", stride=3)
    with pytest.raises(UserError, match=r"IDLM-0474.*((max is|limit) \d+|takes too long)"):
        engine.add_request("first", PROMPTS[0], SamplingParams(constraint=_ambiguous(410, "")))
    engine = build_engine(toy, "isd", stride=3)  # Its budget is whole.
    slow = {"states": _ambiguous(410, '"x" '), "time": _ambiguous(SLOW_ITEMS, '"x" ')}
    for name, constraint in slow.items():
        engine.add_request(name, PROMPTS[1], SamplingParams(constraint=constraint, seed=0, max_tokens=400))
    monkeypatch.setattr(grammars, "SLOW_MASKS", 0.1)
    engine.add_request("other", PROMPTS[0], _params()[0])
    done = drain(engine)
    assert answers([done["other"]]) == answers(expected[:1])
    for name, reasons in {"states": ("max is", "takes too long"), "time": ("takes too long",)}.items():
        error = done[name].error
        assert error is not None and error.startswith("IDLM-0478"), error
        assert any(reason in error for reason in reasons), error
    assert_idle(engine)


def test_grammars_are_compiled_beside_other_work(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A future is kept by who waits; compiled grammars and refusals are kept for a time."""
    compiler = build_engine(toy, "ar")._parts.grammars()
    may_continue, compiled = threading.Event(), []

    def source(constraint: Constraint, *others: Any) -> str:
        assert may_continue.wait(60)
        compiled.append(constraint)
        return original(constraint, *others)

    original = grammars._source
    monkeypatch.setattr(grammars, "_source", source)
    compiling = compiler.begin(DIGITS)
    wrong = Constraint(kind="regex", text="(((")
    assert compiler.begin(DIGITS) is compiling and not compiling.done()
    compiler.begin(wrong)
    may_continue.set()
    for number in range(grammars.MAX_COMPILED):
        compiler.begin(Constraint(kind="regex", text=f"x{number}"))
    assert compiler.grammar(DIGITS).push([]) and compiled.count(DIGITS) == 1
    for _ in range(2):
        refused("IDLM-0474", compiler.grammar, wrong)
    assert compiled.count(wrong) <= 2


def _lettered(directory: Path) -> Engine:
    from tokenizers import Tokenizer, decoders, models

    write_toy_checkpoint(directory, vocab_size=6)
    tokenizer = Tokenizer(
        models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "ab": 3, "</s>": 4}, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    Semantics(mask_token_id=5, stride=4).save(directory)
    return build_engine(directory, "isd", stride=3)


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "poem", "text": "x"},
        {"kind": "regex", "text": "x", "more": 1},
        "regex",
        {"kind": "regex", "text": 3},
        {"kind": "json_object", "text": "{}"},
        {"kind": "json_schema", "text": "{"},
        {"kind": "choice", "text": ["a", ""]},
        {"kind": "regex", "text": "x" * (1 << 19)},
    ],
)
def test_what_is_no_constraint_is_refused(given: Any) -> None:
    refused("IDLM-0474", SamplingParams, constraint=given)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "((("),
        ("json_schema", '{"type": "frob"}'),
        ("json_schema", '{"$ref": "http://example.org/schema"}'),
        ("grammar", "start: nowhere"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_is_queued(
    toy: Path, kind: Any, text: str
) -> None:
    engine = build_engine(toy, "ar")
    with pytest.raises(UserError, match="IDLM-0474"):
        engine.generate(
            [[1], [2]], [SamplingParams(), SamplingParams(constraint={"kind": kind, "text": text})]
        )  # type: ignore[arg-type]
    assert_idle(engine)


def test_records_of_answers_hold_the_constraint() -> None:
    shown = json.loads(json.dumps(of_request({}, SamplingParams(constraint=DIGITS, stop=("a",)))))
    assert shown == {"sampling.constraint": {"kind": "regex", "text": DIGITS.text}, "sampling.stop": ["a"]}


def test_checkpoints_decoders_and_installations_that_cannot(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(constraint=DIGITS)
    write_toy_checkpoint(tmp_path / "bare")
    refused("IDLM-0475.*no tokenizer", build_engine(tmp_path / "bare", "ar").generate, [[1]], params)
    write_toy_checkpoint(tmp_path / "block")
    Semantics(mask_token_id=47, causality="block", block_size=4, logit_shift=False).save(tmp_path / "block")
    with pytest.raises(UserError, match="IDLM-0477.*decoder block"):
        build_engine(tmp_path / "block", "block", max_num_batched_tokens=64).generate([[1]], params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"(?s)IDLM-0476.*\[structured\]"):
        GrammarCompiler(build_engine(toy, "ar").tokenizer, VOCAB, [EOS_ID]).grammar(DIGITS)
