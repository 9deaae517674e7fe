"""What routers ask of a server: vllm-router 0.1.17, smg 1.13.0 and sglang-router 0.3.2 (recorded, and
themselves where they are installed), and llm-d (the names of its documentation, which docs/deploy.md lists).
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, BadRequestError, OpenAI

from idlm.infer.cli.config import read_arguments
from idlm.infer.server.config import ServeConfig
from idlm.infer.server.errors import ApiError
from idlm.infer.server.protocol.requests import ChatRequest
from idlm.infer.server.run import FrontEnd
from idlm.text.tokenizer import encode_messages
from tests.integration.server.servers import (
    CALLER_WORDS,
    PATIENCE,
    PROMPT,
    Client,
    Running,
    caller,
    checkpoint,
    commanded,
    reference,
    running,
)

pytestmark = pytest.mark.sweep

KEY = "the-key"
DEPLOY = Path(__file__).resolve().parents[3] / "docs" / "deploy.md"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
ADDED_TO_CHATS = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    # vllm-router alone.
    "include_reasoning": True,
    # smg adds no others than these.
    "logprobs": False,
    "stream": False,
}
"""Fields that vllm-router and sglang-router add to every chat; they add some of them to completions."""
QUESTION: Any = [{"role": "user", "content": "Which town?"}]
TOWN: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ANSWERED = "So<tool_call>"
INSTALLS = {
    "vllm_router": "pip install vllm-router==0.1.17",
    "smg": "pip install smg==1.13.0",
    "sglang_router": "pip install sglang-router==0.3.2 (not beside smg: both install a command smg)",
}
TOOL: Any = {"type": "function", "function": {"name": "town", "description": "A town.", "parameters": TOWN}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("sampling.max_tokens=9", "sampling.temperature=0", api_key=KEY) as found:
        yield found


def test_the_server_describes_itself_before_its_engine_is_ready() -> None:
    """The router asks once, when /health answers; else it calls the model `unknown` for ever."""
    arguments = [f"model={checkpoint()}", "served_model_name=mine"]
    shown = FrontEnd(*read_arguments("serve", ServeConfig, arguments)).service.describe()
    assert (shown["model_path"], shown["served_model_name"], shown["engine"]) == (
        str(checkpoint()),
        "mine",
        None,
    )


def test_what_the_router_adds_to_requests_changes_nothing(server: Running) -> None:
    chat = {"messages": MESSAGES}
    plain, routed = (
        server.client.post("/v1/chat/completions", json=body).json()["choices"]
        for body in (chat, chat | ADDED_TO_CHATS)
    )
    assert plain == routed
    for field, value in (("no_stop_trim", True), ("return_hidden_states", True)):
        status, error = server.refusal(prompt=PROMPT, **{field: value})
        assert (status, error["param"]) == (400, field)


def test_the_tokenizer_is_served_as_vllm_serves_it(server: Running) -> None:
    tokenizer = reference().tokenizer
    for text in ("Mia has 5", "", "Mia has 5 nuts. " * 200):
        bare = tokenizer.encode(text, add_special_tokens=False)
        for fields, ids in (({}, [tokenizer.bos_token_id, *bare]), ({"add_special_tokens": False}, bare)):
            body = {"prompt": text, "return_token_strs": True, **fields}
            found = server.client.post("/tokenize", json=body).json()
            assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 160)
            assert "".join(found["token_strs"]) == tokenizer.decode(ids)
            again = server.client.post("/detokenize", json={"tokens": ids, "model": None})
            assert again.json() == {"prompt": tokenizer.decode(ids)}
    assert server.client.get("/tokenizer_info").json()["eos_token"] == tokenizer.eos_token
    body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    for opens in (True, False):
        ids = encode_messages(tokenizer, MESSAGES, open_turn=opens, enable_thinking=False)
        answer = server.client.post("/tokenize", json={**body, "add_generation_prompt": opens})
        assert answer.json() == {"count": len(ids), "max_model_len": 160, "tokens": ids, "token_strs": None}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "mode": 1}, "mode"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "messages.0.role"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ):
        status, error = server.refusal(path, **body)
        assert (status, error["param"]) == (404 if param == "model" else 400, param)


def test_probes_by_head_are_answered_as_those_by_get(server: Running) -> None:
    for path in ("/health", "/ready", "/v1/models", "/version"):
        whole, head = server.client.get(path), server.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
    assert server.client.head("/v1/completions").status_code == 405


def test_the_older_name_of_model_info_is_served(server: Running) -> None:
    answers = [server.client.get(path) for path in ("/model_info", "/get_model_info")]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()


def test_a_router_with_the_key_may_send_it_next_to_the_clients(server: Running) -> None:
    right, wrong = ("authorization", f"Bearer {KEY}"), ("authorization", "Bearer x")
    with httpx.Client(base_url=server.url, trust_env=False) as keyless:
        for headers, status in (
            ([right, right], 200),
            ([right, wrong], 401),
            ([wrong, right], 401),
            ([], 401),
        ):
            assert keyless.get("/v1/models", headers=headers).status_code == status


def test_metrics_have_every_name_that_llm_d_and_the_alerts_read(server: Running) -> None:
    section = DEPLOY.read_text(encoding="utf-8").partition("## llm-d")[2].partition("\n## ")[0]
    names = re.findall(r"^\| \w+ \| `(vllm:\w+)`", section, re.MULTILINE)
    assert len(names) == 5
    server.completion(prompt=PROMPT)
    text = server.client.get("/metrics").text
    named = {*names, *re.findall(r"\b(?:vllm|idlm):\w+", DEPLOY.read_text(encoding="utf-8"))}
    assert not [name for name in named if not re.search(rf"^{name}\{{", text, re.MULTILINE)]


def test_the_size_of_the_kv_cache_is_told_in_labels(server: Running) -> None:
    engine = server.client.get("/server_info").json()["engine"]
    labels = {"block_size": str(engine["page_size"]), "num_gpu_blocks": str(engine["num_pages"])}
    assert server.metric("vllm:cache_config_info", **labels) == 1


def test_a_thought_that_a_router_renames_is_the_same() -> None:
    """vllm-router sends `reasoning_content` on as `reasoning`, and leaves out what is null."""

    def shown(**fields: str) -> list[dict[str, Any]]:
        message = {"role": "assistant", **fields}
        body = ChatRequest.model_validate({"messages": [*QUESTION, message, *QUESTION]})
        body.check()
        return body.plain_messages()

    assert (
        shown(reasoning="why")
        == shown(reasoning_content="why")
        == shown(reasoning="why", reasoning_content="why")
    )
    with pytest.raises(ApiError, match="differs from reasoning_content"):
        shown(reasoning="why", reasoning_content="why not")


@contextlib.contextmanager
def routing(name: str, *urls: str) -> Iterator[Client]:
    """A router before these servers, ready; it has their key."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [str(each.getsockname()[1]) for each in (one, two)]
    command = [sys.executable, "-m", f"{name}.launch_router", "--host", "127.0.0.1", "--port", ports[0]]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", ports[1], "--policy", "round_robin"]
    command += ["--api-key", KEY, "--health-check-endpoint", "/ready", "--health-check-interval-secs", "1"]
    process = subprocess.Popen([*command, "--worker-urls", *urls], stdout=subprocess.DEVNULL)
    try:
        router = Client(f"http://127.0.0.1:{ports[0]}", KEY)
        router.wait_until(lambda: is_routing(router, len(urls)))
        yield router
        router.client.close()
    finally:
        process.terminate()
        process.wait(PATIENCE)


