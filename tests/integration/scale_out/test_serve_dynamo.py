"""`recipes/serve_dynamo.py`: the engine answers requests in Dynamo's form, and behind Dynamo where it is
installed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from idlm.conf.recipe.serve_dynamo import Backend, Chunk, DynamoConfig, Request, params_of
from idlm.contracts import Completion, Constraint, SamplingParams
from idlm.infer.cli.config import read_arguments
from idlm.infer.server.errors import ApiError
from idlm.text.tokenizer import encode_messages, encode_prompt
from tests.contracts.engines import clear_answers
from tests.integration.server.servers import (
    PATIENCE,
    PROMPT,
    SETTINGS,
    SPARE_ROW,
    Client,
    checkpoint,
    reference,
)

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).resolve().parents[3]
WORDS = [*(f"{name}={value}" for name, value in SETTINGS.items()), "decoder=isd", "decoder.stride=3"]
MESSAGES = [{"role": "user", "content": PROMPT}]


def words() -> list[str]:
    return [*WORDS, f"model={checkpoint()}", f"mask_token_id={SPARE_ROW}"]


def request(token_ids: list[int], **settings: Any) -> Request:
    """A request as Dynamo 1.6.1 sends it: what was not asked for is None."""
    stops = dict.fromkeys(("max_tokens", "stop", "stop_token_ids", "min_tokens", "ignore_eos"))
    sampling = dict.fromkeys(
        ("n", "temperature", "top_p", "top_k", "seed", "presence_penalty", "guided_decoding")
    )
    outputs = dict.fromkeys(("logprobs", "prompt_logprobs"))
    for values in (stops, sampling, outputs):
        values |= {name: value for name, value in settings.items() if name in values}
    hidden = {"stop_token_ids_hidden": [2], "stop_token_ids_visible": None, "max_thinking_tokens": None}
    options = {"stop_conditions": stops | hidden, "sampling_options": sampling, "output_options": outputs}
    return {"model": "tiny", "token_ids": token_ids, **options, "eos_token_ids": [2], "routing": {}}


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("json", {"type": "integer"}, "json_schema"),
        ("regex", "[0-9]", "regex"),
        ("choice", ["5", "6"], "choice"),
        ("grammar", 'start: "5"', "grammar"),
    ],
)
def test_guided_decoding_is_a_constraint(name: str, value: Any, kind: str) -> None:
    others = dict.fromkeys(("json", "regex", "choice", "grammar", "whitespace_pattern"))
    guided = {**others, "choice": [], "backend": "xgrammar", name: value}
    params = params_of(request([1], guided_decoding=guided), SamplingParams())
    assert params.constraint == Constraint(kind=kind, text=value)  # type: ignore[arg-type]
    assert params_of(request([1], guided_decoding=others), SamplingParams()).constraint is None
    with pytest.raises(ApiError, match="guided_whitespace_pattern"):
        params_of(request([1], guided_decoding={**guided, "whitespace_pattern": " "}), SamplingParams())


def text_ids() -> list[int]:
    return encode_prompt(reference().tokenizer, PROMPT, template="none")


def expected(prompt_ids: list[int], **settings: Any) -> Completion:
    [done] = clear_answers(reference(), [prompt_ids], SamplingParams(**settings))
    return done


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as found:
        yield found


@pytest.fixture(scope="module")
def backend(runner: asyncio.Runner) -> Iterator[Backend]:
    config, arguments = read_arguments("serve", cast(Any, DynamoConfig), words())
    found = Backend(cast(DynamoConfig, config), arguments)
    info = runner.run(asyncio.wait_for(found.ready(), PATIENCE))
    assert info.max_length == SETTINGS["max_length"]
    yield found
    runner.run(asyncio.wait_for(found.cleanup(), PATIENCE))


def answer(runner: asyncio.Runner, backend: Backend, sent: Request) -> list[Chunk]:
    async def collect() -> list[Chunk]:
        async with asyncio.timeout(PATIENCE):
            return [chunk async for chunk in backend.chunks(sent, "one")]

    return runner.run(collect())


def test_an_answer_is_the_engines(runner: asyncio.Runner, backend: Backend) -> None:
    done = expected(text_ids(), temperature=0, max_tokens=9, logprobs=2)
    chunks = answer(runner, backend, request(text_ids(), temperature=0.0, max_tokens=9, logprobs=2))
    assert [token for chunk in chunks for token in chunk["token_ids"]] == list(done.token_ids)
    *parts, last = chunks
    assert not any("finish_reason" in part for part in parts) and last["finish_reason"] == done.finish_reason
    assert last["completion_usage"]["total_tokens"] == len(text_ids()) + len(done.token_ids)
    assert done.logprobs is not None
    shown = [logprob for chunk in chunks for logprob in chunk["log_probs"]]
    assert shown == pytest.approx([token.logprob for token in done.logprobs], abs=1e-4)
    tops = [top for chunk in chunks for top in chunk["top_logprobs"]]
    assert [each["rank"] for each in tops[0]] == [1, 2] and len(tops) == len(shown)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"n": 2}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ],
)
def test_what_the_engine_cannot_honour_is_refused(
    settings: dict[str, Any], field: str, runner: asyncio.Runner, backend: Backend
) -> None:
    with pytest.raises(ApiError) as caught:
        answer(runner, backend, request(text_ids(), **settings))
    assert (caught.value.status, caught.value.param) == (400, field)


def test_a_cancelled_request_frees_the_engine(runner: asyncio.Runner, backend: Backend) -> None:
    async def cancelled() -> int:
        num_chunks = 0
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(ApiError, match="cancelled"):
                async for _ in backend.chunks(request(text_ids(), max_tokens=100, ignore_eos=True), "other"):
                    num_chunks += 1
                    backend.cancel("other")
        return num_chunks

    assert runner.run(cancelled()) == 1
    assert backend.client.num_open == 0
    backend.cancel("unknown")


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@contextlib.contextmanager
def dynamo(folder: Path, num_workers: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of Dynamo's front end, and its workers, which found each other in `folder`."""
    environment = os.environ | {"DYN_FILE_KV": str(folder / "found"), "PYTHONPATH": str(ROOT)}
    port = free_port()
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    front = ["-m", "dynamo.frontend", *planes, "--http-host", "127.0.0.1", "--http-port", port]
    worker = [str(ROOT / "recipes" / "serve_dynamo.py"), *words(), "served_model_name=tiny"]
    with (folder / "log").open("wb") as log:
        started = [
            subprocess.Popen([sys.executable, *arguments], env=environment, stdout=log, stderr=log)
            for arguments in (front, *[worker] * num_workers)
        ]
        try:
            yield f"http://127.0.0.1:{port}", started[1:]
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(PATIENCE)


def test_dynamo_serves_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("dynamo.frontend", reason="ai-dynamo 1.6.1 is not installed (docs/deploy.md)")
    done = expected(encode_messages(reference().tokenizer, MESSAGES), temperature=0, max_tokens=9)
    with dynamo(tmp_path, 2) as (url, workers):
        client = Client(url, None)

        def is_up() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return "tiny" in client.client.get("/v1/models").text
            return False

        client.wait_until(is_up)
        body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 9}
        for _ in range(4):
            shown = client.client.post("/v1/chat/completions", json=body).json()
            assert shown["choices"][0]["message"]["content"] == done.text
            assert shown["usage"]["completion_tokens"] == len(done.token_ids)
        with client.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and len(lines) > 2
        refused = client.client.post("/v1/chat/completions", json=body | {"frequency_penalty": 2.5})
        assert refused.status_code == 400 and "frequency_penalty" in refused.text
        workers[0].send_signal(signal.SIGTERM)
        assert workers[0].wait(PATIENCE) == 0
        # The other worker may still be loading.
        client.wait_until(lambda: client.client.post("/v1/chat/completions", json=body).status_code == 200)
