"""Grammars of tool calls: whatever matches one is read back by the parser of the same format as calls that
follow their schemas, and everything else is refused."""

from __future__ import annotations

import itertools
import json
import random
import threading
from typing import Any

import pytest

from idlm.contracts import Constraint
from idlm.infer.server.parsers import CallParser, ParsedPart, calls_grammar
from idlm.infer.structured.grammar import Grammar, GrammarCompiler
from idlm.text.calls import FORMATS, CallFormat
from idlm.text.tokenizer import load_tokenizer
from tests.contracts.structured.test_structured import EOS_ID, VOCAB, allowed
from tests.toy import write_spelling_toy

HERMES = FORMATS["hermes"]
BEGIN, END = "<tool_call>", "</tool_call>"
SIZED = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"$ref": "#/$defs/tag"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["x", END]}},
    "x-guidance": {"whitespace_pattern": " ?"},
}
TOOLS: dict[str, Any] = {
    'size "é"': SIZED,
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
SIZE = f'{BEGIN}\n{{"name": "size \\"é\\"", "arguments": {{"a": 1, "b": "{END}"}}}}\n{END}'
NOW = f'{BEGIN}\n{{"name": "now", "arguments": {{}}}}\n{END}'
WRONG = f'{BEGIN}\n{{"name": "now", "arguments": {{"a": 1}}}}\n{END}'
ONE = '{"name": "now", "arguments": {}}'
FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
WRITTEN = [
    ("llama", 'START{"name": "now", "parameters": {}}', 1),
    ("llama", "START<|python_tag|>{'name': 'now', 'parameters': {}}".replace("'", '"'), 1),
    ("llama", 'START{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', 2),
    ("mistral", f"[TOOL_CALLS] [{ONE}]", 1),
    ("mistral", f"[TOOL_CALLS][{ONE}, {ONE}]", 2),
    ("mistral_args", "[TOOL_CALLS]now[ARGS]{}", 1),
    ("mistral_args", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}", 2),
    ("granite", f"<|tool_call|>[{ONE}]", 1),
    ("granite", f"<|tool_call|> [{ONE}, {ONE}]", 2),
    ("deepseek", f"<｜tool▁calls▁begin｜>{FENCED}<｜tool▁calls▁end｜>", 1),
    ("deepseek", f"<｜tool▁calls▁begin｜>{FENCED}\n{FENCED}<｜tool▁calls▁end｜>", 2),
    ("hermes", f"{NOW}\n{NOW}", 2),
]
"""Groups of calls as families write them; with START nothing precedes one."""
READ = [
    ("mistral_args", "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}", "c"),
    ("granite", f"<|tool_call|>[{ONE}]<|/tool_call|> Done.", "ct"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "c"),
    ("llama", ' \n{"name": "Bob", "age": 3}', "t"),
    ("llama", '{"name": "Bob"}', "t"),
    ("llama", '{"name": "Bob", "parameters": {}}', "t"),
    ("llama", '<|python_tag|>{"name": "Bob", "parameters": {}}', "c"),
    ("llama", 'So {"name": "now", "parameters": {}}', "t"),
    ("llama", " \n", "t"),
    ("mistral", f"[TOOL_CALLS] [{ONE}", "t"),
    ("mistral", f"[TOOL_CALLS] [{ONE}, 5]", "t"),
    ("mistral_args", "[TOOL_CALLS]now[ARGS]{} and so", "t"),
    ("mistral_args", "[TOOL_CALLS]now{}", "t"),
    ("deepseek", f"<｜tool▁calls▁begin｜>{FENCED} so<｜tool▁calls▁end｜>", "t"),
]
"""Other answers: c a call, t text."""
MODES = [(True, True), (True, False), (False, True), (False, False)]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return GrammarCompiler(
        load_tokenizer(write_spelling_toy(tmp_path_factory.mktemp("calls") / "toy")), VOCAB, [EOS_ID]
    )


def grammar_of(
    compiler: GrammarCompiler, is_forced: bool, has_many: bool, given: CallFormat = HERMES
) -> Grammar:
    text = calls_grammar(given, TOOLS, is_forced=is_forced, has_many=has_many)
    return compiler.grammar(Constraint(kind="grammar", text=text))


def parsed(text: str, size: int | None = None, given: CallFormat = HERMES) -> list[ParsedPart]:
    """The pieces of a text that comes in parts of `size` characters; adjacent content is joined."""
    parser, found, size = CallParser(given, TOOLS), list[ParsedPart](), size or len(text)
    pushed = [parser.push(text[start : start + size]) for start in range(0, len(text), size)]
    for piece in [*itertools.chain(*pushed), *parser.push("", is_last=True)]:
        if found and piece.kind == found[-1].kind == "content":
            found[-1] = ParsedPart("content", found[-1].text + piece.text)
        else:
            found.append(piece)
    return found


@pytest.mark.parametrize(("is_forced", "has_many"), MODES)
def test_what_the_grammar_takes(compiler: GrammarCompiler, is_forced: bool, has_many: bool) -> None:
    for text, num_calls, has_text in (
        (SIZE, 1, False),
        (NOW, 1, False),
        (f"{SIZE}\n{NOW}", 2, False),
        (WRONG, None, False),
        (f"Well. {WRONG}", None, True),
        ("Well.", 0, True),
        (f"Well. <tool_c {SIZE} Done.", 1, True),
        (f"Well. {SIZE} and {NOW} Done.", 2, True),
        (f"{NOW} {BEGIN}", None, True),
    ):
        is_allowed = num_calls is not None and (num_calls > 0 and not has_text if is_forced else True)
        is_allowed = is_allowed and (has_many or (num_calls or 0) < 2)
        grammar = grammar_of(compiler, is_forced, has_many)
        token_ids = compiler._tokenizer.encode(text, add_special_tokens=False)
        assert (grammar.push(token_ids) and grammar.matcher.is_accepting()) == is_allowed, text


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("is_forced", "has_many"), MODES[:2])
def test_what_the_grammar_makes_is_read_back(
    compiler: GrammarCompiler, is_forced: bool, has_many: bool, name: str
) -> None:
    """Random answers, token by token among those that the grammar allows."""
    rng, seen = random.Random(0), set[str]()
    for _ in range(6):
        grammar, token_ids = grammar_of(compiler, is_forced, has_many, FORMATS[name]), list[int]()
        while not grammar.is_finished and len(token_ids) < 4000:
            following = allowed(grammar)
            # Where it may end it does.
            token_ids.append(EOS_ID if EOS_ID in following else rng.choice(sorted(following)))
            assert grammar.push(token_ids[-1:])
        text = compiler._tokenizer.decode([one for one in token_ids if one != EOS_ID])
        calls = parsed(text, given=FORMATS[name])
        assert calls and {piece.kind for piece in calls} == {"call"}, text
        assert calls == parsed(text, 1, FORMATS[name]) == parsed(text, 7, FORMATS[name])
        for call in calls:
            arguments = json.loads(call.text)
            seen.add(call.name)
            if call.name == "now":
                assert arguments == {}
            else:
                assert arguments["a"] in range(10) and arguments["b"] in ("x", END) and len(arguments) == 2
    assert seen == set(TOOLS)


