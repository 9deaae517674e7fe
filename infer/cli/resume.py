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

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.fingerprint import MadeWith, difference, fingerprint
from idlm.infer.cli.prompts import PromptLine

Span = tuple[int, int]
"""First byte of a piece of a file, and the one behind its last."""
MISMATCH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """The pieces of `source` in `spans` hold all answers that are kept, in the order to keep them in.

    `missing` yields the lines of the input that have no answer yet: `num_failed` of them failed, the other
    `num_unanswered` are not in the file. `broken_lines`: numbers of those lines of `source` that hold no
    record and are not blank.
    """

    source: Path
    spans: tuple[Span, ...]
    num_records: int
    num_failed: int
    num_unanswered: int
    broken_lines: tuple[int, ...]
    missing: Iterator[PromptLine]

    @property
    def is_whole(self) -> bool:
        """Whether every line of the input is answered."""
        return self.num_failed == self.num_unanswered == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A line of the file: where it stands, the digest of what it is matched by, and that of what it says it
    was made with. No more: 100,000 of them may wait for their lines.
    """

    span: Span
    key: bytes
    has_failed: bool
    made: bytes | None

    def fit(self, made: bytes) -> int:
        """How well it fits a line that is answered with `made` now: 0 says so, 1 says nothing, 2 has failed
        and is answered again in any case, UNFIT was made otherwise.
        """
        if self.made == made:
            return 0
        return 1 if self.made is None else 2 if self.has_failed else MISMATCH


class _Matching:
    """What becomes of the lines that have records."""

    def __init__(self, source: Path, run_config: Callable[[PromptLine], MadeWith]) -> None:
        self._source, self._run_config = source, run_config
        self.spans: list[Span] = []
        self.answered: set[int] = set()
        self.failed: set[int] = set()
        self.num_records = self.num_silent = 0
        self._last: tuple[SamplingParams, bytes] | None = None

    def are_of(self, line: PromptLine, group: Sequence[_Record]) -> bool:
        """Whether these are all samples of `line`, one by one, made with what they would be now."""
        if [record.key for record in group] != _keys(line):
            return False
        made = self._made(line)
        return all(record.fit(made) < MISMATCH for record in group)

    def taken(self, line: PromptLine, waiting: dict[bytes, list[_Record]]) -> list[_Record]:
        """A record for every sample of `line`, out of those that wait; empty, and none taken, when one is
        missing. Lines may share id and prompt, and differ in their settings: the best fit counts.
        """
        piles = [waiting.get(key, []) for key in _keys(line)]
        if not all(piles):
            return []
        made = self._made(line)
        places = []
        for pile in piles:
            exact = next((at for at, record in enumerate(pile) if record.made == made), None)
            best = min(range(len(pile)), key=lambda at: pile[at].fit(made)) if exact is None else exact
            if pile[best].fit(made) == MISMATCH:
                return []
            places.append(best)
        return [pile.pop(place) for pile, place in zip(piles, places, strict=True)]

    def settle(self, number: int, group: Sequence[_Record]) -> None:
        """Keep all records of a line, or none of them because one has failed."""
        if any(record.has_failed for record in group):
            self.failed.add(number)
            return
        for record in group:
            first, end = record.span
            if self.spans and self.spans[-1][1] == first:
                first, _ = self.spans.pop()
            self.spans.append((first, end))
        self.num_silent += sum(record.made is None for record in group)
        self.num_records += len(group)
        self.answered.add(number)

    def refuse_rest(
        self, waiting: dict[bytes, list[_Record]], read_lines: Callable[[], Iterator[PromptLine]]
    ) -> None:
        """UserError IDLM-0444 for a record that is left and has no line, IDLM-0463 for one that fits none of
        its lines. Others are left of a line that is not complete.
        """
        left = {key: pile for key, pile in waiting.items() if pile}
        lines_of: dict[bytes, PromptLine] = {}
        fitting: set[tuple[bytes, bytes]] = set()
        for line in read_lines() if left else ():
            for key in _keys(line):
                if key in left:
                    lines_of.setdefault(key, line)
                    fitting.add((key, self._made(line)))
        for key, pile in left.items():
            if key not in lines_of:
                self._refuse_mismatch(pile[0])
            for record in pile:
                if record.made is not None and not record.has_failed and (key, record.made) not in fitting:
                    self._refuse(record, lines_of[key])

    def _refuse_mismatch(self, record: _Record) -> None:
        parsed = _reread(self._source, record)
        said = json.dumps([parsed["request_id"], parsed["index"], parsed["prompt"]])
        raise UserError(
            "IDLM-0444",
            f"{str(self._source)!r} has an answer that belongs to no line of the input: {said:.80}",
            fix="continue with the same input= and system=, or keep that file under another name",
        )

    def _refuse(self, record: _Record, line: PromptLine) -> None:
        told = difference(_reread(self._source, record)["run_config"], self._run_config(line))
        assert told is not None, f"{record=} {line=}"
        raise UserError(
            "IDLM-0463",
            f"{line.place}: its answer in {str(self._source)!r} was {told}",
            fix=f"go on with what it was made with, give another output=, or delete {self._source}",
        )

    def _made(self, line: PromptLine) -> bytes:
        """Fingerprint of what the answer to a line is made with now; most have the settings of the last."""
        if self._last is None or self._last[0] != line.params:
            self._last = line.params, fingerprint(self._run_config(line))
        return self._last[1]


def find_resume_state(
    source: Path,
    read_lines: Callable[[], Iterator[PromptLine]],
    run_config: Callable[[PromptLine], MadeWith],
) -> ResumeState:
    """Match the records of `source` with the lines that `read_lines` starts to read anew with every call;
    `run_config` tells what the answer to a line is made with now.

    Raises UserError IDLM-0444 when a record answers none of them, IDLM-0463 when it was made otherwise. What
    is no record, the answers of a line that are not complete, and those that failed are generated again.
    """
    broken: list[int] = []
    matching, records = _Matching(source, run_config), _records(source, broken)
    behind: list[_Record] = []
    num_in_turn = num_lines = 0
    for number, line in enumerate(read_lines()):
        group = list(itertools.islice(records, line.params.n))
        if not matching.are_of(line, group):
            behind = group
            break
        matching.settle(number, group)
        num_in_turn += 1
    waiting: dict[bytes, list[_Record]] = {}
    for record in itertools.chain(behind, records):
        waiting.setdefault(record.key, []).append(record)
    for number, line in enumerate(read_lines()):
        num_lines += 1
        group = matching.taken(line, waiting) if number >= num_in_turn else []
        if group:
            matching.settle(number, group)
    matching.refuse_rest(waiting, read_lines)
    if matching.num_silent:
        # Nothing says that they were made otherwise, and they may have taken days.
        warnings.warn(
            f"{matching.num_silent} answers in {str(source)!r} do not say what they were made with, as an "
            "older idlm wrote them: they are kept",
            stacklevel=2,
        )
    return ResumeState(
        source=source,
        spans=tuple(matching.spans),
        num_records=matching.num_records,
        num_failed=len(matching.failed),
        broken_lines=tuple(broken),
        num_unanswered=num_lines - len(matching.answered) - len(matching.failed),
        missing=(line for number, line in enumerate(read_lines()) if number not in matching.answered),
    )


def _records(source: Path, broken: list[int]) -> Iterator[_Record]:
    """Lines that hold a record. Blank ones pass; the numbers of the others go to `broken`, among them that of
    a last line which is only half written.
    """
    end = 0
    said: Any = None
    made: bytes | None = None
    with source.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            first, end = end, end + len(raw)
            record = _parsed(raw) if raw.endswith(b"\n") else None
            if record is None:
                if raw.strip():
                    broken.append(number)
                continue
            run_config = record.get("run_config")
            if run_config != said or made is None:
                # Most say what the last one said: one digest in memory does for all of those.
                said, made = run_config, fingerprint(run_config) if isinstance(run_config, dict) else None
            yield _Record(
                span=(first, end),
                key=_key(record["request_id"], record["index"], record["prompt"]),
                has_failed=record.get("error") is not None,
                made=made,
            )


def _reread(source: Path, record: _Record) -> dict[str, Any]:
    with source.open("rb") as file:
        file.seek(record.span[0])
        parsed = _parsed(file.readline())
    assert parsed is not None, f"{record=}"
    return parsed


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
