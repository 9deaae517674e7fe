"""What hostile clients cost the others of `idlm-serve`, on a CPU with the bundled checkpoint.

    python -m benchmarks.attacks [attacks=memory,queue,answers,grammar,prompt,template] [constraints=1000]
        [seconds=15] [path=CHECKPOINT] [record=true]

Rows: `kept_memory` (resident bytes of the engine after so many constraints that it refused, over those
before; the gate is 200 MB), and `first_token` (seconds to the first token of a client's request that comes
behind 500 of another key, and behind one of 64 x 16 answers; the gate is 3 s), at 64 answers at a time, and
`slower` (the median time of another client's short chats beside eight clients that attack, over that of a
quiet server; the gate is 3): by ambiguous grammars, by long prompts, and by conversations for which the chat
template takes for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

from benchmarks.results import result_row
from benchmarks.serving.serve_soak import TINY, Server, running_server
from benchmarks.shared import defaults, parse_options, save, start

DEFAULTS = defaults(
    "attacks=memory,queue,answers,grammar,prompt,template seconds=15 constraints=1000 record=true",
    path=str(TINY),
)
MAX_KEPT, MAX_FIRST = 200e6, 3.0
MAX_SLOWER, NUM_ATTACKERS = 3.0, 8
NUM_QUEUED, BEFORE = 500, 2.0
AMBIGUOUS = 'start: s\ns: s s s | s s | /[a-z ]/ | "%d"'
SLOW_TEMPLATE = """{% if 'slowly' in messages[-1].content %}
{%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"""
KEYS = ("one", "two")
SETTINGS = ("max_num_seqs=64", "max_length=256", "decoder.stride=3")
PROMPT = "Tom has 4 pens. Tom finds 3."
Row = dict[str, Any]


def measure(arguments: list[str]) -> int:
    """Run the attacks, each on a server of its own; the status is 1 if one costs others too much."""
    options, rows = parse_options(arguments, DEFAULTS), list[Row]()
    for name in options["attacks"].split(","):
        settings = (*SETTINGS, f"api_key='{','.join(KEYS)}'") if name != "answers" else SETTINGS
        with contextlib.ExitStack() as stack:
            path = options["path"]
            if name == "template":
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / Path(path).name
                path = str(_with_slow_template(Path(path), folder))
            server = stack.enter_context(running_server(path, *settings, api_key=KEYS[0]))
            rows += asyncio.run(ATTACKS[name](server, options))
    for row in rows:
        print(f"{row['metric']:16s} {row['value']:10.4g} {row['unit']:9s} {row['case']} {row['gate_passed']}")
    save("attacks", rows, options)
    return int(not all(row["gate_passed"] for row in rows))


def _client(server: Server, key: str = KEYS[0]) -> httpx.AsyncClient:
    limits, headers = httpx.Limits(max_connections=None), {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(
        base_url=server.url, timeout=600, trust_env=False, limits=limits, headers=headers
    )


async def memory(server: Server, options: dict[str, str]) -> list[Row]:
    """Different constraints that are refused, one after another."""
    num, before = int(options["constraints"]), server.state().engine_memory
    async with _client(server) as client:
        for number in range(num):
            body = {"prompt": PROMPT, "guided_regex": f"((a{{1000}}){{1000}}){{{900 + number}}}"}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 400, answer.text
    kept = server.state().engine_memory - before
    case = {"attack": "memory", "constraints": num}
    return [result_row("attacks", case, "kept_memory", kept, "bytes", gate_passed=kept <= MAX_KEPT)]


async def queue(server: Server, options: dict[str, str]) -> list[Row]:
    """Requests of one key, and one of another key."""
    body = {"prompt": PROMPT, "max_tokens": 128, "ignore_eos": True}
    return await _first_token(server, "queue", [body] * NUM_QUEUED)


async def answers(server: Server, options: dict[str, str]) -> list[Row]:
    """One request of many answers, and another one."""
    body = {"prompt": [PROMPT] * 64, "n": 16, "max_tokens": 128, "ignore_eos": True}
    return await _first_token(server, "answers", [body])


async def grammar(server: Server, options: dict[str, str]) -> list[Row]:
    """Ambiguous grammars, each another one."""
    body = {"prompt": PROMPT, "max_tokens": 200}
    return await _slower(
        server, "grammar", options, lambda n: ("completions", {**body, "guided_grammar": AMBIGUOUS % n})
    )


async def prompt(server: Server, options: dict[str, str]) -> list[Row]:
    """Prompts of as many characters as the context might hold."""
    text = "Mia has 5 nuts. " * (server.info()["engine"]["max_length"] * 15)
    return await _slower(server, "prompt", options, lambda n: ("completions", {"prompt": f"{text}{n}"}))


async def template(server: Server, options: dict[str, str]) -> list[Row]:
    """Conversations that the template renders for ever."""
    return await _slower(server, "template", options, lambda n: ("chat/completions", _chat(f"slowly {n}")))


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}


def _with_slow_template(path: Path, folder: Path) -> Path:
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns("manifest.json"))
    with (folder / "chat_template.jinja").open("a") as file:
        file.write(SLOW_TEMPLATE)
    return folder


async def _slower(
    server: Server, attack: str, options: dict[str, str], body: Callable[[int], tuple[str, dict[str, Any]]]
) -> list[Row]:
    """How much longer a short chat takes beside attackers, each of which sends a request after another."""
    counts = dict.fromkeys(range(NUM_ATTACKERS), 0)

    async def send(number: int) -> None:
        async with _client(server) as client:
            while True:
                route, fields = body(number + NUM_ATTACKERS * counts[number])
                await client.post(f"/v1/{route}", json=fields)
                counts[number] += 1

    quiet = await _median(server, float(options["seconds"]))
    attackers = [asyncio.create_task(send(number)) for number in counts]
    await asyncio.sleep(BEFORE)
    beside = await _median(server, float(options["seconds"]))
    for attacker in attackers:
        attacker.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    case = {"attack": attack, "requests": sum(counts.values()), "quiet_ms": round(1000 * quiet, 1)}
    is_fast = beside <= MAX_SLOWER * quiet
    return [result_row("attacks", case, "slower", beside / quiet, "x", gate_passed=is_fast)]


async def _median(server: Server, seconds: float) -> float:
    """Seconds of a short chat, sent one after another."""
    times, end = list[float](), time.perf_counter() + seconds
    async with _client(server, KEYS[1]) as client:
        while time.perf_counter() < end or not times:
            start = time.perf_counter()
            answer = await client.post("/v1/chat/completions", json=_chat(PROMPT))
            assert answer.status_code == 200, answer.text
            times.append(time.perf_counter() - start)
    return statistics.median(times)


async def _first_token(server: Server, attack: str, bodies: list[dict[str, Any]]) -> list[Row]:
    async with _client(server) as many, _client(server, KEYS[1]) as other:
        queued = [asyncio.create_task(many.post("/v1/completions", json=body)) for body in bodies]
        await asyncio.sleep(BEFORE)
        start = time.perf_counter()
        body = {"prompt": PROMPT, "max_tokens": 8, "stream": True}
        async with other.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    break
        seconds, num_left = time.perf_counter() - start, sum(not task.done() for task in queued)
        assert num_left, "nothing was queued any more"
        assert {answer.status_code for answer in await asyncio.gather(*queued)} == {200}
    case, is_fast = {"attack": attack, "left": num_left}, seconds <= MAX_FIRST
    return [result_row("attacks", case, "first_token", seconds, "s", gate_passed=is_fast)]


ATTACKS: dict[str, Callable[[Server, dict[str, str]], Coroutine[Any, Any, list[Row]]]] = {
    "memory": memory,
    "queue": queue,
    "answers": answers,
    "grammar": grammar,
    "prompt": prompt,
    "template": template,
}

if __name__ == "__main__":
    start(measure, __doc__)
