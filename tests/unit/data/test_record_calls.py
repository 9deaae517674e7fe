"""Tools and their calls in records of all usual forms."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.data.test_records import ANSWER, CALL, CALLING, CHAT, TOOL, USER, read, refusal


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": '{"x": 1}', "id": None}]},
        {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": '{"x": 1}'}},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
        {"from": "tool_call", "value": '[{"name": "add", "arguments": {"x": 1}}]'},
        {"role": "assistant", "tool_calls": [{"name": "add", "parameters": {"x": 1}}]},
    ],
)
def test_calls_of_tools_in_their_usual_forms(turn: dict[str, Any]) -> None:
    result = {"from": "observation", "value": "1"}
    found = read({"conversations": [USER, turn, result, ANSWER]})["messages"]
    assert found == [USER, CALLING, {"role": "tool", "content": "1"}, ANSWER]


def test_calls_and_tools_keep_the_order_of_their_keys() -> None:
    call, tool = {"id": "c1", **CALL}, {"function": {"name": "add"}, "type": "function"}
    found = read({"messages": [USER, ANSWER | {"tool_calls": [call]}], "tools": [tool]})
    assert [list(one) for one in (found["messages"][1]["tool_calls"][0], found["tools"][0])] == [
        ["id", "type", "function"],
        ["function", "type"],
    ]


def test_calls_belong_to_the_text_before_them() -> None:
    call = {"from": "function_call", "value": json.dumps(CALL["function"])}
    found = read({"conversations": [*CHAT, call, call]})["messages"]
    assert found == [USER, ANSWER | {"tool_calls": [CALL, CALL]}]
    with_weight = read({"conversations": [*CHAT, call | {"weight": 0}]})
    assert with_weight == {"messages": [*CHAT, CALLING], "untrained": {2}}
    record = {"id": 1, "query": "a", "answers": json.dumps([CALL["function"]]), "tools": [TOOL["function"]]}
    assert read(record) == {"messages": [USER, CALLING], "tools": [TOOL], "ignored": {"id"}}
    found = read({"messages": [USER | {"tools": json.dumps([TOOL])}, ANSWER]})
    assert found["tools"] == [TOOL] and found["messages"][0]["tools"] == json.dumps([TOOL])


def test_a_call_without_arguments_has_none_and_no_other_key_stands_for_them() -> None:
    for call in ({"name": "add"}, {"name": "add", "arguments": ""}, {"name": "add", "arguments": None}):
        turn = {"role": "assistant", "tool_calls": [call]}
        (found,) = read({"messages": [USER, turn]})["messages"][1]["tool_calls"]
        assert found["function"] == {"name": "add", "arguments": {}}
    turn = {"role": "assistant", "tool_calls": [{"name": "add", "with": {"x": 1}}]}
    assert "tool_calls[0] has no arguments, only the keys" in refusal({"messages": [USER, turn]})
