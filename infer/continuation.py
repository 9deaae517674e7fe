"""Going on with the answers of an earlier run: what is answered stays, what is missing or has failed is
generated.

Records are matched with the lines of the input by request id and prompt. A run writes its records in the
order of the lines; one that is stopped, behind them those that were finished out of turn, which are kept as
well, and one that goes on, those that were missing.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from idlm.errors import UserError
from idlm.infer.prompts import PromptLine
from idlm.infer.provenance import MadeWith, difference

Span = tuple[int, int]
"""First byte of a piece of a file, and the one behind its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The pieces of `source` in `spans` hold all answers that are kept, in the order to keep them in.

    `missing` yields the lines of the input that have no answer yet: `num_failed` of them failed, the other
    `num_unanswered` are not in the file.
    """

    source: Path
    spans: tuple[Span, ...]
    num_records: int
    num_failed: int
    num_unanswered: int
    missing: Iterator[PromptLine]

    @property
    def is_whole(self) -> bool:
        """Whether every line of the input is answered."""
        return self.num_failed == self.num_unanswered == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A line of the file: where it stands, the digest of what it is matched by, what it says of itself."""

    span: Span
    key: bytes
    has_failed: bool
    made_with: MadeWith | None


class _Matching:
    """What becomes of the lines that have records."""

    def __init__(self, source: Path, made_with: Callable[[PromptLine], MadeWith]) -> None:
        self._source, self._made_with = source, made_with
        self.spans: list[Span] = []
        self.answered: set[int] = set()
        self.failed: set[int] = set()
        self.num_records = self.num_silent = 0

    def settle(self, number: int, line: PromptLine, group: Sequence[_Record]) -> None:
        """Keep all records of a line, or none of them because one has failed. UserError IDLM-0463 when one
        was made with anything else than now.
        """
        if any(record.has_failed for record in group):
            self.failed.add(number)
            return
        for record in group:
            self._check(record, line)
            first, end = record.span
            if self.spans and self.spans[-1][1] == first:
                first, _ = self.spans.pop()
            self.spans.append((first, end))
        self.num_records += len(group)
        self.answered.add(number)

    def _check(self, record: _Record, line: PromptLine) -> None:
        if record.made_with is None:
            self.num_silent += 1
            return
        told = difference(record.made_with, self._made_with(line))
        if told is not None:
            raise UserError(
                "IDLM-0463",
                f"{line.place}: its answer in {str(self._source)!r} was {told}",
                fix=f"go on with what it was made with, give another output=, or delete {self._source}",
            )


def begun(
    source: Path,
    read_lines: Callable[[], Iterator[PromptLine]],
    made_with: Callable[[PromptLine], MadeWith],
) -> Begun:
    """Match the records of `source` with the lines that `read_lines` starts to read anew with every call;
    `made_with` tells what the answer to a line is made with now.

    Raises UserError IDLM-0444 when a record answers none of them, IDLM-0463 when it was made otherwise. A
    line that is only half written, the answers of a line that are not complete, and those that failed are
    generated again.
    """
    matching, records = _Matching(source, made_with), _records(source)
    behind: list[_Record] = []
    num_in_turn = num_lines = 0
    for number, line in enumerate(read_lines()):
        group = list(itertools.islice(records, line.params.n))
        if [record.key for record in group] != _keys(line):
            behind = group
            break
        matching.settle(number, line, group)
        num_in_turn += 1
    waiting: dict[bytes, list[_Record]] = {}
    for record in itertools.chain(behind, records):
        waiting.setdefault(record.key, []).append(record)
    for number, line in enumerate(read_lines()):
        num_lines += 1
        found = [waiting.get(key, []) for key in _keys(line)]
        if number >= num_in_turn and all(found):
            matching.settle(number, line, [those.pop(0) for those in found])
    _refuse_strangers(source, waiting, read_lines)
    if matching.num_silent:
        # Nothing says that they were made otherwise, and they may have taken days.
        warnings.warn(
            f"{matching.num_silent} answers in {str(source)!r} do not say what they were made with, as an "
            "older idlm wrote them: they are kept",
            stacklevel=2,
        )
    return Begun(
        source=source,
        spans=tuple(matching.spans),
        num_records=matching.num_records,
        num_failed=len(matching.failed),
        num_unanswered=num_lines - len(matching.answered) - len(matching.failed),
        missing=(line for number, line in enumerate(read_lines()) if number not in matching.answered),
    )


def _refuse_strangers(
    source: Path, waiting: dict[bytes, list[_Record]], read_lines: Callable[[], Iterator[PromptLine]]
) -> None:
    left = {key: records[0] for key, records in waiting.items() if records}
    known = {key for line in read_lines() for key in _keys(line)} if left else set()
    for key, record in left.items():
        if key not in known:
            with source.open("rb") as file:
                file.seek(record.span[0])
                parsed = _parsed(file.readline())
            assert parsed is not None, f"{record=}"
            said = json.dumps([parsed["request_id"], parsed["index"], parsed["prompt"]])
            raise UserError(
                "IDLM-0444",
                f"{str(source)!r} has an answer that belongs to no line of the input: {said:.80}",
                fix="continue with the same input=, or keep that file under another name",
            )


def _records(source: Path) -> Iterator[_Record]:
    """Whole lines that hold a record; the first one that does not ends the file."""
    first = 0
    with source.open("rb") as lines:
        for raw in lines:
            record = _parsed(raw) if raw.endswith(b"\n") else None
            if record is None:
                return
            made_with = record.get("made_with")
            yield _Record(
                span=(first, first + len(raw)),
                key=_key(record["request_id"], record["index"], record["prompt"]),
                has_failed=record.get("error") is not None,
                made_with=made_with if isinstance(made_with, dict) else None,
            )
            first += len(raw)


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(record, dict) and {"request_id", "index", "prompt"} <= record.keys()
    return record if is_whole else None


def _keys(line: PromptLine) -> list[bytes]:
    return [_key(line.request_id, index, line.prompt) for index in range(line.params.n)]


def _key(request_id: str, index: int, prompt: Any) -> bytes:
    """Digest of what a record and its line have in common: many may have to be remembered."""
    return blake2b(json.dumps([request_id, index, prompt], sort_keys=True).encode(), digest_size=16).digest()
