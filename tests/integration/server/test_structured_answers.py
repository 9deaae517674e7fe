"""Structured output through the `openai` client: OpenAI's `response_format` and vLLM's extensions."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from idlm.infer.engine import Engine
from idlm.infer.request import ANONYMOUS
from idlm.infer.server.engine_process import EngineLoop, Inbox
from idlm.infer.server.messages import RECEIVE_BYTES, Stats, pack, read_event, unpacker
from idlm.text.tokenizer import load_tokenizer
from tests.integration.server.servers import (
    CALL,
    CALLER_VOCAB,
    CALLER_WORDS,
    PATIENCE,
    SETTINGS,
    TOOLS_GIVEN,
    Running,
    running,
)
from tests.integration.server.servers import TOOLS as TEMPLATE
from tests.small_tokenizers import CHATML, save_tagged
from tests.toy import write_chain, write_spelling_toy

pytestmark = pytest.mark.sweep

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich", "東京"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "maxItems": 2},
    },
    "required": ["city", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}
CHOICES = ["yes", "no", "日本"]
TOOLS: Any = [
    {"type": "function", "function": {"name": "place", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOWN: Any = {"type": "function", "function": {"name": "town", "parameters": PARAMETERS, "strict": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = write_spelling_toy(tmp_path_factory.mktemp("model") / "toy")
    (model / "chat_template.jinja").write_text(CHATML + TEMPLATE)
    with running("sampling.max_tokens=120", "tool_parser=hermes", "max_length=480", model=model) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=PATIENCE, max_retries=0)


def check(text: str | None) -> None:
    value = json.loads(text or "")
    assert list(value) == ["city", "sizes"] and value["city"] in ("Zürich", "東京")
    assert len(value["sizes"]) <= 2 and all(1 <= size <= 99 for size in value["sizes"])


def test_a_json_schema_is_kept_and_streamed(client: OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}
    settings: Any = {"model": "toy", "messages": MESSAGES, "seed": 3, "response_format": wanted}
    answer = client.chat.completions.create(**settings, n=4)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
    for choice in answer.choices:
        check(choice.message.content)
    chunks = client.chat.completions.create(**settings, stream=True)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize(
    "extension",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
)
def test_extensions_for_schemas(client: OpenAI, extension: dict[str, Any]) -> None:
    answer = client.chat.completions.create(model="toy", messages=MESSAGES, extra_body=extension)
    check(answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("name", "value"),
    [("choice", CHOICES), ("regex", "yes|no|日本"), ("grammar", 'start: "yes" | "no" | "日本"')],
)
def test_extensions_for_other_constraints(client: OpenAI, name: str, value: Any) -> None:
    for extension in ({f"guided_{name}": value}, {"structured_outputs": {name: value}}):
        answer = client.completions.create(model="toy", prompt="Hi", n=4, extra_body=extension)
        assert {choice.text for choice in answer.choices} <= set(CHOICES)
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_any_json_object_and_plain_text(client: OpenAI) -> None:
    settings: Any = {"model": "toy", "messages": MESSAGES, "seed": 1}
    plain = client.chat.completions.create(**settings)
    text = client.chat.completions.create(**settings, response_format={"type": "text"})
    assert text.choices[0].message.content == plain.choices[0].message.content
    [found] = client.chat.completions.create(**settings, response_format={"type": "json_object"}).choices
    assert (found.message.content or "").lstrip().startswith("{")


def calls_of(message: Any) -> list[str]:
    """Names of the calls, whose arguments follow their schemas."""
    for call in message.tool_calls or ():
        if call.function.name == "place":
            check(call.function.arguments)
        else:
            assert json.loads(call.function.arguments) == {}
    return [call.function.name for call in message.tool_calls or ()]


def test_tools_that_must_be_called(client: OpenAI) -> None:
    settings: Any = {"model": "toy", "messages": MESSAGES, "tools": TOOLS, "seed": 3}
    single: Any = {"tool_choice": "required", "parallel_tool_calls": False, "n": 6}
    answer = client.chat.completions.create(**settings, **single)
    names = [calls_of(choice.message) for choice in answer.choices]
    assert {len(each) for each in names} == {1}
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    assert {choice.message.content for choice in answer.choices} == {None}
    several = client.chat.completions.create(**settings, tool_choice="required", n=3)
    assert all(calls_of(choice.message) for choice in several.choices)
    named: Any = {"tool_choice": {"type": "function", "function": {"name": "place"}}}
    [choice] = client.chat.completions.create(**settings, **named).choices
    assert calls_of(choice.message) == ["place"]
    parts = [
        call.function
        for chunk in client.chat.completions.create(**settings, **named, stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    [whole] = choice.message.tool_calls or ()
    assert [part.name for part in parts if part is not None and part.name] == ["place"]
    assert "".join(part.arguments or "" for part in parts if part is not None) == whole.function.arguments  # type: ignore[union-attr]


def test_strict_tools_leave_text_free(client: OpenAI) -> None:
    """Random weights call nothing; what a call must look like is tested in tests/contracts/structured."""
    settings: Any = {"model": "toy", "messages": MESSAGES, "seed": 3, "max_tokens": 20}
    strict = client.chat.completions.create(**settings, tools=TOOLS).choices[0]
    assert strict.message.content and not strict.message.tool_calls
    with pytest.raises(BadRequestError) as found:
        broken: Any = {"type": "object", "properties": {"a": {"type": "frob"}}}
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": broken, "strict": True}}]
        client.chat.completions.create(**settings, tools=tools)
    assert (found.value.param, found.value.code) == ("tools", "IDLM-0474")


def asked(model: Path, *requests: dict[str, Any]) -> Iterator[Any]:
    """The choice of each request to a server of the model, whole and streamed, which are the same."""
    with running(*CALLER_WORDS, model=model) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=PATIENCE, max_retries=0)
        for request in requests:
            settings: Any = {"model": model.name, "messages": MESSAGES, **request}
            choice = client.chat.completions.create(**settings).choices[0]
            parts: dict[str, str] = {"content": "", "reasoning_content": "", "arguments": ""}
            for chunk in client.chat.completions.create(**settings, stream=True):
                delta = chunk.choices[0].delta.model_dump()
                calls = [call["function"] for call in delta.get("tool_calls") or ()]
                for name, value in [*delta.items(), *(pair for call in calls for pair in call.items())]:
                    parts |= {name: parts[name] + (value or "")} if name in parts else {}
            message = choice.message.model_dump()
            called = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
            whole = {
                "arguments": "".join(called),
                **{key: message.get(key) or "" for key in parts if key != "arguments"},
            }
            assert parts == whole
            yield choice


def test_reasoning_that_the_prompt_opens_precedes_what_is_constrained(tmp_path: Path) -> None:
    model = save_tagged(tmp_path / "thinker", words=["why", "\n\nSo", CALL])
    opened = CHATML.replace("assistant\n", "assistant\n<think>\n")
    (model / "chat_template.jinja").write_text(TOOLS_GIVEN + opened)
    chain = ["\n", "why", "</think>", "\n\nSo", "<tool_call>", CALL, "</tool_call>", "<|im_end|>"]
    ids = load_tokenizer(model).encode("".join(chain), add_special_tokens=False)
    write_chain(model, ids, vocab_size=CALLER_VOCAB)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["So"]}}}
    choices = {"structured_outputs": {"choice": ["So", "Not so"]}}
    free, chosen, formed, called = asked(
        model,
        {},
        {"extra_body": choices},
        {"response_format": schema},
        {"tools": [TOWN], "tool_choice": "required"},
    )
    assert {each.message.reasoning_content for each in (free, chosen, formed, called)} == {"why"}
    assert [each.message.content for each in (free, chosen, formed, called)] == [
        f"So<tool_call>{CALL}</tool_call>",
        "So",
        '"So"',
        None,
    ]
    assert called.message.tool_calls[0].function.arguments == '{"city": "Rome"}'
    assert [each.finish_reason for each in (free, formed, called)] == ["stop", "stop", "tool_calls"]


def test_calls_of_another_family(tmp_path: Path) -> None:
    """As Llama writes them, whose tag is a special token."""
    call = '{"name": "town", "parameters": {"city": "Rome"}}'
    model = save_tagged(tmp_path / "llama", words=[call], special_words=["<|python_tag|>"])
    written = '{% if tools %}<|start_header_id|>{{ tools | tojson }} "parameters": {% endif %}'
    (model / "chat_template.jinja").write_text(written + CHATML)
    ids = load_tokenizer(model).encode(f"\n<|python_tag|>{call}<|im_end|>", add_special_tokens=False)
    assert len(ids) == 4
    write_chain(model, ids, vocab_size=CALLER_VOCAB)
    for choice in asked(model, {"tools": [TOWN]}, {"tools": [TOWN], "parallel_tool_calls": False}):
        [found] = choice.message.tool_calls
        assert (found.function.name, found.function.arguments) == ("town", '{"city": "Rome"}')
        assert choice.message.content is None and choice.finish_reason == "tool_calls"


def test_only_their_own_requests_wait_for_grammars(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers others meanwhile; a request that was aborted is not queued any more."""
    model = server.client.get("/model_info").json()["model_path"]
    engine = Engine.from_pretrained(model, "ar", **SETTINGS)
    grammars = {text: Future[Any]() for text in ("yes|no", "0|1", "a|b")}
    monkeypatch.setattr(
        engine,
        "begin_grammar",
        lambda params: grammars[params.constraint.text] if params.constraint else None,
    )
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE)
    messages = unpacker()
    shown: list[tuple[str, str]] = []
    num_waiting: list[int] = []

    def read_until(end: tuple[str, str]) -> None:
        while end not in shown:
            messages.feed(ours.recv(RECEIVE_BYTES))
            for message in messages:
                finished = [read_event(fields) for fields in message.get("events", ())]
                shown.extend(("done", one.request_id) for one in finished if one.figures is not None)
                shown.append((message["type"], message.get("id", "")))
                if message["type"] == "step":
                    num_waiting.append(Stats(*message["stats"]).num_waiting)

    loop = threading.Thread(target=EngineLoop(engine, Inbox(theirs), theirs).run)
    loop.start()
    with theirs:
        with ours:
            wanted = {"slow": "yes|no", "gone": "yes|no", "alone": "0|1", "plain": None, "long": "a|b"}
            for name, text in wanted.items():
                params = {"max_tokens": 4, "constraint": text and {"kind": "regex", "text": text}, "n": 2}
                prompt_ids = [5, 6] * (1000 if name == "long" else 1)
                fields = {"prompt_ids": prompt_ids, "params": params, "turn": ANONYMOUS}
                ours.sendall(pack({"type": "add", "id": name} | fields))
            for name in ("gone", "alone"):
                ours.sendall(pack({"type": "abort", "id": name}))
            read_until(("done", "plain"))
            assert ("refused", "long") in shown, "before its grammar is compiled"
            assert ("added", "slow") not in shown
            assert max(num_waiting) == 6
            assert num_waiting[-1] == 2
            assert grammars["0|1"].cancelled()
            trial = SimpleNamespace(is_on_trial=False)
            grammars["yes|no"].set_result(SimpleNamespace(notes=(), cost=trial))
            read_until(("done", "slow"))
            assert ("added", "slow") in shown and ("added", "gone") not in shown
            assert num_waiting[-1] == 0
        loop.join(PATIENCE)
    assert not loop.is_alive()
