"""Continue the answers of an earlier run: finished answers are kept, missing and failed ones are generated.

A record belongs to the line of the input with its request id and prompt. It must have been made with the
settings that the line has now."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idlm.errors import UserError
from idlm.infer.cli.fingerprint import RunConfig, difference
from idlm.infer.cli.prompts import PromptLine

RECORD_KEYS = frozenset({"request_id", "index", "prompt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """What an earlier run left in `source`, by its line numbers: `kept_lines` hold the answers to keep, and
    `broken_lines` hold neither a record nor a blank.

    `missing` yields the lines of the input to answer: `num_failed` have a failed sample, the other
    `num_unanswered` lack one."""

    source: Path
    kept_lines: frozenset[int]
    broken_lines: tuple[int, ...]
    num_failed: int
    num_unanswered: int
    missing: Iterator[PromptLine]

    @property
    def is_whole(self) -> bool:
        """Whether every line of the input is answered."""
        return self.num_failed == self.num_unanswered == 0


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the records of one line of the input must say. It keeps a hash of the prompt, to save memory."""

    place: str
    num_samples: int
    prompt_hash: int
    run_config: RunConfig


def find_resume_state(
    source: Path,
    read_lines: Callable[[], Iterator[PromptLine]],
    run_config: Callable[[PromptLine], RunConfig],
) -> ResumeState:
    """Match the records of `source` with the lines that every call of `read_lines` reads from the beginning;
    `run_config` returns the settings that a line would be answered with now.

    UserError IDLM-0444 when a record belongs to no line, IDLM-0463 when it was made with other settings."""
    expected: dict[str, _Expected] = {}
    shared: RunConfig = {}
    for line in read_lines():
        made = run_config(line)
        # Most lines have the settings of the one before: store them once.
        shared = shared if shared == made else made
        expected[line.request_id] = _Expected(line.place, line.params.n, _hash(line.prompt), shared)
    broken: list[int] = []
    found: dict[str, dict[int, int]] = {}
    failed: set[str] = set()
    for number, record in _records(source, broken):
        request_id, has_failed = record["request_id"], record.get("error") is not None
        _check_record(source, record, expected.get(request_id), has_failed=has_failed)
        found.setdefault(request_id, {})[record["index"]] = number
        if has_failed:
            failed.add(request_id)
    answered = {
        request_id
        for request_id, samples in found.items()
        if request_id not in failed and len(samples) == expected[request_id].num_samples
    }
    return ResumeState(
        source=source,
        kept_lines=frozenset(number for request_id in answered for number in found[request_id].values()),
        broken_lines=tuple(broken),
        num_failed=len(failed),
        num_unanswered=len(expected) - len(answered) - len(failed),
        missing=(line for line in read_lines() if line.request_id not in answered),
    )


def _check_record(source: Path, record: dict[str, Any], line: _Expected | None, *, has_failed: bool) -> None:
    if line is None or _hash(record["prompt"]) != line.prompt_hash:
        said = json.dumps([record["request_id"], record["index"], record["prompt"]])
        raise UserError(
            "IDLM-0444",
            f"{str(source)!r} has an answer that belongs to no line of the input: {said:.80}",
            fix="continue with the same input= and system=, or keep that file under another name",
        )
    # A failed answer is generated again, so its settings do not matter.
    made = record["run_config"]
    change = None if has_failed else difference(made, line.run_config)
    if change is not None:
        change = change if made else "made by an older version, which did not record its settings"
        raise UserError(
            "IDLM-0463",
            f"{line.place}: its answer in {str(source)!r} was {change}",
            fix=f"resume with the settings it was made with, give another output=, or delete {source}",
        )


def _records(source: Path, broken: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and records. Lines that are neither a whole record nor blank are added to `broken`."""
    with source.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            try:
                record = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                record = None
            if isinstance(record, dict) and record.keys() >= RECORD_KEYS and _has_types(record):
                # A record that does not say its settings was made with others: it is refused, never dropped.
                yield number, {"run_config": {}, **record}
            elif raw.strip():
                broken.append(number)


def _has_types(record: dict[str, Any]) -> bool:
    types = {"request_id": str, "index": int, "run_config": dict}
    return all(isinstance(record.get(key, kind()), kind) for key, kind in types.items())


def _hash(prompt: Any) -> int:
    return hash(json.dumps(prompt, sort_keys=True))
