"""`idlm-chat` and `idlm-bench` with an engine of this process, with a server, and with another server."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import read_arguments
from idlm.infer.clients.arms import EngineArm, Greedy, launched, serve_program, served_arm
from idlm.infer.clients.bench import bench, make_loads, measure, plan_arms
from idlm.infer.clients.chat import Chat, EngineAnswerer, chat
from idlm.infer.clients.config import BenchConfig
from idlm.infer.clients.http import Server, ServerAnswerer
from idlm.infer.clients.view import AnswerFigures, Chunk
from idlm.infer.server.config import ServeConfig
from idlm.text.tokenizer import encode_messages
from tests.contracts.engines import clear_answers
from tests.errors import ctrl_c_raises
from tests.integration.server.servers import (
    PATIENCE,
    PROMPT,
    SETTINGS,
    SPARE_ROW,
    TINY,
    Client,
    checkpoint,
    reference,
)

pytestmark = pytest.mark.sweep

Answerer = EngineAnswerer | ServerAnswerer
GREEDY = SamplingParams(temperature=0, max_tokens=9)
SHORT = ["sampling.temperature=0", "sampling.max_tokens=9"]
ENGINE = [
    *(f"{name}={value}" for name, value in SETTINGS.items()),
    *(f"model={checkpoint()}", f"mask_token_id={SPARE_ROW}", "decoder=isd", "decoder.stride=3"),
]
SMALL = ["load=fixed", "input_tokens=8", "output_tokens=6", "num_requests=3"]
FAKE_VLLM = f"""#!{sys.executable}
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({{"data": [{{"id": sys.argv[2], "owned_by": "vllm"}}]}}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200); self.send_header("content-type", "text/event-stream"); self.end_headers()
        usage = {{"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}}
        for chunk in ({{"choices": [{{"text": "a"}}]}}, {{"choices": [], "usage": usage}}):
            self.wfile.write(f"data: {{json.dumps(chunk)}}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    """A server as `idlm-bench` starts one."""
    with launched(serve_program(ENGINE), "/ready", seconds=PATIENCE) as url:
        client = Client(url, None)
        yield client
        client.client.close()


@pytest.fixture(scope="module")
def answerers(server: Client) -> dict[str, Answerer]:
    return {"engine": EngineAnswerer(reference()), "server": ServerAnswerer(Server(server.url))}


class ScriptedView:
    """A terminal with prepared lines. Ctrl-C comes after `interrupt_at` pieces of an answer."""

    is_terminal = True

    def __init__(self, *lines: str, interrupt_at: int = 0) -> None:
        self._lines, self._interrupt_at = iter(lines), interrupt_at
        self.figures = AnswerFigures()
        self.answers, self.notes = list[str](), list[str]()
        self.pieces: list[Chunk] = []

    def read(self) -> str:
        line = next(self._lines, None)
        if line is None:
            raise EOFError
        return line

    def show(self, pieces: Iterable[Chunk]) -> Iterator[str]:
        self.answers.append("")
        for number, piece in enumerate(pieces, start=1):
            self.pieces.append(piece)
            self.answers[-1] += piece.text
            yield self.answers[-1]
            if number == self._interrupt_at:
                self._interrupt_at = 0
                os.kill(os.getpid(), signal.SIGINT)

    def note(self, text: str, *, is_greeting: bool = False) -> None:
        self.notes.append(text)


def expected(*texts: str, system: str | None = None, params: SamplingParams = GREEDY) -> Completion:
    """The greedy answer to turns that alternate between user and assistant; rounding decides none of it."""
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    [done] = clear_answers(reference(), [encode_messages(reference().tokenizer, [*first, *turns])], params)
    return done


@pytest.mark.parametrize("kind", ["engine", "server"])
def test_a_chat_keeps_its_turns_and_obeys_its_commands(kind: str, answerers: dict[str, Answerer]) -> None:
    view = ScriptedView(
        *(PROMPT, "How many?", "/set foo=1", "/nonsense", "/reset", PROMPT),
        *("/system Tom has 4 nuts.", "/reset", PROMPT, "/set max_tokens=2", "Lea has 3 hats. " * 60, PROMPT),
        *("/help", "/exit", "not read"),
    )
    assert Chat(answerers[kind], view, GREEDY).run() == 0
    first, third = expected(PROMPT).text, expected(PROMPT, system="Tom has 4 nuts.").text
    second = expected(PROMPT, first, "How many?").text
    assert view.answers[:4] == [first, second, first, third]
    assert len(view.answers[-1]) < len(third)
    notes = "\n".join(view.notes)
    for words in ("unknown key 'foo'", "/nonsense is not a command", "max_tokens=2", "starts over"):
        assert words in notes
    assert re.search(r"IDLM-0(412|709).*tokens", notes), "a turn too long is refused, and the chat goes on"


@pytest.mark.parametrize("kind", ["engine", "server"])
def test_ctrl_c_ends_an_answer_and_keeps_the_chat(
    kind: str, answerers: dict[str, Answerer], server: Client
) -> None:
    view = ScriptedView(PROMPT, "How many?", interrupt_at=2)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with ctrl_c_raises():
        assert Chat(answerers[kind], view, params).run() == 0
    part, second = view.answers
    assert 0 < len(part) < len(second)
    assert second == expected(PROMPT, part, "How many?", params=params).text
    assert not reference().has_work
    server.wait_until_idle()


def test_a_chat_through_pipes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Client
) -> None:
    for where in (ENGINE, [f"url={server.url}"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n\n/reset\n{PROMPT}"))
        assert chat([*where, *SHORT]) == 0
        captured = capsys.readouterr()
        assert captured.out.splitlines() == [expected(PROMPT).text] * 2
        assert "tokens/forward" in captured.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("/nonsense\n"))
    assert chat([f"url={server.url}"]) == 1


def test_a_chat_gives_its_last_turn_to_ar_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Client
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n/compare\nHow many?\n/compare\n"))
    assert chat([*ENGINE, *SHORT]) == 0
    captured = capsys.readouterr()
    first, again, second, last = captured.out.splitlines()
    assert first == again == expected(PROMPT).text
    assert second == last == expected(PROMPT, first, "How many?").text
    assert captured.err.count(" times the speed of ar") == 2
    assert captured.err.count("1.00 tokens/forward") >= 2
    for where, lines in ((ENGINE, "/compare\n"), ([f"url={server.url}"], f"{PROMPT}\n/compare\n")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        assert chat([*where, *SHORT]) == 1
        assert "IDLM-0714" in capsys.readouterr().err


def test_a_comparison_with_ar_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Speeds in passes in place of seconds: a pass of AR emits one token."""

    def tokens_per_forward(figures: AnswerFigures) -> float:
        return (figures.num_tokens or 0) / (figures.last.num_forwards or 1)

    monkeypatch.setattr(AnswerFigures, "speed", property(tokens_per_forward))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n/compare\n/compare\n"))
    assert chat([f"model={TINY.with_name('tiny_idlm')}", "device=cpu", *SHORT]) == 0
    ratios = re.findall(r"([0-9.]+) times the speed of ar", capsys.readouterr().err)
    assert len(ratios) == 2 and ratios[0] == ratios[1] and float(ratios[0]) > 1.0


def test_bench_measures_ar_first_and_compares_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, figure = tmp_path / "out.jsonl", tmp_path / "out.svg"
    files = [f"output={output}", f"plot={figure}"]
    assert bench([*ENGINE, *SMALL, "concurrency=1,2", *files]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["arm"], row["num_concurrency"]) for row in rows] == [
        ("ar", 1),
        ("ar", 2),
        ("isd", 1),
        ("isd", 2),
    ]
    assert all(row["num_error_requests"] == 0 and row["num_completed_requests"] == 3 for row in rows)
    assert all(row["stats"]["num_output_tokens"]["sum"] == 18 for row in rows)
    assert [row["parity_tokens"] is None for row in rows] == [True, True, False, False]
    assert rows[0]["tokens_per_forward"] == 1 and rows[2]["over_first"] > 0
    assert figure.stat().st_size > 1000
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("arm ") and len(table) == 7 and table[-1].startswith("prompts: random, ")
    assert {row["prompts"] for row in rows} == {"random"}


def test_bench_refuses_a_decoder_that_changes_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = EngineArm.greedy

    def wrong(arm: EngineArm, jobs: Any) -> list[Greedy]:
        answers = greedy(arm, jobs)
        assert all(len(each.token_ids) == len(each.margins) for each in answers)
        change = int(arm.name == "isd")
        ids = answers[0].token_ids
        return [Greedy((ids[0] + change, *ids[1:]), (9.0,) * len(ids)), *answers[1:]]

    monkeypatch.setattr(EngineArm, "greedy", wrong)
    with pytest.raises(UserError, match=r"IDLM-0711.*prompt 0, token 0"):
        bench([*ENGINE, *SMALL, "concurrency=1"])


def test_bench_of_a_server_counts_what_fails(server: Client, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"url={server.url}"
    assert bench([url, "load=fixed", "input_tokens=8", "output_tokens=6", "num_requests=4", "rate=40"]) == 0
    assert bench([url, *SMALL, "endpoint=chat", "concurrency=2"]) == 0
    capsys.readouterr()
    assert bench([url, *SMALL, "input_tokens=500", "concurrency=2"]) == 1
    captured = capsys.readouterr()
    assert "3 of 3 requests failed; the first one: status 400" in captured.err
    assert captured.out.splitlines()[1].split()[3:5] == ["0", "3"]


def test_a_server_that_counts_no_passes_is_measured(tmp_path: Path) -> None:
    fake = tmp_path / "vllm"
    fake.write_text(FAKE_VLLM)
    fake.chmod(0o755)
    config, _ = read_arguments("bench", BenchConfig, ["model=x", *SMALL, "concurrency=[2]"])
    opened = functools.partial(served_arm, "vllm", [str(fake), "serve", "x", "--port", "{port}"], "/health")
    with opened() as arm:
        row = measure(arm, make_loads(config)[0])
    assert (arm.name, arm.case["server"], row["num_completed_requests"]) == ("vllm", "vllm", 3)
    assert row["stats"]["num_output_tokens"]["sum"] == 18 and row["tokens_per_forward"] is None
    fake.write_text("#!/bin/sh\necho no GPU >&2\nexit 3\n")
    with pytest.raises(UserError, match=r"(?s)IDLM-0712.*status 3.*no GPU"), opened():
        pass


def test_a_server_of_ours_gets_the_engines_arguments() -> None:
    bench_words = [*ENGINE, *SMALL, "concurrency=[2]", "api=http", "sampling.temperature=0"]
    config, arguments = read_arguments("bench", BenchConfig, bench_words)
    for plan, decoder in zip(plan_arms(config, arguments, bench_words), ("ar", "isd"), strict=True):
        _, program, ready = plan.open.args  # type: ignore[attr-defined]
        words = [word.replace("{port}", "0") for word in program[3:]]
        served, engine = read_arguments("serve", ServeConfig, words)
        assert (plan.name, ready, engine.decoder) == (decoder, "/ready", decoder)
        assert engine.options == ({"stride": 3} if decoder == "isd" else {})
        of_servers = {"warmup": "auto", "schedule": "latency"}
        assert served.options() == {**config.options(), "max_num_seqs": 4, **of_servers}