def is_routing(router: Client, num_healthy: int) -> bool:
    """Whether the router has this many healthy servers."""
    try:
        return router.client.get("/readiness").json()["healthy_workers"] == num_healthy
    except (httpx.TransportError, KeyError):
        return False


def check_forwarding(name: str, router: Client, model: str) -> None:
    """Chats, streams, calls, turns with reasoning and completions come as if there were no router."""
    client = OpenAI(base_url=f"{router.url}/v1", api_key=KEY, timeout=PATIENCE, max_retries=0)
    fields: Any = {"model": model, "messages": QUESTION}
    assert [each.id for each in client.models.list().data] == [model]
    answer = client.chat.completions.create(**fields).choices[0].message
    assert ANSWERED in (answer.content or "") and answer.reasoning_content == "why"  # type: ignore[attr-defined]
    parts = list(client.chat.completions.create(stream=True, **fields))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == answer.content
    for choice in ("auto", "required"):
        called = client.chat.completions.create(tools=[TOOL], tool_choice=choice, **fields).choices[0]
        assert [call.function.name for call in called.message.tool_calls or ()] == ["town"]
    result = {"role": "tool", "tool_call_id": called.message.tool_calls[0].id, "content": "noted"}  # type: ignore[index]
    turns = [*QUESTION, answer.model_dump(exclude_none=True), *QUESTION, called.message.model_dump(), result]
    assert client.chat.completions.create(model=model, messages=turns, tools=[TOOL]).choices[0].finish_reason
    chosen = client.chat.completions.create(
        **fields, extra_body={"structured_outputs": {"choice": ["a", "b"]}}
    )
    assert (chosen.choices[0].message.content in ("a", "b")) == (name != "sglang_router")
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "town", "schema": TOWN}}
    formed = client.chat.completions.create(response_format=wanted, **fields).choices[0].message.content
    assert json.loads(formed or "")["city"] in ("Rome", "Oslo")
    texts = client.completions.create(model=model, prompt=["Rome", "Oslo"], max_tokens=3, logprobs=1)
    assert len(texts.choices) == 2
    with pytest.raises(BadRequestError, match="presence_penalty"):
        client.chat.completions.create(presence_penalty=3, **fields)


