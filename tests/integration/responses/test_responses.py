"""/v1/responses through the `openai` client, on a model that likes to think, to say something and to call
`town`: answers are those of chats, and events those that the client declares. What other clients send
(OpenAI's Agents SDK and LangChain) is in `client_bodies.json`, as they wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, InternalServerError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from idlm.infer.server.engine_client import Generation
from idlm.infer.server.errors import ApiError, dump
from idlm.infer.server.messages import AnswerEvent
from idlm.infer.server.protocol.responses import ResponseRequest
from idlm.infer.server.replies.stored import ResponseStore
from tests.integration.server.servers import CALLER_WORDS, PATIENCE, PROMPT, Running, caller, running
from tests.integration.server.test_client_flows import NAME, QUESTION, Town, check_call

PATH, CHAT, INPUT = "/v1/responses", "/v1/chat/completions", "Which town?"
FUNCTION = {"name": "town", "parameters": Town.model_json_schema()}
TOOLS: Any = [{"type": "function", **FUNCTION}]
TEXT = [
    "output_item.added",
    "content_part.added",
    "{}.delta",
    "{}.done",
    "content_part.done",
    "output_item.done",
]
CALL = [TEXT[0], "function_call_arguments.delta", "function_call_arguments.done", TEXT[-1]]


BODIES = json.loads(Path(__file__).with_name("client_bodies.json").read_text())


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(*CALLER_WORDS, model=caller()) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=PATIENCE, max_retries=0)


def answered(server: Running, path: str = PATH, **body: Any) -> dict[str, Any]:
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def texts_of(output: list[dict[str, Any]]) -> dict[str, str]:
    return {
        item["type"]: item["arguments"] if "arguments" in item else item["content"][0]["text"]
        for item in output
    }


def plain(text: str | list[Any], **fields: Any) -> list[dict[str, Any]]:
    body = ResponseRequest(input=text, **fields)
    return body.chat().plain_messages()


@pytest.mark.sweep
def test_a_response_is_the_answer_of_a_chat(server: Running) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    for chat, fields in (({}, {}), ({"tools": tools}, {"tools": TOOLS}), ({"stop": "o"}, {"stop": "o"})):
        expected = answered(server, CHAT, messages=QUESTION, **chat)
        found = answered(server, input=INPUT, **fields)
        Response.model_validate(found, strict=True)
        [choice], texts = expected["choices"], texts_of(found["output"])
        message, usage = choice["message"], found["usage"]
        assert texts["reasoning"] == message["reasoning_content"]
        assert texts["message"] == message["content"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        assert [texts[kind] for kind in texts if kind == "function_call"] == calls
        assert (found["status"], found["exactness"]) == ("completed", "exact")
        assert usage["input_tokens"] == expected["usage"]["prompt_tokens"]
        assert usage["output_tokens"] == expected["usage"]["completion_tokens"]
        details = expected["usage"]["completion_tokens_details"]
        # The tag of the beginning, the thought and the tag of its end.
        assert usage["output_tokens_details"]["reasoning_tokens"] == details["reasoning_tokens"] == 3


def test_events_are_those_of_the_client_in_their_order(server: Running) -> None:
    body = {"input": INPUT, "tools": TOOLS, "stream": True, "include": ["message.output_text.logprobs"]}
    response = server.client.post(PATH, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, end = response.text.split("\n\n")
    assert end == "" and all(block.startswith("event: ") for block in blocks)
    names, events = [], list[dict[str, Any]]()
    for block in blocks:
        name, data = block.split("\n")
        names.append(name.removeprefix("event: "))
        events.append(json.loads(data.removeprefix("data: ")))
        TypeAdapter(ResponseStreamEvent).validate_python(events[-1], strict=True)
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [name.removeprefix("response.") for name in names]
    expected = [part.format(kind) for kind in ("reasoning_text", "output_text") for part in TEXT]
    assert list(dict.fromkeys(kinds)) == list(
        dict.fromkeys(["created", "in_progress", *expected, *CALL, "completed"])
    )
    final = events[-1]["response"]
    assert final == server.client.get(f"{PATH}/{final['id']}").json()
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    for index, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == index]
        deltas = [event["delta"] for event in own if "delta" in event]
        assert "".join(deltas) == texts_of([item])[item["type"]]
        added, done = own[0]["item"], own[-1]["item"]
        assert done == item and (added["id"], added["status"]) == (item["id"], "in_progress")
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
    scores = [
        score for event in events for score in event.get("logprobs", ()) if event["type"].endswith("delta")
    ]
    assert scores == final["output"][1]["content"][0]["logprobs"] and scores


@pytest.mark.sweep_but("agents_second_turn_calls", "langchain_streamed_calls")
@pytest.mark.parametrize("name", BODIES)
def test_what_clients_send_is_answered(server: Running, name: str) -> None:
    response = server.client.post(PATH, json=BODIES[name])
    assert response.status_code == 200, response.text
    *_, last = response.text.strip().removeprefix("data: ").rpartition("data: ")
    found = json.loads(last)
    response_made = found.get("response", found)
    calls = [item for item in response_made["output"] if item["type"] == "function_call"]
    assert len(calls) == ("calls" in name)
    for call in calls:
        check_call(call["name"], call["arguments"])
    if not calls:
        Town.model_validate_json(texts_of(response_made["output"])["message"])


def test_the_client_reads_a_stream_and_goes_on_with_results(client: OpenAI, server: Running) -> None:
    with client.responses.stream(model=NAME, input=INPUT, tools=TOOLS) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        first = stream.get_final_response()
    assert first.output_text == "".join(deltas) == "So"
    call = first.output[-1]
    assert call.type == "function_call"
    check_call(call.name, call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noted"}
    settings: Any = {"model": NAME, "tools": TOOLS}
    stored = client.responses.create(previous_response_id=first.id, input=[result], **settings)
    sent: Any = [{"role": "user", "content": INPUT}, *(item.to_dict() for item in first.output), result]
    repeated = client.responses.create(input=sent, store=False, **settings)
    assert stored.usage and repeated.usage and stored.usage.input_tokens == repeated.usage.input_tokens
    assert stored.output_text == repeated.output_text and stored.previous_response_id == first.id
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    referred = client.responses.create(input=[sent[0], *references, result], **settings)
    assert referred.usage and referred.usage.input_tokens == repeated.usage.input_tokens
    for name in (f"{references[0]['id']}0", first.id, "", "fc_"):
        with pytest.raises(BadRequestError) as wrong:
            client.responses.create(input=[sent[0], {"type": "item_reference", "id": name}], **settings)
        assert (wrong.value.code, wrong.value.param) == ("item_not_found", "input.1.id")
    with pytest.raises(BadRequestError, match=r"input\.1\.id: .* named before"):
        client.responses.create(input=[references[0], references[0]], **settings)
    items = client.responses.input_items.list(stored.id, order="asc", limit=2)
    assert [item.type for item in items] == [item.get("type", "message") for item in sent]
    page = server.client.get(f"{PATH}/{stored.id}/input_items").json()
    ResponseItemList.model_validate(page, strict=True)
    assert page["data"][0]["output"] == "noted" and not page["has_more"]


@pytest.mark.sweep
def test_structured_output_is_parsed(client: OpenAI) -> None:
    parsed = client.responses.parse(model=NAME, input=INPUT, text_format=Town)
    assert isinstance(parsed.output_parsed, Town)
    for choice in ("required", {"type": "function", "name": "town"}):
        forced = client.responses.create(model=NAME, input=INPUT, tools=TOOLS, tool_choice=choice)  # type: ignore[call-overload]
        [call] = forced.output
        check_call(call.name, call.arguments)
    settings: Any = {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 3}
    assert client.responses.create(model=NAME, input=INPUT, **settings).output_text.startswith("{")


@pytest.mark.sweep
def test_an_answer_that_is_cut_off_is_incomplete(server: Running, client: OpenAI) -> None:
    found = answered(server, input=INPUT, max_output_tokens=3)
    Response.model_validate(found, strict=True)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in found["output"]] == ["incomplete"]
    streamed = list(client.responses.create(model=NAME, input=INPUT, max_output_tokens=3, stream=True))
    assert streamed[-1].type == "response.incomplete"
    assert [item.to_dict()["content"] for item in streamed[-1].response.output] == [
        item["content"] for item in found["output"]
    ]


def test_what_is_stored_is_kept_until_it_is_deleted(client: OpenAI) -> None:
    kept = client.responses.create(model=NAME, input=INPUT, metadata={"a": "b"}, instructions="Be short.")
    assert client.responses.retrieve(kept.id) == kept
    assert (kept.metadata, kept.instructions) == ({"a": "b"}, "Be short.")
    client.responses.delete(kept.id)
    unkept = client.responses.create(model=NAME, input=INPUT, store=False)
    for name in (kept.id, unkept.id, "resp_none"):
        for act in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(NotFoundError) as refusal:
                act(name)
            assert refusal.value.code == "response_not_found" and name in refusal.value.message
            assert "had store=false" in refusal.value.message
        with pytest.raises(BadRequestError) as wrong:
            client.responses.create(model=NAME, input=INPUT, previous_response_id=name)
        assert (
            wrong.value.code == "previous_response_not_found" and wrong.value.param == "previous_response_id"
        )
    with pytest.raises(BadRequestError, match="not supported"):
        client.responses.create(model=NAME, input=INPUT, background=True)


def test_a_client_that_leaves_frees_its_pages_and_stores_nothing(server: Running, client: OpenAI) -> None:
    stream = client.responses.create(
        model=NAME, input=INPUT, max_output_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    server.wait_until_idle()
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.response.id)


@pytest.mark.sweep
def test_a_stream_that_fails_ends_in_the_error(
    monkeypatch: pytest.MonkeyPatch, server: Running, client: OpenAI
) -> None:
    put = Generation.put

    def failing(generation: Generation, event: AnswerEvent) -> None:
        put(generation, event._replace(error=("IDLM-0448", "lost", "again")) if event.figures else event)

    monkeypatch.setattr(Generation, "put", failing)
    *_, last = client.responses.create(model=NAME, input=INPUT, stream=True)
    assert last.type == "response.failed" and last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "lost (again)")
    with pytest.raises(InternalServerError, match="lost"):
        client.responses.create(model=NAME, input=INPUT)
    server.wait_until_idle()


def test_an_answer_that_fails_names_the_field_of_the_response(
    monkeypatch: pytest.MonkeyPatch, server: Running
) -> None:
    put = Generation.put

    def failing(generation: Generation, event: AnswerEvent) -> None:
        put(generation, event._replace(error=("IDLM-0478", "constraint: failed", "again")))

    monkeypatch.setattr(Generation, "put", failing)
    body = {"input": INPUT, "text": {"format": {"type": "json_object"}}}
    error = server.client.post(PATH, json=body).json()["error"]
    assert (error["param"], error["message"]) == ("text.format", "text.format: failed (again)")
    *_, last, _ = server.client.post(PATH, json={**body, "stream": True}).text.split("\n\n")
    assert json.loads(last.partition("data: ")[2])["response"]["error"]["param"] == "text.format"
    server.wait_until_idle()


def test_items_that_are_parts_of_an_answer_are_one_turn() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
    called = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": "c"}
    spoken = {"role": "assistant", "content": [{"type": "output_text", "text": "So"}]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
    user = {"role": "user", "content": "x"}
    assert plain("x", instructions="y") == [{"role": "system", "content": "y"}, user]
    assert plain(
        [user, thought, spoken, call, call, {**call, "type": "function_call_output", "output": "z"}][:5]
    ) == [
        user,
        {"role": "assistant", "content": "So", "reasoning_content": "why", "tool_calls": [called, called]},
    ]
    assert plain([spoken, spoken, call, spoken]) == [
        {"role": "assistant", "content": "So"},
        {"role": "assistant", "content": "So", "tool_calls": [called]},
        {"role": "assistant", "content": "So"},
    ]
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "z"}]}
    assert plain([summary, call, output])[:2] == [
        {"role": "assistant", "content": "", "reasoning_content": "short", "tool_calls": [called]},
        {"role": "tool", "content": "z", "tool_call_id": "c"},
    ]


def test_what_a_client_adds_to_items_is_not_stored(server: Running) -> None:
    """It may hold numbers that JSON has not."""
    huge = {"annotations": [float("inf")], "logprobs": [float("inf")], "cache_control": float("inf")}
    parts = [{"type": "output_text", "text": "So", **huge}]
    spoken = {
        "role": "assistant",
        "content": parts,
        "phase": "commentary",
        "cache_control": {"a": float("inf")},
    }
    thought = {"type": "reasoning", "content": "why"}
    choice = {"type": "function", "name": "town", "cache_control": float("inf")}
    body = {"input": [thought, spoken], "tools": TOOLS, "tool_choice": choice}
    made = server.client.post(
        PATH, content=json.dumps(body), headers={"content-type": "application/json"}
    ).json()
    page = server.client.get(f"{PATH}/{made['id']}/input_items?order=asc").json()
    ResponseItemList.model_validate(page, strict=True)
    assert made["tool_choice"] == {"type": "function", "name": "town"}
    assert texts_of(page["data"]) == {"reasoning": "why", "message": "So"}
    assert page["data"][1]["content"] == [{"type": "output_text", "text": "So", "annotations": []}]


def test_stored_responses_are_bounded_by_their_size() -> None:
    response = {"output": [{"type": "message", "content": "x" * 50}]}
    store = ResponseStore(3 * len(dump([{"id": "a", **response}])))
    for name in "abc":
        store.put({"id": name, **response}, [])
    assert store.get("a").conversation() == response["output"]
    store.put({"id": "d", **response}, [])
    with pytest.raises(ApiError, match="'b'"):
        store.get("b")
    store.delete("c")
    store.put({"id": "e", **response}, [])
    assert all(map(store.get, "ade"))
    assert not store.put({"id": "f", **response}, [{"id": "y" * 400}])
    with pytest.raises(ApiError, match="'f'"):
        store.get("f")
    assert all(map(store.get, "ade"))


def test_what_is_not_stored_says_so(monkeypatch: pytest.MonkeyPatch, server: Running, client: OpenAI) -> None:
    for size, why in ((0, "max_stored=0 stores none"), (100, "was dropped for others")):
        monkeypatch.setattr(server.front.service, "_stores", {"": ResponseStore(size)})
        made = client.responses.create(model=NAME, input=INPUT, store=True)
        assert made.to_dict()["store"] is False
        *_, last = client.responses.create(model=NAME, input=INPUT, stream=True)
        assert last.type == "response.completed" and last.response.to_dict()["store"] is False
        with pytest.raises(NotFoundError, match=f"{why}.*keep what POST /v1/responses answers"):
            client.responses.retrieve(made.id)
        with pytest.raises(BadRequestError, match=f"{why}.*give all items of the conversation as input"):
            client.responses.create(model=NAME, input=INPUT, previous_response_id=made.id)


def test_errors_and_warnings_name_the_fields_that_the_client_sent(server: Running) -> None:
    shape = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    many = {"input": INPUT, "text": {"format": shape}, "guided_regex": "a"}
    assert server.refusal(PATH, **many)[1]["message"] == (
        "text.format: an answer has one constraint, not guided_regex and text.format"
    )
    unknown = {**shape, "schema": {"$ref": "#/none"}}
    error = server.refusal(PATH, input=INPUT, text={"format": unknown})[1]
    assert error["message"].startswith("text.format: this json_schema cannot be used: ")
    paths = {PATH: ("input", "max_output_tokens"), CHAT: ("messages", "max_completion_tokens")}
    for path, (prompt, longest) in paths.items():
        body = {prompt: QUESTION, longest: 3, "min_tokens": 4}
        assert f"at most {longest}=3 " in server.refusal(path, **body)[1]["message"]
    answer = server.client.post(PATH, json={"input": INPUT, "max_output_tokens": 1990})
    assert "max_output_tokens=1990, but the context" in answer.headers["warning"]
    called = {"type": "function", "name": "max_tokens"}
    error = server.refusal(PATH, input=INPUT, tools=[called, called])[1]
    assert error["message"] == "tools.1.name: 'max_tokens' is given twice"


@pytest.mark.sweep
def test_a_key_reads_its_own_responses_alone() -> None:
    with running(api_key="one,two") as server:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        with httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE) as http:
            made = http.post(PATH, headers=one, json={"input": PROMPT, "max_output_tokens": 2}).json()
            assert http.get(f"{PATH}/{made['id']}", headers=one).json() == made
            assert http.get(f"{PATH}/{made['id']}", headers=two).status_code == 404
            assert http.get(f"{PATH}/{made['id']}").status_code == 401
