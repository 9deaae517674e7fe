"""Structured output through the `openai` client: OpenAI's `response_format` and vLLM's extensions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.integration.server.servers import PATIENCE, Running, running
from tests.toy import write_spelling_toy

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = write_spelling_toy(tmp_path_factory.mktemp("model") / "toy")
    with running("sampling.max_tokens=60", model=model) as found:
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


def test_what_cannot_be_compiled_names_its_field(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as found:
        client.completions.create(
            model="toy", prompt="Hi", extra_body={"structured_outputs": {"regex": "((("}}
        )
    assert found.value.param == "structured_outputs.regex"
    assert found.value.code == "IDLM-0474" and "unclosed group" in str(found.value)