def check_cut_stream(router: Client, model: str, process: subprocess.Popen[str]) -> None:
    """Of two streams the one whose server is killed ends in an error, and the router keeps the other."""
    client = OpenAI(base_url=f"{router.url}/v1", api_key=KEY, timeout=PATIENCE, max_retries=0)
    fields: Any = {"model": model, "messages": QUESTION, "stream": True, "max_tokens": 700}
    streams = [client.chat.completions.create(**fields, extra_body={"ignore_eos": True}) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    process.kill()
    ends = []
    for stream in streams:
        try:
            ends.append([chunk.choices[0].finish_reason for chunk in stream][-1])
        except (APIError, httpx.RemoteProtocolError):
            ends.append("cut")
    assert sorted(map(str, ends)) == ["cut", "length"]
    router.wait_until(lambda: is_routing(router, 1))
    for _ in range(3):
        assert (
            client.chat.completions.create(model=model, messages=QUESTION).choices[0].finish_reason == "stop"
        )


TOWN_WORDS = (*CALLER_WORDS, "served_model_name=town")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Running, Running]]:
    with (
        running(*TOWN_WORDS, model=caller(), api_key=KEY) as one,
        running(*TOWN_WORDS, model=caller(), api_key=KEY) as two,
    ):
        yield one, two


@pytest.mark.parametrize("name", ["vllm_router", "smg", "sglang_router"])
def test_a_router_forwards_requests(name: str, pair: tuple[Running, Running]) -> None:
    pytest.importorskip(name, reason=INSTALLS[name])
    before = [each.metric("vllm:request_success_total") for each in pair]
    with routing(name, *(each.url for each in pair)) as router:
        check_forwarding(name, router, "town")
    after = [each.metric("vllm:request_success_total") for each in pair]
    assert all(now > then + 2 for then, now in zip(before, after, strict=True))


def test_a_router_survives_a_server(pair: tuple[Running, Running]) -> None:
    pytest.importorskip("smg", reason=INSTALLS["smg"])
    with (
        commanded(f"model={caller()}", *TOWN_WORDS, api_key=KEY) as (other, process),
        routing("smg", pair[0].url, other.url) as router,
    ):
        check_cut_stream(router, "town", process)
