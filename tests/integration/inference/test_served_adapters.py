"""A server of several gated adapters: `model` of a request names one, and all answer as the base does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import read_arguments
from idlm.infer.engine import Engine
from idlm.infer.server.config import ServeConfig
from tests.adapters import write_adapter
from tests.contracts.engines import clear_answers, greedy
from tests.integration.server.servers import PROMPT, SETTINGS, SPARE_ROW, TINY, Running, running

NAMES = ("first", "math", "law")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(home / name, TINY, mask_token_id=SPARE_ROW, stride=3, rank=3 + number, seed=number)
        for number, name in enumerate(NAMES)
    ]


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[Running]:
    given = (f"adapters.math={folders[1]}", f"adapters.law={folders[2]}")
    with running(f"base={TINY}", *given, model=folders[0]) as found:
        yield found


def test_a_request_names_an_adapter(server: Running, folders: list[Path]) -> None:
    base = Engine.from_pretrained(TINY, "ar", **SETTINGS)
    [expected] = clear_answers(base, [base.encode([PROMPT])[0]], greedy(max_tokens=20, ignore_eos=False))
    tested = set()
    for name in (*NAMES, None):
        message = [{"role": "user", "content": PROMPT}]
        body = {"messages": message, "temperature": 0, "max_tokens": 20} | ({"model": name} if name else {})
        answer = server.client.post("/v1/chat/completions", json=body).json()
        assert answer["model"] == (name or "first")
        assert answer["choices"][0]["message"]["content"] == expected.text
        tested.add(server.completion(prompt="a", temperature=0, max_tokens=20, model=name)["model"])
    assert tested == {*NAMES}


def test_models_are_listed(server: Running, folders: list[Path]) -> None:
    listed = server.client.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"]) for model in listed] == [*zip(NAMES, map(str, folders), strict=True)]
    assert server.client.get("/v1/models/law").json()["id"] == "law"
    status, error = server.refusal(prompt="a", model="art")
    assert (status, error["code"]) == (404, "model_not_found")
    assert "models are 'first', 'math' and 'law'" in error["message"]


def test_a_name_belongs_to_one_model(folders: list[Path]) -> None:
    with pytest.raises(UserError, match="adapters: 'first' is the name of model="):
        read_arguments("serve", ServeConfig, [f"model={folders[0]}", f"adapters={{first:{folders[1]}}}"])


def test_a_request_without_a_name_is_answered_by_the_adapter_of_the_servers_sampling(
    folders: list[Path], server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = server.front.service
    monkeypatch.setattr(service, "config", replace(service.config, sampling=SamplingParams(adapter="law")))
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
    }
    for path, body in bodies.items():
        answers = (server.client.post(path, json=body | {"model": name}).json() for name in (*NAMES, None))
        assert [answer["model"] for answer in answers] == [*NAMES, "law"]
        events = server.client.post(path, json=body | {"stream": True}).text.split("\n\n")
        read = [json.loads(event.partition("data: ")[2]) for event in events if event.endswith("}")]
        assert {each.get("response", each).get("model", "law") for each in read} == {"law"} and read
    with pytest.raises(UserError, match=r"sampling.adapter='art' is none of \['math'\]"):
        read_arguments(
            "serve",
            ServeConfig,
            [f"model={folders[0]}", f"adapters.math={folders[1]}", "sampling.adapter=art"],
        )
