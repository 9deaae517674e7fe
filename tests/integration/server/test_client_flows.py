"""Tools and structured answers through the clients that people use, on a model with a tokenizer like Qwen's.

The model likes to think, to say something and to call `town`. The clients are not installed for tests: what
they send is in `client_bodies.json`, as they wrote it, and the clients themselves run where they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field

from idlm.infer.server.errors import ApiError
from idlm.infer.server.protocol.requests import ChatRequest
from tests.integration.server.servers import CALL, CALLER_WORDS, PATIENCE, Running, caller, running

BODIES = json.loads(Path(__file__).with_name("client_bodies.json").read_text())
NAME = "qwen-like"
QUESTION: Any = [{"role": "user", "content": "Which town?"}]


class Town(BaseModel):
    """A town that the user means."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Zürich", "Rome", "東京"]
    size: int = Field(ge=0, le=9)


class town(Town):
    """Note a town."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(*CALLER_WORDS, model=caller()) as found:
        yield found


@pytest.fixture(scope="module")
def address(server: Running) -> str:
    return f"{server.url}/v1"


def check_call(name: str, arguments: str | dict[str, Any]) -> None:
    assert name.lower() == "town"
    Town.model_validate(json.loads(arguments) if isinstance(arguments, str) else arguments)


def message_of(response: Any) -> dict[str, Any]:
    """The message of an answer, whole or in chunks."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        found: dict[str, Any] = response.json()["choices"][0]["message"]
        return found
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert lines.pop() == "[DONE]"
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or ():
            if "id" in call:
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("name", BODIES)
def test_what_clients_send_is_answered(server: Running, name: str) -> None:
    response = server.client.post("/v1/chat/completions", json=BODIES[name])
    assert response.status_code == 200, response.text
    # The model's template does not write calls.
    lost = [message for message in BODIES[name]["messages"] if message.get("tool_calls")]
    warned = ['299 idlm "the chat template leaves out tool_calls of assistant turns"'] if lost else []
    assert response.headers.get_list("warning") == warned
    message = message_of(response)
    calls, content = message.get("tool_calls") or [], message["content"]
    assert len(calls) == ("calls" in name if not name.endswith("calls_or_answer") else not content)
    for call in calls:
        check_call(call["function"]["name"], call["function"]["arguments"])
    if not calls:
        Town.model_validate_json(content)


