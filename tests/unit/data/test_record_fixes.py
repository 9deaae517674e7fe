"""A refused record that is changed as its fix says is read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.data.test_records import ANSWER, CALL, CHAT, TOOL, USER, read, refusal

Record = dict[str, Any]
EXTRA: list[tuple[Record, str, Record]] = [
    ({"system": "s", "system_prompt": "t"}, "delete all but one", {"system": "s"}),
    ({"system": 3}, "write system as text", {"system": "3"}),
    ({"tools": "add"}, "or delete the key", {}),
    ({"tools": {"name": "add"}}, "write tools as [", {"tools": [TOOL]}),
    ({"tools": [{"type": "web_search"}]}, "write it as {", {"tools": [TOOL]}),
    ({"functions": [TOOL], "tools": [CALL]}, "delete one of them", {"tools": [TOOL]}),
    ({"history": ["a", "b"]}, "write a list of {", {"history": CHAT}),
    ({"history": [["a"]]}, "write history as [[user, assistant], ...]", {"history": [["a", "b"]]}),
    (
        {"chat_template_kwargs": "x"},
        '{"enable_thinking": false}',
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    ({"enable_thinking": 0}, "write true or false", {"enable_thinking": False}),
    ({"images": ["a.png"]}, "delete the key images", {}),
    ({"weight": 0.5}, "delete the key weight", {}),
    ({"loss_mask": [1]}, "delete the key loss_mask", {}),
    ({"loss_mask": [0, 0.5]}, "write 0 or 1", {"loss_mask": [0, 1]}),
    ({"loss_mask": [0, 1, 1]}, "delete the key loss_mask", {}),
]
TURNS: list[tuple[Record, str, Record]] = [
    ({"content": "b"}, 'write a list of {"role": str, "content": str}', ANSWER),
    ({"role": "bing", "content": "b"}, "roles are system, developer, user, human", ANSWER),
    ({"role": "assistant", "content": 4}, "as text", ANSWER | {"content": "4"}),
    ({"role": "assistant", "content": ["b"]}, "as one text", ANSWER),
    (
        {"role": "assistant", "content": [{"text": 4}]},
        "in parts",
        ANSWER | {"content": [{"type": "text", "text": "4"}]},
    ),
    ({"role": "assistant", "content": "b", "text": "c"}, "delete one of them", ANSWER),
    ({"role": "assistant", "tool_calls": [{}]}, "write it as {", {"role": "assistant", "tool_calls": [CALL]}),
    (
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "x"}]},
        "or its arguments as JSON text",
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{}"}]},
    ),
    (ANSWER | {"weight": "no"}, "or delete it", ANSWER),
    (ANSWER | {"images": ["a.png"]}, "delete the key images", ANSWER),
    (ANSWER | {"content": "<think>b"}, "close it", ANSWER | {"content": "<think>b</think>"}),
    (ANSWER | {"weight": 0}, "give a turn the weight 1", ANSWER | {"weight": 1}),
    (ANSWER | {"weight": 1, "train": False}, "delete all but one", ANSWER | {"weight": 1}),
    (ANSWER | {"train_detail": [1]}, "weigh turns as a whole", ANSWER | {"train": True}),
]
RECORDS: list[tuple[Record, str, Record, str]] = [
    ({"data": CHAT}, "rename data to messages", {"messages": CHAT}, "auto"),
    ({"Question": "a", "Answer": "b"}, "rename Answer to answer", {"question": "a", "answer": "b"}, "auto"),
    (
        {"prompt": "a", "reply": "b"},
        '{"prompt": str, "response": str}',
        {"prompt": "a", "response": "b"},
        "auto",
    ),
    (
        {"input": {"messages": [USER]}, "preferred_output": [ANSWER]},
        'fix: write {"prompt": str, "response": str}',
        {"prompt": "a", "response": "b"},
        "auto",
    ),
    (
        {"messages": [*CHAT, USER], "answer": "b"},
        "rename messages to prompt and answer to response",
        {"prompt": [*CHAT, USER], "response": "b"},
        "auto",
    ),
    (
        {"question": "a", "correct": "b"},
        'fix: write {"prompt": str, "response": str}',
        {"prompt": "a", "response": "b"},
        "auto",
    ),
    ({"text": "a", "messages": CHAT}, "data.shape=messages", {"text": "a", "messages": CHAT}, "messages"),
    ({"text": "a", "role": "user"}, "data.shape=text", {"text": "a", "role": "user"}, "text"),
    (
        {"problem": "a", "solution": "b", "answer": "c"},
        "rename the keys that are meant to prompt and response",
        {"prompt": "a", "response": "b", "answer": "c"},
        "auto",
    ),
    (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "data.shape=preference",
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "preference",
    ),
    (
        {"question": "a", "choices": ["b", "c"], "answer": "b"},
        "write it into question where it belongs there, and delete the key choices",
        {"question": "a (b or c)", "answer": "b"},
        "auto",
    ),
    (
        {"instruction": "a", "input": "x", "context": "y", "output": "b"},
        "join them in input",
        {"instruction": "a", "input": "x y", "output": "b"},
        "auto",
    ),
    ({"conversations": ["a", "b", "c"]}, "write a list of {", {"conversations": CHAT}, "auto"),
    ({"text": "USER: a ASSISTANT: b"}, "data.shape=text", {"text": "USER: a ASSISTANT: b"}, "text"),
    ({"text": "### Human: a\n### Assistant: b"}, '{"messages": [{', {"messages": CHAT}, "auto"),
    ({"messages": "USER: a"}, "write a list of {", {"messages": CHAT}, "auto"),
]


@pytest.mark.parametrize(("extra", "fix", "repaired"), EXTRA)
def test_fixes_of_what_lies_beside_the_turns(extra: Record, fix: str, repaired: Record) -> None:
    assert fix in refusal({"messages": CHAT} | extra).split("fix:")[1]
    assert read({"messages": CHAT} | repaired)["messages"][-2:] == CHAT


@pytest.mark.parametrize(("turn", "fix", "repaired"), TURNS)
def test_fixes_of_turns(turn: Record, fix: str, repaired: Record) -> None:
    assert fix in refusal({"messages": [USER, turn]}).split("fix:")[1]
    assert len(read({"messages": [USER, repaired]})["messages"]) == 2


@pytest.mark.parametrize(("record", "fix", "repaired", "shape"), RECORDS)
def test_fixes_of_shapes(record: Record, fix: str, repaired: Record, shape: str) -> None:
    assert fix in refusal(record)
    assert read(repaired, shape)


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({"messages": CHAT, "tools": {"name": "add"}}, "tools={'name': 'add'}, which is not a list"),
        ({"messages": []}, "messages=[], which is not a list of turns"),
        ({"messages": {"role": ["user"], "content": []}}, "an object and not a list of turns"),
        ({"messages": [USER, "b"]}, "messages[1]='b', which is not an object"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]},
            "tool_calls[0].arguments=[1], which is not a JSON object",
        ),
    ],
)
def test_the_value_that_is_refused_is_shown(record: Record, shown: str) -> None:
    assert shown in refusal(record)


def test_a_turn_is_a_target_if_its_own_weight_and_the_listed_one_are_1() -> None:
    messages = [USER, ANSWER | {"weight": 0}, USER, ANSWER]
    assert 1 in read({"messages": messages, "loss_mask": [0, 1, 0, 1]})["untrained"]
