"""What routers ask of a server: sglang-router 0.3.2 (recorded, and itself where it is installed), and llm-d
(the names of its documentation, which docs/deploy.md lists).
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from idlm.infer.cli.config import read_arguments
from idlm.infer.server.config import ServeConfig
from idlm.infer.server.run import FrontEnd
from tests.integration.server.servers import PATIENCE, PROMPT, Client, Running, checkpoint, running

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
}
"""Fields that sglang-router 0.3.2 adds to every chat; it adds some of them to completions."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("sampling.max_tokens=9", "sampling.temperature=0", api_key=KEY) as found:
        yield found


def test_the_server_describes_itself_before_its_engine_is_ready() -> None:
    """The router asks once, when /health answers; else it calls the model `unknown` for ever."""
    arguments = [f"model={checkpoint()}", "served_model_name=mine"]
    told = FrontEnd(*read_arguments("serve", ServeConfig, arguments)).service.describe()
    assert (told["model_path"], told["served_model_name"], told["engine"]) == (
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


@contextlib.contextmanager
def routing(*urls: str) -> Iterator[Client]:
    """sglang-router before these servers, ready; it has their key."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [str(each.getsockname()[1]) for each in (one, two)]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", ports[0]]
    command += ["--prometheus-port", ports[1], "--policy", "round_robin", "--api-key", KEY]
    command += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "1"]
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


def test_sglang_router_routes_streams_and_survives_a_server(server: Running) -> None:
    pytest.importorskip("sglang_router", reason="pip install sglang-router==0.3.2")
    ask: Any = {"model": "tiny", "messages": MESSAGES}
    direct = OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=PATIENCE).chat.completions.create(**ask)
    with (
        running("sampling.max_tokens=9", "sampling.temperature=0", api_key=KEY) as other,
        routing(server.url, other.url) as router,
    ):
        client = OpenAI(base_url=f"{router.url}/v1", api_key=KEY, timeout=PATIENCE, max_retries=0)
        assert [model.id for model in client.models.list().data] == ["tiny"]
        before = [each.metric("vllm:request_success_total") for each in (server, other)]
        for _ in range(4):
            answer = client.chat.completions.create(**ask)
            assert answer.choices[0].message.content == direct.choices[0].message.content
        parts = list(client.chat.completions.create(stream=True, **ask))
        streamed = "".join(part.choices[0].delta.content or "" for part in parts)
        assert streamed == direct.choices[0].message.content
        after = [each.metric("vllm:request_success_total") for each in (server, other)]
        assert all(late > early for early, late in zip(before, after, strict=True))
        other.front.stop()
        router.wait_until(lambda: is_routing(router, 1))
        for _ in range(3):
            assert client.chat.completions.create(**ask).choices[0].finish_reason
