"""Schemas with annotations that llguidance does not know; answers that are calls or match a constraint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from idlm.contracts import MAX_CONSTRAINT, Constraint
from idlm.errors import UserError
from idlm.infer.server.errors import ApiError, from_user_error
from idlm.infer.server.protocol.requests import ChatRequest
from idlm.infer.structured.grammar import Grammar, GrammarCompiler
from idlm.infer.structured.schemas import after_thought
from idlm.text.tokenizer import load_tokenizer
from tests.small_tokenizers import save_tagged

OVERLAPPING = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
UNIQUE = {"type": "array", "items": {"type": "string", "format": "é"}, "uniqueItems": True}
TOOL: Any = {"name": "f", "parameters": {"type": "object", "properties": {"a": UNIQUE}}}
TOOLS: Any = [{"type": "function", "function": TOOL}]
STRICT: Any = [{"type": "function", "function": {**TOOL, "strict": True}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": ["x"]}}\n</tool_call>'
SIZE = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "size", "schema": SIZE}}
SCHEMA_OF_TEXT = {"json": json.dumps({**SIZE, "x-guidance": {"whitespace_flexible": False}})}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = load_tokenizer(save_tagged(tmp_path_factory.mktemp("schemas")))
    return GrammarCompiler(tokenizer, 272, [tokenizer.eos_token_id])


def takes(compiler: GrammarCompiler, constraint: Constraint, text: str) -> bool:
    matcher = compiler.grammar(constraint).matcher
    token_ids = compiler._tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], **fields})


@pytest.mark.parametrize(
    ("schema", "matches", "notes"),
    [
        (UNIQUE, '["x", "y"]', ["format 'é'", "uniqueItems"]),
        (OVERLAPPING, "1", ["oneOf"]),
        ({"prefixItems": [UNIQUE, UNIQUE], **UNIQUE}, '[["x"], ["y"]]', ["format 'é'", "uniqueItems"]),
        ({"type": "string", "format": "date", "contentMediaType": "a", "title": "b"}, '"2024-02-29"', []),
        ({"not": {"type": "string"}, "type": "integer", "x-guidance": {"lenient": True}}, "1", ["not"]),
    ],
)
def test_annotations_refuse_nothing(
    compiler: GrammarCompiler, schema: dict[str, Any], matches: str, notes: list[str]
) -> None:
    constraint = Constraint(kind="json_schema", text=json.dumps(schema))
    assert takes(compiler, constraint, matches) and not takes(compiler, constraint, '"x y"')
    compiled = compiler.begin(constraint).result()
    assert isinstance(compiled, Grammar)
    found = compiled.notes
    assert len(found) == len(notes)
    assert all(any(note in each for each in found) for note in notes), found


@pytest.mark.parametrize("schema", [{"not": {"type": "string"}}, {**UNIQUE, "contains": {"const": "x"}}])
def test_other_rules_are_not_left_out(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"IDLM-0474.*Unimplemented keys"):
        compiler.grammar(Constraint(kind="json_schema", text=json.dumps(schema)))


@pytest.mark.parametrize("tools", [TOOLS, STRICT])
@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"response_format": SCHEMA}, '{"size": 3}'),
        ({"structured_outputs": SCHEMA_OF_TEXT}, '{"size":3}'),
        ({"response_format": {"type": "json_object"}}, '{"a": "<tool_call>"}'),
        ({"guided_choice": ["yes", 'n"o/', "日本"]}, 'n"o/'),
        ({"guided_regex": "a/b\\/[c/]\n\\d"}, "a/b//\n7"),
    ],
)
def test_answers_are_calls_or_match(
    compiler: GrammarCompiler, tools: Any, fields: dict[str, Any], answer: str
) -> None:
    for has_many in (True, False):
        constraint = chat(tools=tools, parallel_tool_calls=has_many, **fields).constraint()
        assert constraint is not None
        assert takes(compiler, constraint, CALL) and takes(compiler, constraint, answer)
        assert takes(compiler, constraint, f"{CALL}\n{CALL}") == has_many
        for neither in ("Well.", f"{CALL}\n{answer}", answer + CALL):
            assert not takes(compiler, constraint, neither)


def test_calls_after_a_thought_follow_the_same_schemas(compiler: GrammarCompiler) -> None:
    """Also those with a text that looks like the first rule, or has a line break of Unicode."""
    words = ["start: now", "a\u2028start: b", "\u0085"]
    tool = {"name": "f", "parameters": {"properties": {"a": {"enum": words}}, "additionalProperties": False}}
    for fields in ({"tool_choice": "required"}, {"guided_choice": ["yes"]}):
        body = chat(tools=[{"type": "function", "function": {**tool, "strict": True}}], **fields)
        before = body.constraint()
        assert before is not None
        for word in (*words, "other"):
            call = json.dumps({"name": "f", "arguments": {"a": word}}, ensure_ascii=False)
            answer = f"<tool_call>\n{call}\n</tool_call>"
            assert takes(compiler, before, answer) == (word in words)
            after = after_thought(before, "</think>")
            assert takes(compiler, after, f"hm</think>\n\n{answer}") == (word in words)
            assert not takes(compiler, after, answer)


@pytest.mark.parametrize("text", ['start: "a"', '%llguidance {}\nstart: "a"'])
def test_a_grammar_of_the_client_is_known(text: str) -> None:
    assert chat(guided_grammar=text).has_grammar
    assert not chat(tools=TOOLS, tool_choice="required").has_grammar


def test_calls_beside_what_has_no_rule_are_refused() -> None:
    with pytest.raises(ApiError, match="guided_grammar: not with tools"):
        chat(tools=TOOLS, guided_grammar='start: "a"').constraint()
    with pytest.raises(ApiError, match="one constraint"):
        chat(tools=TOOLS, tool_choice="required", guided_regex="a").constraint()
    alone = chat(tools=TOOLS, tool_choice="none", guided_grammar='start: "a"').constraint()
    assert alone == Constraint(kind="grammar", text='start: "a"')


def test_a_schema_needs_no_wrapper() -> None:
    for kind in ("json_schema", "json_object"):
        bare = {"type": kind, "schema": SIZE}
        assert chat(response_format=bare).constraint() == chat(response_format=SCHEMA).constraint()


def test_a_format_is_about_text_which_an_answer_that_must_call_has_not() -> None:
    forced = chat(tools=TOOLS, tool_choice="required", response_format=SCHEMA)
    assert forced.constraint() == chat(tools=TOOLS, tool_choice="required").constraint()
    assert forced.client_name("constraint") == "tools"


LENIENT: Any = {"lenient": True}
ODD: Any = {"type": "object", "not": {"required": ["b"]}}


@pytest.mark.parametrize(
    ("of_answer", "of_tool", "is_strict", "is_taken"),
    [
        (LENIENT, {}, False, True),
        ({}, LENIENT, False, False),
        (LENIENT, LENIENT, True, True),
        (LENIENT, {}, True, False),
        ({}, LENIENT, True, False),
    ],
)
def test_leniency_holds_beside_tools_whose_schemas_ask_for_it_too(
    compiler: GrammarCompiler, of_answer: Any, of_tool: Any, is_strict: bool, is_taken: bool
) -> None:
    function = {"name": "f", "parameters": {**ODD, "x-guidance": of_tool}, "strict": is_strict}
    tools = [{"type": "function", "function": function}]
    constraint = chat(tools=tools, guided_json={**ODD, "x-guidance": of_answer}).constraint()
    assert constraint is not None
    if is_taken:
        assert takes(compiler, constraint, '{"a": 1}') and takes(compiler, constraint, CALL)
        compiled = compiler.begin(constraint).result()
        assert isinstance(compiled, Grammar) and compiled.notes == ('Unimplemented keys: ["not"]',)
    else:
        with pytest.raises(UserError, match=r"IDLM-0474.*Unimplemented keys"):
            compiler.grammar(constraint)


def test_leniency_of_a_schema_in_a_grammar_holds(compiler: GrammarCompiler) -> None:
    text = f"start: %json {json.dumps({**ODD, 'x-guidance': LENIENT})}"
    assert takes(compiler, Constraint(kind="grammar", text=text), '{"a": 1}')
    with pytest.raises(UserError, match=r"IDLM-0474.*Unimplemented keys"):
        compiler.grammar(Constraint(kind="grammar", text=f"start: %json {json.dumps(ODD)}"))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"guided_json": "no json"}, "guided_json"),
        ({"structured_outputs": {"json": "{"}, "parallel_tool_calls": False}, "structured_outputs.json"),
        ({"guided_regex": "a" * (MAX_CONSTRAINT + 1)}, "guided_regex"),
    ],
)
def test_text_that_is_wrong_names_its_field_beside_tools(fields: dict[str, Any], name: str) -> None:
    body = chat(tools=TOOLS, **fields)
    with pytest.raises(UserError, match="IDLM-0474") as found:
        body.constraint()
    error = body.named(from_user_error(found.value, prompt_field="messages"))
    assert (error.status, error.param, error.code) == (400, name, "IDLM-0474")
    assert error.message.startswith(f"{name}: ") and body.is_whole_constrained


def test_reasoning_is_chosen_in_either_form() -> None:
    for fields, effort, thinks in (
        ({"reasoning": {"effort": "low"}}, "low", None),
        ({"reasoning": {"effort": "none"}}, "none", False),
        ({"reasoning": {"enabled": False}, "reasoning_effort": "high"}, "high", False),
        ({"reasoning": {"enabled": True}, "enable_thinking": False}, None, False),
    ):
        body = chat(**fields)
        body.check()
        assert body.template_kwargs(["reasoning_effort"]).get("reasoning_effort") == effort
        assert body.thinking(None) is thinks
