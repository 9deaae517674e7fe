"""Going on with the output file of an interrupted run: what is answered stays, what is missing is
generated.

Records are matched with the lines of the input by request id and prompt. An interrupted run wrote its
records in the order of the lines, and behind them those that were finished out of turn; the latter are
kept as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idlm.errors import UserError
from idlm.infer.prompts import PromptLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The first `num_bytes` of a partial file hold whole answers in order; `kept` are more, as lines of text.

    `missing` yields the lines of the input that have no answer yet.
    """

    num_bytes: int
    num_records: int
    kept: tuple[bytes, ...]
    missing: Iterator[PromptLine]


def begun(partial: Path, read_lines: Callable[[], Iterator[PromptLine]]) -> Begun:
    """Match the records of `partial` with the lines that `read_lines` starts to read anew with every call.

    Raises UserError IDLM-0444 when a record answers none of them. A line that is only half written, and the
    answers of a line that are not complete, are generated again.
    """
    records = _records(partial)
    num_bytes = num_records = num_lines = 0
    behind: list[bytes] = []
    for line in read_lines():
        group = [raw for _, raw in zip(range(line.params.n), records, strict=False)]
        if [_key(raw) for raw in group] != _keys(line):
            behind = group
            break
        num_bytes += sum(map(len, group))
        num_records += len(group)
        num_lines += 1
    waiting: dict[str, list[bytes]] = {}
    for raw in [*behind, *records]:
        waiting.setdefault(_key(raw), []).append(raw)
    kept: list[bytes] = []
    answered = set(range(num_lines))
    for number, line in enumerate(read_lines()):
        found = [waiting.get(key, []) for key in _keys(line)]
        if number >= num_lines and all(found):
            kept += [raws.pop(0) for raws in found]
            answered.add(number)
    known = {key for line in read_lines() for key in _keys(line)} if any(waiting.values()) else set()
    strange = [key for key, raws in waiting.items() if raws and key not in known]
    if strange:
        raise UserError(
            "IDLM-0444",
            f"{str(partial)!r} has an answer that belongs to no line of the input: {strange[0]:.80}",
            fix="continue with the same input=, or keep that file under another name",
        )
    missing = (line for number, line in enumerate(read_lines()) if number not in answered)
    return Begun(num_bytes=num_bytes, num_records=num_records + len(kept), kept=tuple(kept), missing=missing)


def _records(partial: Path) -> Iterator[bytes]:
    """Whole lines that hold a record; the first one that does not ends the file."""
    with partial.open("rb") as lines:
        for raw in lines:
            if not raw.endswith(b"\n") or _parsed(raw) is None:
                return
            yield raw


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    is_whole = isinstance(record, dict) and {"request_id", "index", "prompt"} <= record.keys()
    return record if is_whole else None


def _key(raw: bytes) -> str:
    record = _parsed(raw)
    assert record is not None, f"{raw=}"
    return _join(record["request_id"], record["index"], record["prompt"])


def _keys(line: PromptLine) -> list[str]:
    return [_join(line.request_id, index, line.prompt) for index in range(line.params.n)]


def _join(request_id: str, index: int, prompt: Any) -> str:
    return json.dumps([request_id, index, prompt], sort_keys=True)
