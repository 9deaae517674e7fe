"""Requests that schemathesis makes from the server's own OpenAPI schema, valid and invalid ones in turn.

    python -m benchmarks.serve_fuzz [requests=100000] [seed=0] [path=CHECKPOINT] [record=true]

It needs `pip install schemathesis`. Nothing may get a 5xx or lose its connection, each 4xx names a field and
its rule, and the engine is not started again. Rows: `requests` (the gate), `broken_rules`, `refused` (the
share that got a 4xx). Case `kind` is valid or invalid; a valid request may have values that do not go
together, a prompt that is too long, or a token that does not exist.
"""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from benchmarks.serving.serve_soak import TINY, Server, running_server
from idlm.cli import command
from idlm.errors import UserError

DEFAULTS = {"requests": "100000", "seed": "0", "path": str(TINY), "record": "true", "results": str(RESULTS)}
LIMITS = ("max_length=48", "max_num_seqs=4", "max_n=3", "max_prompts=4", "sampling.max_tokens=2")
SECONDS, MAX_SHOWN = 60, 10
KINDS = ("valid", "invalid")


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Send the requests; the status is 1 if one broke a rule. UserError IDLM-0704 without schemathesis."""
    options = parse_options(arguments, DEFAULTS)
    with running_server(options["path"], *LIMITS) as server:
        counts, problems = fuzz(server, int(options["requests"]), int(options["seed"]))
        num_restarts = server.info()["num_restarts"]
    rows = []
    for kind in KINDS:
        total = sum(number for (one, _), number in counts.items() if one == kind)
        refused = sum(
            number for (one, status), number in counts.items() if one == kind and 400 <= status < 500
        )
        broken = sum(one == kind for one, _ in problems)
        gate = not broken and not num_restarts
        rows += [
            _row(kind, "requests", total, "requests", gate_passed=gate),
            _row(kind, "broken_rules", broken, "requests"),
            _row(kind, "refused", refused / max(1, total), "fraction"),
        ]
    for row in rows:
        print(f"{row['metric']:16s} {row['value']:10.4g} {row['unit']:9s} {row['case']}")
    for _, problem in problems[:MAX_SHOWN]:
        print(problem)
    if options["record"] == "true":
        append_rows("serve_fuzz", rows, results=Path(options["results"]))
    return int(bool(problems) or bool(num_restarts))


def _row(kind: str, metric: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    return result_row("serve_fuzz", {"kind": kind}, metric, value, unit, **more)


def fuzz(server: Server, num: int, seed: int) -> tuple[Counter[tuple[str, int]], list[tuple[str, str]]]:
    """Send `num` requests; returns how many of each kind got each status, and those that broke a rule."""
    try:
        import schemathesis
    except ModuleNotFoundError as error:
        raise UserError(
            "IDLM-0704", "serve_fuzz needs schemathesis", fix="pip install schemathesis"
        ) from error
    with urllib.request.urlopen(f"{server.url}/openapi.json", timeout=SECONDS) as answer:
        described = json.load(answer)
    for body in described["components"]["schemas"].values():
        # The server refuses unknown fields by itself, with the nearest name.
        body["additionalProperties"] = False
    schema = schemathesis.openapi.from_dict(described)
    results: list[Any] = list(schema.get_all_operations())
    operations = [found.ok() for found in results]
    modes = dict(
        zip(KINDS, (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE), strict=True)
    )
    # Routes without a body have little to vary.
    shares = [20 if operation.method == "post" else 1 for operation in operations]
    counts: Counter[tuple[str, int]] = Counter()
    problems: list[tuple[str, str]] = []
    for operation, share in zip(operations, shares, strict=True):
        for kind, mode in modes.items():
            most = -(-num * share // (len(modes) * sum(shares)))
            for status, problem in _answers(server.url, operation, mode, most, seed):
                counts[kind, status] += 1
                if problem is not None:
                    problems.append((kind, problem))
    return counts, problems


def _answers(url: str, operation: Any, mode: Any, num: int, seed: int) -> list[tuple[int, str | None]]:
    """Status, and what is wrong with it, of `num` requests or as many as the schema allows."""
    import hypothesis
    import requests

    found: list[tuple[int, str | None]] = []

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
            found.append((0, f"{case.as_curl_command()}: {error}"))
        else:
            rule = broken_rule(answer)
            found.append((answer.status_code, rule and f"{case.as_curl_command()}: {rule}"))

    # A route that takes nothing has no invalid requests.
    with requests.Session() as session, contextlib.suppress(hypothesis.errors.Unsatisfiable):
        send()
    return found


def broken_rule(answer: Any) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if answer.status_code >= 500:
        return f"status {answer.status_code}"
    if answer.status_code < 400:
        return None
    error = answer.json().get("error", {}) if answer.content else {}
    param, message = error.get("param"), error.get("message", "")
    if answer.status_code == 429 or (param is not None and message.startswith(f"{param}: ")):
        return None
    return f"status {answer.status_code} names no field: {answer.text[:200]}"


if __name__ == "__main__":
    sys.exit(main())
