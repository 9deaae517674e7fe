"""Requests that schemathesis makes from the server's own OpenAPI schema, and bodies spliced from those.

    python -m benchmarks.serve_fuzz [requests=100000] [drawn=0.02] [seed=0] [path=CHECKPOINT] [record=true]

It needs `pip install schemathesis`, which takes 70 ms for a request. So it draws only the share `drawn`, half
of them invalid; each other body is one of these with fields and values of others, which takes no time.
Nothing may get a 5xx or lose its connection, each 4xx names a field and its rule, and the engine is not
started again. Rows: `requests` (the gate), `broken_rules`, `refused` (the share that got a 4xx). Case `kind`
is valid, invalid or spliced; a valid request may have values that do not go together, a prompt that is too
long, or a token that does not exist."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.shared import Report, defaults, parse_options, start
from idlm.errors import UserError
from tests.integration.server.servers import TINY, running

DEFAULTS = defaults("requests=100000 drawn=0.02 seed=0 record=true", path=str(TINY))
LIMITS = ("max_length=48", "max_num_seqs=4", "max_n=3", "max_prompts=4", "sampling.max_tokens=2")
SECONDS, MAX_SHOWN = 60, 10
NUM_CLIENTS = 4
KINDS = ("valid", "invalid", "spliced")
Outcomes = tuple[Counter[tuple[str, int]], list[tuple[str, str]]]
"""How many requests of each kind got each status, and those that broke a rule."""


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS)
    with running(*LIMITS, model=Path(options["path"])) as server:
        counts, problems = fuzz(server.url, options)
        num_restarts = server.client.get("/server_info").json()["num_restarts"]
    for _, problem in problems[:MAX_SHOWN]:
        print(problem)
    report = Report("serve_fuzz", options)
    for kind in KINDS:
        statuses = {status: number for (one, status), number in counts.items() if one == kind}
        total, broken = sum(statuses.values()), sum(one == kind for one, _ in problems)
        refused = sum(number for status, number in statuses.items() if 400 <= status < 500)
        gate = not broken and not num_restarts
        report.add({"kind": kind}, "requests", total, "requests", gate_passed=gate)
        report.add({"kind": kind}, "broken_rules", broken, "requests")
        report.add({"kind": kind}, "refused", refused / max(1, total), "fraction")
    return report.status


def fuzz(url: str, options: dict[str, str]) -> Outcomes:
    """Send the requests. UserError IDLM-0704 without schemathesis."""
    try:
        import schemathesis
    except ModuleNotFoundError as error:
        raise UserError(
            "IDLM-0704", "serve_fuzz needs schemathesis", fix="pip install schemathesis"
        ) from error
    num, seed = int(options["requests"]), int(options["seed"])
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=SECONDS) as answer:
        described = json.load(answer)
    for body in described["components"]["schemas"].values():
        # The server refuses unknown fields by itself, with the nearest name.
        body["additionalProperties"] = False
    schema = schemathesis.openapi.from_dict(described)
    results: list[Any] = list(schema.get_all_operations())
    operations = [found.ok() for found in results]
    modes = dict(
        zip(KINDS, (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE), strict=False)
    )
    # Routes without a body have little to vary.
    shares = [20 if operation.method == "post" else 1 for operation in operations]
    counts: Counter[tuple[str, int]] = Counter()
    problems: list[tuple[str, str]] = []
    bodies: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for operation, share in zip(operations, shares, strict=True):
        for kind, mode in modes.items():
            maximum = -(-float(options["drawn"]) * num * share // (len(modes) * sum(shares)))
            for body, status, problem in _answers(url, operation, mode, int(maximum), seed):
                counts[kind, status] += 1
                if problem is not None:
                    problems.append((kind, problem))
                if operation.method == "post" and isinstance(body, dict):
                    bodies.setdefault(operation.path, {}).setdefault(kind, []).append(body)
    rng = random.Random(seed)
    spliced = [(path, splice(*known.values(), rng=rng)) for path, known in bodies.items()]
    turns = itertools.islice(itertools.cycle(spliced), num - counts.total())
    with httpx.Client(base_url=url, timeout=SECONDS) as client, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        cases = ((path, next(made)) for path, made in turns)
        for status, problem in pool.map(partial(_posted, client), cases):
            counts["spliced", status] += 1
            if problem is not None:
                problems.append(("spliced", problem))
    return counts, problems


def splice(*kinds: list[dict[str, Any]], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Bodies without end: one of the first kind with a few fields of others, a tenth of them with values of
    other fields."""
    bodies = [body for kind in kinds for body in kind]
    values = [value for body in bodies for value in body.values()]
    while True:
        made = dict(rng.choice(kinds[0]))
        for _ in range(rng.randrange(1, 4)):
            other = rng.choice(bodies if rng.random() < 0.2 else kinds[0])
            if other:
                name = rng.choice(list(other))
                made[name] = rng.choice(values) if rng.random() < 0.1 else other[name]
        yield made


def _posted(client: httpx.Client, case: tuple[str, dict[str, Any]]) -> tuple[int, str | None]:
    """The status of a posted (path, body), and what is wrong with it."""
    path, body = case
    text = json.dumps(body)
    try:
        answer = client.post(path, content=text, headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        return 0, f"POST {path} {text}: {error!r}"
    rule = broken_rule(answer.status_code, answer.content)
    return answer.status_code, rule and f"POST {path} {text}: {rule}"


def _answers(url: str, operation: Any, mode: Any, num: int, seed: int) -> list[tuple[Any, int, str | None]]:
    """Body, status, and what is wrong with it, of `num` requests or as many as the schema allows."""
    import hypothesis
    import requests

    found: list[tuple[Any, int, str | None]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(mode))
    def send(case: Any) -> None:
        try:
            answer = case.call(url, session=session, timeout=SECONDS)
        except requests.RequestException as error:
            found.append((None, 0, f"{case.as_curl_command()}: {error}"))
        else:
            rule = broken_rule(answer.status_code, answer.content)
            problem = rule and f"{case.as_curl_command()}: {rule}"
            found.append((case.body, answer.status_code, problem))

    # A route that takes nothing has no invalid requests.
    with requests.Session() as session, contextlib.suppress(hypothesis.errors.Unsatisfiable):
        send()
    return found


def broken_rule(status: int, answer: bytes) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if status >= 500:
        return f"status {status}"
    if status < 400:
        return None
    error = json.loads(answer).get("error", {}) if answer else {}
    param, message = error.get("param"), error.get("message", "")
    if status == 429 or (param is not None and message.startswith(f"{param}: ")):
        return None
    return f"status {status} names no field: {answer[:200]!r}"


if __name__ == "__main__":
    start(measure, __doc__)
