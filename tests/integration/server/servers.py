"""What the tests of the server share: a small checkpoint, a server in a thread, and clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from idlm.cli import command
from idlm.infer.cli.config import read_arguments
from idlm.infer.engine import Engine
from idlm.infer.server import engine_client, engine_process
from idlm.infer.server.config import ServeConfig
from idlm.infer.server.run import FrontEnd, listen
from idlm.text.tokenizer import load_tokenizer
from tests.small_tokenizers import CHATML, save_tagged
from tests.toy import write_chain

TINY = Path(__file__).resolve().parents[3] / "recipes" / "assets" / "tiny_ar"
SPARE_ROW = 170
PATIENCE = 120.0
SETTINGS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_length": 160, "page_size": 4}
PROMPT = "Mia has 5 nuts. Mia breaks 2. How many nuts does Mia have?"
THINKING = "{% if enable_thinking is defined and not enable_thinking %}5{% endif %}"
TOOLS = """{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for message in messages %}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments['a'] }}{% endfor %}
{%- endfor %}"""

CALL = '\n{"name": "town", "arguments": {"city": "Rome", "size": 1}}\n'
ANSWER = ["\n", "<think>", "why", "</think>", "\n\nSo", "<tool_call>", CALL, "</tool_call>", "<|im_end|>"]
TOOLS_GIVEN = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call>{name, arguments}</tool_call>"
    "<|im_end|>\n{% endif %}"
)
CALLER_VOCAB = 276
CALLER_WORDS = (
    *("sampling.temperature=0", "sampling.max_tokens=200", "max_length=2000", "page_size=16"),
    f"mask_token_id={CALLER_VOCAB - 1}",
)
"""Settings of servers of `caller`."""


@functools.cache
def caller() -> Path:
    """A model with a tokenizer like Qwen's, which likes to think, to say something and to call `town`."""
    model = save_tagged(
        Path(tempfile.mkdtemp(prefix="serve-test-")) / "qwen-like", words=["why", "\n\nSo", CALL]
    )
    (model / "chat_template.jinja").write_text(TOOLS_GIVEN + CHATML)
    chain = load_tokenizer(model).encode("".join(ANSWER), add_special_tokens=False)
    assert len(chain) == len(ANSWER)
    return write_chain(model, chain, vocab_size=CALLER_VOCAB)


@functools.cache
def checkpoint() -> Path:
    """The bundled model, with a chat template that knows `enable_thinking` and tools."""
    directory = Path(tempfile.mkdtemp(prefix="serve-test-")) / "tiny"
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns("manifest.json"))
    template = directory / "chat_template.jinja"
    template.write_text(template.read_text() + THINKING + TOOLS)
    return directory


@functools.cache
def reference() -> Engine:
    """An engine of this process with the settings of the servers."""
    return Engine.from_pretrained(checkpoint(), "isd", stride=3, mask_token_id=SPARE_ROW, **SETTINGS)


class Client:
    """A client of a server; it has its key."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=PATIENCE, trust_env=False)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of /metrics with this name and these labels."""
        lines = [
            line for line in self.client.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")
        ]
        wanted = [line for line in lines if all(f'{key}="{value}"' in line for key, value in labels.items())]
        return sum(float(line.rpartition(" ")[2]) for line in wanted)

    def wait_until(self, what: Callable[[], bool]) -> None:
        """Poll until `what` holds."""
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < deadline, "it does not come to pass"
            time.sleep(0.02)

    def wait_until_ready(self) -> None:
        """Wait for an engine that takes requests."""
        self.wait_until(lambda: self.client.get("/ready").status_code == 200)

    def wait_until_idle(self) -> None:
        """Wait until the engine holds nothing of any request: no lane, no page."""
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        self.wait_until(lambda: not any(map(self.metric, gauges)))
        assert self.client.get("/server_info").json()["num_open"] == 0

    def completion(self, **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions."""
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def refusal(self, path: str = "/v1/completions", **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that is refused."""
        response = self.client.post(path, json=body)
        return response.status_code, response.json()["error"]


class Running(Client):
    """A server that runs in a thread."""

    def __init__(self, front: FrontEnd, url: str, api_key: str | None) -> None:
        super().__init__(url, api_key)
        self.front = front

    @property
    def num_tasks(self) -> int:
        """Tasks of the server's event loop."""
        return len(asyncio.all_tasks(self.front.loop))


FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload([__name__])
START, PROGRAM = asyncio.create_subprocess_exec, engine_client.PROGRAM


def serve_engine(connection: socket.socket) -> None:
    """The main function of an engine process."""
    os.setsid()
    sys.exit(command.run(lambda _: engine_process.run(connection)))


class ForkedEngine:
    """An engine process whose imports, which take longer than all the rest, are those of a fork server."""

    def __init__(self, connection: int) -> None:
        with socket.socket(fileno=os.dup(connection)) as given:
            self._process = FORKING.Process(target=serve_engine, args=(given,))
            self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    async def wait(self) -> int:
        while self._process.exitcode is None:
            await asyncio.sleep(0.01)
        return self._process.exitcode


async def start_engine(*words: str, **options: Any) -> Any:
    """In place of `asyncio.create_subprocess_exec`."""
    if words[1:-1] != PROGRAM:
        return await START(*words, **options)
    return ForkedEngine(*options["pass_fds"])


@contextlib.contextmanager
def running(*arguments: str, api_key: str | None = None, model: Path | None = None) -> Iterator[Running]:
    """A server, ready; when it ends it has drained, and its thread and engine process are gone."""
    words = [f"{name}={value}" for name, value in SETTINGS.items()]
    words += [
        f"model={model or checkpoint()}",
        "decoder=isd",
        "decoder.stride=3",
        f"mask_token_id={SPARE_ROW}",
    ]
    front = FrontEnd(*read_arguments("serve", ServeConfig, [*words, *arguments]), api_key=api_key)
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: asyncio.run(front.run_on(listener)), daemon=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", start_engine)
            thread.start()
            server = Running(front, url, api_key)
            try:
                server.wait_until_ready()
                yield server
            finally:
                front.should_exit = True
                thread.join(PATIENCE)
                server.client.close()
        assert not thread.is_alive()


@contextlib.contextmanager
def commanded(*words: str, api_key: str) -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    """`idlm-serve` as a command on a CPU, ready, with its process; killed in the end."""
    program = [
        sys.executable,
        "-m",
        "idlm.infer.cli.serve",
        "port=0",
        "device=cpu",
        "dtype=float32",
        *words,
    ]
    environment = {**os.environ, "IDLM_API_KEY": api_key}
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        server = Client(next(line.split()[-6] for line in process.stderr if "is served at" in line), api_key)
        server.wait_until_ready()
        yield server, process
    finally:
        process.kill()
        process.wait()


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The chunks of a stream; it must end in [DONE]."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has no end")
