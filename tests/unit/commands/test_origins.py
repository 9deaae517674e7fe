"""Which pages may use `idlm-serve` from a browser."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import httpx
import pytest

from idlm.infer.cli.config import read_arguments
from idlm.infer.server.config import ServeConfig
from idlm.infer.server.run import FrontEnd

CHAT = "/v1/chat/completions"


@functools.cache
def front(*words: str) -> FrontEnd:
    config, arguments = read_arguments("serve", ServeConfig, [f"model={Path(__file__).parent}", *words])
    return FrontEnd(config, arguments, api_key="key")


def asked(method: str, origin: str, *words: str) -> httpx.Response:
    """The answer to a page of an origin; the server has a key, which the page does not send."""
    headers = {"origin": origin}
    if method == "OPTIONS":
        headers["access-control-request-method"] = "POST"
        headers["access-control-request-headers"] = "content-type,authorization"

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(front(*words).config.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, CHAT, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize("origin", ["http://localhost:5173", "https://127.0.0.1", "http://[::1]:80"])
def test_pages_of_this_machine_may(origin: str) -> None:
    preflight, refused = asked("OPTIONS", origin), asked("POST", origin)
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
    for response in (asked("OPTIONS", origin), asked("POST", origin)):
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
    response = asked("OPTIONS", origin, f"allowed_origins={word}")
    assert response.headers.get("access-control-allow-origin") == allowed
