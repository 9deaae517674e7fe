"""Tools of /v1/responses that are no functions of their own, as Codex has them: in namespaces, custom ones,
and those that OpenAI runs itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from idlm.infer.server.protocol.responses import ResponseRequest
from tests.integration.server.servers import CALLER_WORDS, caller, running

FUNCTION = {"type": "function", "name": "note", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}}
SPACE = {"type": "namespace", "name": "mcp__x", "description": "Notes.", "tools": [FUNCTION]}
SEARCH = {"type": "web_search", "external_web_access": False}
QUESTION = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
HISTORY: list[dict[str, Any]] = [
    QUESTION,
    {"type": "function_call", "name": "note", "namespace": "mcp__x", "arguments": "{}", "call_id": "c1"},
    {"type": "custom_tool_call", "name": "patch", "input": "a\n+b", "call_id": "c2"},
    {"type": "function_call_output", "call_id": "c1", "output": "done"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
]


def test_all_tools_are_functions_of_the_chat() -> None:
    listed = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{**SPACE, "name": "functions"}, PATCH],
    }
    for tools, items in (([SEARCH, SPACE, PATCH, FUNCTION], HISTORY), ([SEARCH, SPACE], [listed, *HISTORY])):
        body = ResponseRequest.model_validate({"input": items, "tools": tools})
        chat = body.chat()
        assert {tool.function.name for tool in chat.tools or ()} == {"mcp__x__note", "patch", "note"}
        _, answer, *results = chat.plain_messages()
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in answer["tool_calls"]]
        assert calls == [("mcp__x__note", {}), ("patch", {"input": "a\n+b"})]
        assert [(one["role"], one["tool_call_id"], one["content"]) for one in results] == [
            ("tool", "c1", "done"),
            ("tool", "c2", "ok"),
        ]
        assert body.notes == ["tools of type web_search are left out: nothing runs them here"]
        assert body.origin("mcp__x__note") == {"name": "note", "namespace": "mcp__x"}
        assert body.origin("patch") == {"name": "patch", "type": "custom_tool_call"}
        assert body.origin("note") == body.origin("other") | {"name": "note"} == {"name": "note"}


@pytest.mark.parametrize(
    "tools",
    [
        *([{"type": "new"}], [{"type": "function"}], [3], [{**SPACE, "tools": [{"type": "new"}]}], 3, "ab"),
        *([{**SPACE, "tools": 3}], [{**SPACE, "name": ["x"]}], [{**SPACE, "tools": [SPACE]}]),
    ],
    ids=str,
)
def test_unknown_tools_are_refused(tools: Any) -> None:
    for items in ("Hi", [QUESTION]):
        with pytest.raises(ValidationError, match="tools"):
            ResponseRequest.model_validate({"input": items, "tools": tools})
    with pytest.raises(ValidationError, match="tools|input"):
        ResponseRequest.model_validate({"input": [{"type": "additional_tools", "tools": tools}, QUESTION]})


def test_hosted_tools_have_no_part_in_calls() -> None:
    tools = [FUNCTION, {**SEARCH, "name": ["x"]}, {**SEARCH, "namespace": "x", "name": "note"}]
    body = ResponseRequest.model_validate({"input": "Hi", "tools": tools})
    assert [tool.name for tool in body.tools or ()] == ["note"]
    assert body.origin("note") == {"name": "note"}


@pytest.mark.sweep
def test_calls_of_a_custom_tool_are_those_of_the_client() -> None:
    town = {"type": "custom", "name": "town", "description": "Notes a town."}
    with running(*CALLER_WORDS, model=caller()) as server:
        answer = server.client.post("/v1/responses", json={"input": "Hi", "tools": [SEARCH, town]})
        assert "web_search" in answer.headers["warning"]
        [call] = [
            item for item in Response.model_validate(answer.json()).output if item.type == "custom_tool_call"
        ]
        assert (call.name, json.loads(call.input)) == ("town", {"city": "Rome", "size": 1})
        again = [
            QUESTION,
            call.model_dump(),
            {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"},
        ]
        body = {"input": again, "tools": [town], "stream": True}
        text = server.client.post("/v1/responses", json=body).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        for event in events:
            TypeAdapter(ResponseStreamEvent).validate_python(event, strict=True)
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[-5:-1] == [
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
        ]
