"""What hostile clients cost the others of `idlm-serve`, on a CPU with the bundled checkpoint.

    python -m benchmarks.attacks [attacks=memory] [seconds=20] [constraints=1000] [path=CHECKPOINT]
        [record=true]

Rows: `kept_memory` (resident bytes of the engine after so many constraints that it refused, over those
before; the gate is 200 MB).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from benchmarks.serving.serve_soak import TINY, Server, running_server
from idlm.cli import command

DEFAULTS = {
    "attacks": "memory",
    "seconds": "20",
    "constraints": "1000",
    "path": str(TINY),
    "record": "true",
    "results": str(RESULTS),
}
MAX_KEPT = 200e6
SETTINGS = ("max_num_seqs=64", "max_length=256", "decoder.stride=3")
PROMPT = "Tom has 4 pens. Tom finds 3."
Row = dict[str, Any]


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Run the attacks, each on a server of its own; the status is 1 if one costs others too much."""
    options, rows = parse_options(arguments, DEFAULTS), list[Row]()
    for name in options["attacks"].split(","):
        with running_server(options["path"], *SETTINGS) as server:
            rows += asyncio.run(ATTACKS[name](server, options))
    for row in rows:
        print(f"{row['metric']:16s} {row['value']:10.4g} {row['unit']:9s} {row['case']} {row['gate_passed']}")
    if options["record"] == "true":
        append_rows("attacks", rows, results=Path(options["results"]))
    return int(not all(row["gate_passed"] for row in rows))


def _client(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False, limits=limits)


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


ATTACKS: dict[str, Callable[[Server, dict[str, str]], Coroutine[Any, Any, list[Row]]]] = {"memory": memory}

if __name__ == "__main__":
    sys.exit(main())