@pytest.mark.parametrize("streams", [False, True])
def test_what_of_a_schema_is_not_enforced_is_told(server: Running, streams: bool) -> None:
    schema = {"oneOf": [{"const": 1}, {"type": "string", "format": 'é"\n', "maxLength": 1}]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": QUESTION, "response_format": wanted, "stream": streams}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    warning = response.headers["warning"]
    assert warning.isascii() and warning.startswith("299 idlm ")
    assert "is not enforced" in json.loads(warning.removeprefix("299 idlm "))


def test_stops_do_not_act_in_reasoning_and_may_be_tokens(server: Running) -> None:
    for stops, content in ((["why", "</tool_call>"], f"So<tool_call>{CALL}"), (["y", "o<tool_call>"], "S")):
        body = {"messages": QUESTION, "stop": stops}
        [choice] = server.client.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("why", content)


def test_a_refusal_is_text_of_the_assistant() -> None:
    for fields in ({"refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}):
        [message] = ChatRequest.model_validate({"messages": [{"role": "assistant", **fields}]}).messages
        message.check()
        assert message.plain("") == {"role": "assistant", "content": "No."}


@pytest.mark.parametrize("name", ["openai_calls", "openai_second_turn_calls"])
def test_a_chat_is_tokenized_as_it_is_answered(server: Running, name: str) -> None:
    answer = server.client.post("/v1/chat/completions", json=BODIES[name]).json()
    found = server.client.post("/tokenize", json=BODIES[name]).json()
    assert len(found["tokens"]) == found["count"] == answer["usage"]["prompt_tokens"]


def test_a_template_gets_arguments_for_variables_that_it_has(server: Running) -> None:
    variables = server.front.service.template_variables
    assert variables == {"messages", "tools", "add_generation_prompt", "enable_thinking"}
    given = {"thinking": False, "language": "de", "effort": 2}
    body = ChatRequest.model_validate({"messages": QUESTION, "chat_template_kwargs": given})
    body.check()
    assert body.template_kwargs({"language", "effort"}) == {"language": "de", "effort": 2}
    assert body.thinking(default=True) is False
    with pytest.raises(ApiError, match=r"chat_template_kwargs\.language.*did you mean 'languages'"):
        body.template_kwargs({"languages", "effort"})


def test_no_effort_is_no_reasoning() -> None:
    given = {"messages": QUESTION, "reasoning_effort": "none"}
    for fields, expected in (
        ({}, False),
        ({"enable_thinking": True}, True),
        ({"reasoning_effort": "low"}, None),
    ):
        assert ChatRequest.model_validate(given | fields).thinking(default=None) is expected


@pytest.mark.sweep
def test_openai(address: str) -> None:
    client = OpenAI(base_url=address, api_key="unused", timeout=PATIENCE, max_retries=0)
    tools: Any = [pydantic_function_tool(town)]
    named: Any = {"type": "function", "function": {"name": "town"}}
    for options in ({}, {"tool_choice": "required"}, {"tool_choice": named}, {"parallel_tool_calls": False}):
        answer = client.chat.completions.parse(model=NAME, messages=QUESTION, tools=tools, **options)
        [call] = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, town)
        assert answer.choices[0].finish_reason == "tool_calls"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "noted"}
    sent: Any = {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude_none=True)]}
    second = client.chat.completions.create(model=NAME, messages=[*QUESTION, sent, result], tools=tools)
    assert second.choices[0].message.tool_calls
    parsed = client.chat.completions.parse(model=NAME, messages=QUESTION, response_format=Town)
    assert isinstance(parsed.choices[0].message.parsed, Town)
    both = client.chat.completions.parse(model=NAME, messages=QUESTION, tools=tools, response_format=Town)
    message = both.choices[0].message
    assert message.tool_calls or isinstance(message.parsed, Town)
    with client.chat.completions.stream(model=NAME, messages=QUESTION, tools=tools) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, town)


@pytest.mark.sweep
@pytest.mark.parametrize("responses", [False, True])
def test_langchain(address: str, responses: bool) -> None:
    chats = pytest.importorskip("langchain_openai", reason="pip install langchain-openai==1.7.4")
    messages = pytest.importorskip("langchain_core.messages")

    settings = {"api_key": "unused", "temperature": 0, "max_retries": 0, "use_responses_api": responses}
    model = chats.ChatOpenAI(model=NAME, base_url=address, **settings)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Town, method=method).invoke("Which town?"), Town)
    assert isinstance(model.with_structured_output(Town, strict=True).invoke("Which town?"), Town)
    for options in ({}, {"tool_choice": "any"}, {"strict": True}, {"parallel_tool_calls": False}):
        called = model.bind_tools([town], **options)
        answer = called.invoke("Which town?")
        [call] = answer.tool_calls
        check_call(call["name"], call["args"])
    result = messages.ToolMessage("noted", tool_call_id=call["id"])
    assert called.invoke([messages.HumanMessage("Which town?"), answer, result]).tool_calls
    chunks = list(model.bind_tools([town], tool_choice="any").stream("Which town?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    check_call(whole.tool_calls[0]["name"], whole.tool_calls[0]["args"])


@pytest.mark.sweep
def test_litellm(address: str) -> None:
    litellm = pytest.importorskip("litellm", reason="pip install litellm==1.110.2")
    settings: Any = {
        "model": f"openai/{NAME}",
        "api_base": address,
        "api_key": "unused",
        "messages": QUESTION,
    }
    tools: Any = [pydantic_function_tool(town)]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "town"}}):
        answer = litellm.completion(**settings, tools=tools, tool_choice=choice)
        [call] = answer.choices[0].message.tool_calls
        check_call(call.function.name, call.function.arguments)
    answer = litellm.completion(**settings, response_format=Town)
    Town.model_validate_json(answer.choices[0].message.content)
    chunks = list(litellm.completion(**settings, tools=tools, tool_choice="required", stream=True))
    [call] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)
