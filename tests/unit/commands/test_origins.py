"""Which pages may use `idlm-serve` from a browser, and by which names it may be called."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import httpx
import pytest

from idlm.infer.cli.config import read_arguments
from idlm.infer.server.config import ServeConfig
from idlm.infer.server.run import FrontEnd
from tests.errors import refused

CHAT = "/v1/chat/completions"


@functools.cache
def front(*words: str, api_key: str | None = "key") -> FrontEnd:
    config, arguments = read_arguments("serve", ServeConfig, [f"model={Path(__file__).parent}", *words])
    return FrontEnd(config, arguments, api_key=api_key)


def answer_to(method: str, origin: str, *words: str) -> httpx.Response:
    """The answer to a page of an origin; the server has a key, which the page does not send."""
    headers = {"origin": origin}
    if method == "OPTIONS":
        headers["access-control-request-method"] = "POST"
        headers["access-control-request-headers"] = "content-type,authorization"

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(front(*words).config.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, CHAT, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize("origin", ["http://localhost:5173", "https://127.0.0.1", "http://[::1]:80"])
def test_pages_of_this_machine_may(origin: str) -> None:
    preflight, refused = answer_to("OPTIONS", origin), answer_to("POST", origin)
    assert (preflight.status_code, refused.status_code) == (200, 401)
    assert preflight.headers["access-control-allow-headers"] == "content-type,authorization"
    # A page may read why it is refused.
    for response in (preflight, refused):
        assert response.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "origin",
    ["https://example.org", "http://localhost.example.org", "http://localhost:1.example.org", "null"],
)
def test_pages_of_others_may_not(origin: str) -> None:
    for response in (answer_to("OPTIONS", origin), answer_to("POST", origin)):
        assert response.status_code in (400, 401)
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("word", "origin", "allowed"),
    [
        ("[https://a.org,https://b.org]", "https://b.org", "https://b.org"),
        ("['*']", "https://c.org", "*"),
        ("[https://a.org]", "http://localhost", None),
        ("[]", "http://localhost", None),
    ],
)
def test_origins_are_an_option(word: str, origin: str, allowed: str | None) -> None:
    response = answer_to("OPTIONS", origin, f"allowed_origins={word}")
    assert response.headers.get("access-control-allow-origin") == allowed


def called(host: str, *words: str, api_key: str | None = None, path: str = "/v1/models/x") -> httpx.Response:
    """The answer to a request whose Host header a client wrote."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(front(*words, api_key=api_key).config.app)  # type: ignore[arg-type]
        headers = {"host": host} | ({} if api_key is None else {"authorization": f"Bearer {api_key}"})
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(send())


ADDRESSES = ["127.0.0.1:8000", "[::1]:8000", "10.0.0.1", "LOCALHOST", "localhost."]
NAMES = ["127.0.0.1.evil.example:8000", "localhost.evil.example", "evil@evil.example", "[::1", ""]


@pytest.mark.parametrize("host", ADDRESSES)
def test_addresses_and_localhost_may_be_called_without_a_key(host: str) -> None:
    assert called(host).status_code == 404


@pytest.mark.parametrize("host", NAMES)
def test_a_name_that_resolves_to_this_machine_may_not(host: str) -> None:
    response = called(host, "allowed_hosts=[own.example]")
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (403, "host", "host_not_allowed")
    assert called(host).status_code == 403 and called(host, path="/health").status_code == 200


def test_the_ways_out_that_the_refusal_names_work() -> None:
    name = "Own.example:443"
    assert "allowed_hosts=[NAME] or with an API key" in called(name).json()["error"]["message"]
    assert called(name, "allowed_hosts=[own.EXAMPLE,b.example]").status_code == 404
    assert called(name, "allowed_hosts=['*']").status_code == 404
    assert called(name, api_key="key").status_code == 404
    # Given beside a key, the names hold too.
    assert called(name, "allowed_hosts=[]", api_key="key").status_code == 403
    refused("allowed_hosts: 'http://a' is no name of a host", front, "allowed_hosts=['http://a']")
