"""What the server refuses: requests without the key, too large ones, and bodies that make no sense. Each 4xx
names the field and the rule; no request gets a 5xx."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.serve import serve
from idlm.infer.server import guard
from idlm.infer.server.app import routes
from idlm.infer.server.config import ServeConfig
from idlm.infer.server.errors import ApiError
from idlm.infer.server.guard import OPEN_PATHS, Guard
from idlm.infer.server.metrics import Metrics
from idlm.infer.server.page import FILES
from idlm.infer.server.protocol.body import NEUTRAL
from idlm.infer.server.protocol.requests import ChatRequest, CompletionRequest
from idlm.infer.server.run import check_address
from idlm.infer.server.service import Service
from tests.integration.server.bad_fields import BAD_FIELDS, CALL, CHAT, COMPLETIONS, VALID
from tests.integration.server.servers import PATIENCE, Running, checkpoint, running

KEY = "a-key-of-this-test"
MAX_BODY, MAX_HEADER = 20_000, 2000
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = (f"max_body={MAX_BODY}", "max_n=3", "max_prompts=6", "max_length=48", "sampling.max_tokens=3")
    with running(*limits, "max_waiting=1", f"max_header={MAX_HEADER}", api_key=KEY) as found:
        yield found
        assert found.front.service.client.num_restarts == 0


def test_every_route_but_health_ready_and_the_page_needs_the_key(server: Running) -> None:
    table = [
        (route.path, method) for route in routes(server.front.service).routes for method in route.methods
    ]  # type: ignore[attr-defined]
    assert {(CHAT, "POST"), ("/metrics", "GET"), ("/openapi.json", "GET"), ("/server_info", "GET")} <= set(
        table
    )
    public = OPEN_PATHS | {*FILES}
    with httpx.Client(base_url=server.url, trust_env=False) as keyless:
        for path, method in [
            *table,
            ("/", "GET"),
            ("/nowhere", "PUT"),
            ("/health/", "GET"),
            ("//ready", "GET"),
        ]:
            for key in (None, "Bearer", f"Bearer {KEY}x", KEY, "Bearer \xff"):
                headers = {} if key is None else {"authorization": key.encode("latin-1")}
                response = keyless.request(method, server.url + path, headers=headers)
                assert (response.status_code == 401) == (path not in public), (path, method, key)
            allowed = server.client.request(method, path)
            assert allowed.status_code != 401 and allowed.status_code < 500, (path, method)
        lower = keyless.get("/v1/models", headers={"authorization": f"bearer {KEY}"})
        assert lower.status_code == 200, "the name of a scheme has no case"
    assert KEY not in server.client.get("/server_info").text


def test_the_key_goes_with_every_address_but_this_machine() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        check_address(host, None)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        check_address(host, KEY)
        with pytest.raises(UserError, match="IDLM-0702"):
            check_address(host, None)


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("port=70000", "IDLM-0101"),
        ("max_n=0", "IDLM-0101"),
        ("allowed_origins=[https://a.org/]", "IDLM-0101"),
        ("host=no.such.host.invalid", "IDLM-0703"),
    ],
)
def test_options_of_the_command_are_checked(word: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDLM_API_KEY", KEY)
    with pytest.raises(UserError, match=code):
        serve([f"model={checkpoint()}", word])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    BAD_FIELDS,
)
def test_a_refusal_names_the_field_and_the_rule(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    response = server.client.post(path, content=json.dumps(body), headers=JSON)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ") and len(error["message"]) > len(param) + 5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "add_special_tokens": True}),
        (COMPLETIONS, {"prompt": [5], "add_special_tokens": False}),
        (CHAT, {**VALID[CHAT], "add_special_tokens": False}),
    ],
)
def test_special_tokens_are_those_of_the_endpoint(server: Running, path: str, body: dict[str, Any]) -> None:
    response = server.client.post(path, content=json.dumps(body), headers=JSON)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "nut " * 4000}]}),
        (COMPLETIONS, {"prompt": [3] * 48}),
        (COMPLETIONS, {"prompt": ["a", "nut " * 60], "stream": True}),
    ],
)
def test_a_prompt_beyond_the_context_has_the_code_by_which_clients_shorten_it(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    status, error = server.refusal(path, **body)
    assert (status, error["code"], error["idlm_code"]) == (400, "context_length_exceeded", "IDLM-0412")
    assert "this model's maximum context length is 48 tokens" in error["message"]


def test_openai_has_codes_for_models_keys_and_full_queues(server: Running) -> None:
    assert server.refusal(COMPLETIONS, prompt="a", model="another")[1]["code"] == "model_not_found"
    assert server.client.get("/v1/models/another").json()["error"]["code"] == "model_not_found"
    for path, param in (("/v1/embeddings", "path"), ("/v1/models", "method")):
        error = server.refusal(path)[1]
        assert error["message"] == f"{param}: POST {path} is not served here; GET /docs lists the routes"
    assert server.client.get("/v1//models/?a=1").json()["object"] == "list"
    keyless = httpx.get(f"{server.url}/v1/models", trust_env=False)
    assert keyless.json()["error"]["code"] == "invalid_api_key"
    error = ApiError(429, "full", code="queue_full").body()["error"]
    assert (error["code"], error["idlm_code"]) == ("rate_limit_exceeded", "queue_full")


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        (
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}},
            "type",
            "images are not supported",
        ),
        ({"type": "poem", "text": "a"}, "type", "parts of type 'poem' are not supported"),
    ],
)
def test_parts_of_messages_are_text(server: Running, part: dict[str, Any], param: str, words: str) -> None:
    """Nothing is fetched."""
    content = [{"type": "text", "text": "See: "}, part]
    status, error = server.refusal(CHAT, messages=[{"role": "user", "content": content}])
    assert (status, error["param"]) == (400, f"messages.0.content.1.{param}") and words in error["message"]


def test_an_answer_with_less_room_than_max_tokens_says_so(server: Running) -> None:
    for max_tokens, words in ((47, "max_tokens=47, but the context of 48 tokens leaves 44"), (4, None)):
        answer = server.client.post(COMPLETIONS, json={"prompt": [3] * 4, "max_tokens": max_tokens})
        assert answer.status_code == 200 and (words or "") in answer.headers.get("warning", "")
        assert ("warning" in answer.headers) == (words is not None)


def test_the_root_says_where_to_go_on(server: Running) -> None:
    about = server.client.get("/docs").json()
    assert (about["status"], about["schema"]) == ("ready", "/openapi.json")
    assert {CHAT, COMPLETIONS, "/metrics"} <= {*about["routes"]}


def test_the_page_runs_no_script_but_its_own(server: Running) -> None:
    for path in FILES:
        response = server.client.get(path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["content-type"].startswith("text/") and response.content
    html = server.client.get("/").text
    assert not re.search(r"<script(?! type=\"module\" src=)|<style| style=| on\w+=", html)
    used = re.findall(r'(?:src|href)="(page/[^"]+)"', html)
    modules = [server.client.get(path).text for path in FILES if path.endswith(".js")]
    used += [f"page/{name}" for text in modules for name in re.findall(r'from "\./([^"]+)"', text)]
    assert {f"/{name}" for name in used} | {"/"} == {*FILES}
    mounted = Starlette(routes=[Mount("/below", routes(server.front.service))])
    assert TestClient(mounted).get("/below/page/main.js").text in modules


def test_without_the_page_the_root_says_where_to_go_on() -> None:
    """Its routes, of a server whose engine does not run."""
    service = Service(ServeConfig(page=False), None, Metrics("x"), "x")  # type: ignore[arg-type]
    paths = [route.path for route in routes(service).routes]  # type: ignore[attr-defined]
    assert "/" in paths and not {*FILES} & {*paths} - {"/"}
    guard = Guard(routes(service), ServeConfig(page=False), api_key=KEY, observe=lambda _: None)
    assert guard.public == OPEN_PATHS


def test_fields_that_ask_for_nothing_are_taken(server: Running) -> None:
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    absent = dict.fromkeys(("audio", "max_tokens", "n")) | {"transforms": [], "provider": {}, "suffix": ""}
    body = {**VALID[CHAT], **neutral, **absent, "user": "me", "metadata": {}}
    assert server.client.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low", "store": True, "service_tier": "auto", "metadata": {"a": "b"}},
        {"seed": -1, "verbosity": "medium", "prediction": {"type": "content", "content": "5"}},
        *(
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", **turn}]}
            for turn in (
                {"content": "5", "annotations": [], "refusal": None, "audio": None, "function_call": None},
                {"content": None, "tool_calls": []},
                {"content": None, "reasoning_content": "5"},
                {"content": None, "tool_calls": [{**CALL, "index": 0}], "provider_specific_fields": {}},
                {"content": [{"type": "text", "text": "5", "cache_control": {"type": "ephemeral"}}]},
                {"content": ["5", {"type": "output_text", "text": "6", "annotations": []}]},
                {"content": [{"type": "refusal", "refusal": "No."}]},
                {"content": None, "refusal": "No.", "parsed": {"a": 1}, "id": "msg_1", "type": "message"},
                {"content": None},
                {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
                {"content": "5", "images": [], "thinking_blocks": [{"type": "thinking"}], "timestamp": 1},
            )
        ),
        {"max_tokens": 2.0, "n": 1.0, "top_k": 5.0, "seed": 3.0, "documents": [], "bad_words": []},
    ],
    ids=str,
)
def test_fields_of_clients_that_mean_nothing_here_are_taken(server: Running, fields: dict[str, Any]) -> None:
    response = server.client.post(CHAT, json={**VALID[CHAT], **fields})
    assert response.status_code == 200, response.text


def test_defaults_yield_to_a_request_that_excludes_them() -> None:
    defaults = SamplingParams(min_tokens=10, no_repeat_ngram_size=3)
    for fields, expected in (
        ({}, (10, 3)),
        ({"max_tokens": 5}, (5, 3)),
        ({"structured_outputs": {"regex": "a"}}, (10, 0)),
    ):
        found = CompletionRequest(prompt="x", **fields).params(defaults)
        assert (found.min_tokens, found.no_repeat_ngram_size) == expected


def test_an_effort_goes_to_templates_that_have_a_place_for_it() -> None:
    body = ChatRequest.model_validate({**VALID[CHAT], "reasoning_effort": "low"})
    assert body.template_kwargs({"reasoning_effort"}) == {"reasoning_effort": "low"}
    assert body.template_kwargs({"messages"}) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}",
    ],
    ids=repr,
)
def test_broken_bodies_are_refused(server: Running, content: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        response = server.client.post(path, content=content, headers=JSON)
        error = response.json()["error"]
        assert (response.status_code, bool(error["param"]), bool(error["message"])) == (400, True, True)


def test_other_content_types_are_refused(server: Running) -> None:
    """A page of another site can send such a body from a browser without asking."""
    for headers in ({"content-type": "text/plain"}, {}):
        response = server.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "body"


def test_a_compressed_body_and_a_wrong_method_are_told_what_is_taken(server: Running) -> None:
    body, headers = gzip.compress(b'{"prompt": "a"}'), {**JSON, "content-encoding": "gzip"}
    response = server.client.post(COMPLETIONS, content=body, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (415, "content-encoding")
    response = server.client.get(COMPLETIONS)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_a_large_body_is_refused_with_and_without_its_length(server: Running) -> None:
    large = json.dumps({"prompt": "a" * MAX_BODY}).encode()

    def pieces() -> Iterator[bytes]:
        yield from (large[start : start + 1000] for start in range(0, len(large), 1000))

    for content in (large, pieces()):
        response = server.client.post(COMPLETIONS, content=content, headers=JSON)
        assert response.status_code == 413
        assert response.json()["error"]["param"] == "body"


@pytest.mark.parametrize("size", [MAX_HEADER // 2, MAX_HEADER])
def test_complete_headers_have_a_limit(server: Running, size: int) -> None:
    for answer in (
        server.client.get("/health", headers={"x": "a" * size}),
        server.client.get("/health", params={"x": "a" * size}),
        server.client.get(f"/v1/models/{'a' * size}"),
    ):
        assert (answer.status_code == 431) == (size == MAX_HEADER)
        assert answer.status_code == 200 or answer.json()["error"]["param"] in ("header", "model")


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        (b"\x00\x01\r\n\r\n", 400, "header"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "header"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 400, "header"),
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * 3 * MAX_HEADER, 431, "header"),
        (b"POST /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nz\r\n", 400, "body"),
        *(
            (b"POST /health HTTP/1.1\r\nhost: x\r\n" + smuggled + b"\r\n\r\n", 400, "header")
            for smuggled in (
                b"content-length: 2\r\ncontent-length: 3",
                b"content-length: +2",
                b"content-length : 2",
                b"transfer-encoding: chunked, identity",
                b"x: a\0b",
                b"host: y",
            )
        ),
    ],
)
def test_what_is_no_http_is_refused_as_other_requests_are(
    server: Running, sent: bytes, status: int, param: str
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(1000), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"application/json" in head
    assert error["param"] == param and error["message"].startswith(f"{param}: ")


@pytest.mark.sweep
def test_slow_headers_and_bodies_end_the_connection(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(server.front.config, "timeout_keep_alive", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n".encode()
    whole = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    for sent, status in (
        (b"", b""),
        (head, b""),
        (whole + head, b"HTTP/1.1 200"),
        (head + b"content-length: 9\r\n\r\n{", b"HTTP/1.1 408"),
    ):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(sent)
            answer = b""
            while data := connection.recv(1000):
                answer += data
            assert answer.startswith(status) and bool(answer) == bool(status)


@pytest.mark.sweep
def test_a_client_that_reads_nothing_loses_its_connection(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "READ_SECONDS", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    connections = server.front.server_state.connections
    server.wait_until(lambda: len(connections) <= 1)
    idle = len(connections)
    question = f"GET /metrics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(question)
        server.wait_until(lambda: len(connections) > idle)
        # The server reads questions only while it can send answers, so these fill every buffer.
        with pytest.raises(OSError):
            while True:
                connection.sendall(question * 100)
        server.wait_until(lambda: len(connections) <= idle)
