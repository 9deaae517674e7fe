"""Reasoning and calls in answers: what is parsed, and that no split of the text into parts changes it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idlm.infer.server.parsers import AnswerParser, call_format, parses_reasoning
from idlm.text.calls import FORMATS

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é<"}}\n</tool_call>'
CALLED = ("call", "add", '{"a": 1, "b": "é<"}')
SHARDS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</", "<th", "tool_call>", "\n", " ", "a"),
    *(
        '{"name": "f", "arguments": {}}',
        '{"name": "f"}',
        '{"name": 1}',
        "{",
        CALL,
        "<think>\nb\n</think>\n\n",
    ),
)
KINDS: list[dict[str, bool]] = [
    {"thinks": thinks, "is_open": is_open, "calls": calls}
    for thinks, is_open, calls in ((1, 0, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 0, 0))
]


def parsed(parts: list[str], *, calls: bool | str = False, **kind: bool) -> list[tuple[str, str, str]]:
    """All pieces (kind, name, text), adjacent ones of one kind joined unless they are calls."""
    given = FORMATS[calls if isinstance(calls, str) else "hermes"] if calls else None
    parser, joined = AnswerParser(calls=given, **kind), list[tuple[str, str, str]]()
    for number, part in enumerate(parts, start=1):
        for piece in parser.push(part, is_last=number == len(parts)):
            assert piece.text
            if joined and joined[-1][0] == piece.kind != "call":
                joined[-1] = (piece.kind, "", joined[-1][2] + piece.text)
            else:
                joined.append((piece.kind, piece.name, piece.text))
    return joined


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", {"thinks": True}, [("reasoning", "", "hm"), ("content", "", "yes")]),
        ("\n<think>hm\n\nso", {"thinks": True}, [("reasoning", "", "hm\n\nso")]),
        ("<think>\n\n</think>\n\nyes\n", {"thinks": True}, [("content", "", "yes\n")]),
        ("<think>hm</thi", {"thinks": True}, [("reasoning", "", "hm</thi")]),
        ("<thin", {"thinks": True}, [("content", "", "<thin")]),
        (" yes <think>no</think>", {"thinks": True}, [("content", "", " yes <think>no</think>")]),
        (
            "\nhm</think>yes",
            {"thinks": True, "is_open": True},
            [("reasoning", "", "hm"), ("content", "", "yes")],
        ),
        ("\n\n", {"thinks": True}, [("content", "", "\n\n")]),
        ("", {"thinks": True, "calls": True}, []),
        (f"I add.\n{CALL}\n{CALL}\n", {"calls": True}, [("content", "", "I add."), CALLED, CALLED]),
        (f"{CALL} done ", {"calls": True}, [CALLED, ("content", "", "done ")]),
        (CALL.removesuffix("</tool_call>"), {"calls": True}, [CALLED]),
        ('<tool_call>{"name": "now"}</tool_call>', {"calls": True}, [("call", "now", "{}")]),
        (
            f"<think>{CALL}</think>{CALL}",
            {"thinks": True, "calls": True},
            [("reasoning", "", CALL), CALLED],
        ),
        (CALL, {}, [("content", "", CALL)]),
    ],
)
def test_what_is_parsed(text: str, kind: dict[str, bool], expected: list[tuple[str, str, str]]) -> None:
    assert parsed([text], **kind) == expected
    assert parsed([*text, ""], **kind) == expected
    for cut in range(len(text) + 1):
        assert parsed([text[:cut], text[cut:]], **kind) == expected


@pytest.mark.parametrize(
    "body",
    [
        *("", "{", "[]", "null", "{}", '{"name": ""}', '{"name": 3, "arguments": {}}', "[" * 100_000),
        *(
            '{"name": "f", "arguments": [1]}',
            '{"name": "f", "arguments": "{}"}',
            '{"name": "f"} {}',
            "9" * 5000,
            f'{{"name": "f", "arguments": {{"a": {"9" * 4301}}}}}',
            *(f'{{"name": "f", "arguments": {{"a": {number}}}}}' for number in ("1e999", "-1e999", "NaN")),
        ),
    ],
    ids=lambda body: body[:30],
)
def test_what_is_no_call_stays_content(body: str) -> None:
    for end in ("</tool_call>", ""):
        text = f"so <tool_call>{body}{end}"
        assert parsed([text], calls=True) == [("content", "", text)]
        followed = parsed([f"<tool_call>{body}</tool_call> {CALL}"], calls=True)
        assert followed == [("content", "", f"<tool_call>{body}</tool_call>"), CALLED]


@pytest.mark.sweep
@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    text=st.lists(st.sampled_from(SHARDS) | st.text("<>/thinkc\n ", max_size=4), max_size=8).map("".join),
    kind=st.sampled_from(KINDS),
    data=st.data(),
)
def test_no_split_changes_what_is_parsed(text: str, kind: dict[str, bool], data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed([text], **kind)
    assert parsed(parts, **kind) == whole
    assert parsed([*text, ""], **kind) == whole
    if not (kind["thinks"] or kind["calls"]):
        assert "".join(piece[2] for piece in whole) == text
    for piece_kind, name, piece in whole:
        if piece_kind == "call":
            assert name and isinstance(json.loads(piece), dict)
        else:
            assert piece in text or kind["calls"], "nothing is made up"


def test_which_templates_ask_for_parsers() -> None:
    qwen3 = '{{ \'<think>\' }}</think> <tool_call>\\n{"name": x, "arguments": y}'
    coder = "<tool_call>\n<function=x> arguments"
    glm = "<tool_call>{{ call.name }}<arg_key>{{ call.arguments }}"
    opened = "{% if add_generation_prompt %}<think>\n{% endif %}"
    reasoning = [parses_reasoning("auto", text) for text in (qwen3, opened, coder, "")]
    assert reasoning == [True, True, False, False]
    assert [call_format("auto", text) for text in (qwen3, coder, glm)] == [FORMATS["hermes"], None, None]
    for text, name in (
        ("[INST] [TOOL_CALLS] [{{ call }}]", "mistral"),
        ("[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}", "mistral_args"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("respond with <|tool_call|> followed by a JSON list", "granite"),
        ('<|start_header_id|>{{ \'{"name": "\' + call.name + \'", "parameters": \' }}', "llama"),
    ):
        assert call_format("auto", text) is FORMATS[name]
    assert call_format("auto", "<|start_header_id|>") is None
    assert call_format("hermes", "") is FORMATS["hermes"] and parses_reasoning("think", "")
    assert call_format("none", qwen3) is None and not parses_reasoning("none", qwen3)
