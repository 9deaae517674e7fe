"""What `idlm-serve` prints: when it is ready, and a line for each request if it is asked to."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx
import pytest

from idlm.infer.cli.config import read_arguments
from idlm.infer.server.config import ServeConfig
from idlm.infer.server.messages import EngineInfo
from idlm.infer.server.run import FrontEnd

INFO = EngineInfo(
    directory="x",
    decoder="isd",
    stride=4,
    decoder_options={},
    settings={},
    exactness="exact",
    max_length=160,
    vocab_size=9,
    num_pages=1,
    page_size=1,
    pid=1,
)


def front(*words: str) -> FrontEnd:
    config, arguments = read_arguments("serve", ServeConfig, [f"model={Path(__file__).parent}", *words])
    return FrontEnd(config, arguments)


def test_a_server_that_is_ready_says_what_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    server = front()
    client = server.service.client

    async def load() -> None:
        task = asyncio.create_task(server._announce("http://127.0.0.1:8000"))
        await asyncio.sleep(0)
        assert not caplog.messages
        client.state, client.info, server.service._has_tokenizer = "ready", INFO, True
        await task

    with caplog.at_level(logging.INFO, "idlm"):
        asyncio.run(load())
    assert caplog.messages == ["ready after 0 s: decoder isd, stride 4, context 160, http://127.0.0.1:8000"]


@pytest.mark.parametrize("is_on", [True, False])
def test_requests_have_a_line_each(is_on: bool, caplog: pytest.LogCaptureFixture) -> None:
    server = front(f"log_requests={is_on}")

    async def fetch() -> None:
        transport = httpx.ASGITransport(server.config.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.get("/health")
            await client.get("/no%20where%1B")

    with caplog.at_level(logging.INFO, "idlm"):
        asyncio.run(fetch())
    lines = [line.rpartition(" in ")[0] for line in caplog.messages]
    expected = ["127.0.0.1 GET /health: 200", "127.0.0.1 GET /no%20where%1B: 404"]
    assert lines == (expected if is_on else [])