@pytest.mark.parametrize(("name", "text", "num_calls"), WRITTEN)
def test_what_families_write(compiler: GrammarCompiler, name: str, text: str, num_calls: int) -> None:
    """It is read however it comes, and a constraint takes it, but no arguments beside the schema."""
    group = text.removeprefix("START")
    for before in ("", *(["Well. "] if group == text else [])):
        whole, wrong = before + group, before + group.replace("{}", '{"a": 1}')
        expected = parsed(whole, given=FORMATS[name])
        kinds = [piece.kind for piece in expected]
        assert kinds == ["content"] * bool(before) + ["call"] * num_calls, whole
        assert {piece[1:] for piece in expected[bool(before) :]} == {("{}", "now")}
        for size in (1, 2, 5, 11):
            assert parsed(whole, size, FORMATS[name]) == expected
        for is_forced in (False, True):
            for answer, is_right in ((whole, not (is_forced and before)), (wrong, False)):
                grammar = grammar_of(compiler, is_forced, num_calls > 1, FORMATS[name])
                ids = compiler._tokenizer.encode(answer, add_special_tokens=False)
                is_tag_forced = is_forced and "<|python_tag|>" in answer
                taken = grammar.push(ids) and grammar.matcher.is_accepting()
                assert taken == (is_right and not is_tag_forced), answer


@pytest.mark.parametrize(("name", "text", "kinds"), READ)
def test_other_answers_of_families(name: str, text: str, kinds: str) -> None:
    whole = parsed(text, given=FORMATS[name])
    assert "".join("c" if piece.kind == "call" else "t" for piece in whole) == kinds
    assert "c" in kinds or whole[0].text == text
    for size in (1, 2, 5, 11):
        assert parsed(text, size, FORMATS[name]) == whole


def test_an_end_within_a_string_of_json_ends_no_call() -> None:
    text = f"Well.\n{SIZE}\n{NOW}\nDone."
    kinds = [piece.kind for piece in parsed(text)]
    assert kinds == ["content", "call", "call", "content"]
    for size in (1, 3, 50):
        assert parsed(text, size) == parsed(text)
    # A string without an end is no reason to swallow what follows.
    broken = f'{BEGIN}{{"name": "now}}{END} and {NOW}'
    assert [piece.kind for piece in parsed(broken)] == ["content", "call"]
    assert parsed(broken, 2) == parsed(broken)


def test_a_part_that_ends_behind_a_backslash_splits_no_call() -> None:
    call = f'{BEGIN}\n{{"name": "now", "arguments": {{"a": "x{END} \\n y"}}}}\n{END}'
    whole = parsed(call)
    assert [piece.kind for piece in whole] == ["call"]
    for index in range(1, len(call)):
        parser = CallParser(HERMES, ())
        assert [*parser.push(call[:index]), *parser.push(call[index:], is_last=True)] == whole


def test_a_grammar_that_was_cancelled_can_be_compiled_again(compiler: GrammarCompiler) -> None:
    """Its only request was aborted while another one compiled."""
    constraint, others_end = Constraint(kind="regex", text="yes|no"), threading.Event()
    compiler._thread.submit(others_end.wait, 60)
    assert compiler.begin(constraint).cancel()
    others_end.set()
    assert compiler.grammar(constraint).push(compiler._tokenizer.encode("no", add_special_tokens=False))
