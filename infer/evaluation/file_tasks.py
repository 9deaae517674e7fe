"""Tasks whose problems are in a file that the user has, and the registry of them. They have the interface of
generated tasks (idlm.tasks.base)."""

from __future__ import annotations

import io
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from idlm.errors import UserError
from idlm.files.paths import BOM, json_lines, json_problem, opened
from idlm.registry import Registry
from idlm.tasks import Grade, TaskSample

KINDS = {str: "text", int: "an integer", list: "a list of texts"}
Record = Mapping[str, Any]


class FileTask(ABC):
    """`records` are the problems. A subclass defines their fields, the question and the right answer."""

    fields: ClassVar[Mapping[str, type]]
    """Fields that every record needs."""
    marks: ClassVar[Mapping[str, str]] = {}
    """Fields whose value is the text after the last mark."""
    num_workers: ClassVar[int] = 1
    """How many answers are checked at a time."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self._samples = [TaskSample(prompt=self.prompt(one), response=self.reference(one)) for one in records]
        self._record_of = dict(zip(self._samples, records, strict=True))

    @classmethod
    def load(cls, name: str, path: str, *, allow_code: bool) -> FileTask:
        """Read the file. UserError IDLM-0481 for a file that cannot be read, IDLM-0482 for another schema."""
        prepared = map(cls.prepared, read_records(name, path, cls))
        kept = [record for record in prepared if record is not None]
        if not kept:
            raise UserError(
                "IDLM-0482", f"data={path!r} holds no problem of task={name}", fix="give its test file"
            )
        return cls(kept)

    @classmethod
    def prepared(cls, record: Record) -> Record | None:
        """The record with the names of fields that this class uses; None for a problem of another split."""
        return record

    @abstractmethod
    def prompt(self, record: Record) -> str:
        """The user's turn."""

    @abstractmethod
    def reference(self, record: Record) -> str:
        """The right answer, for the log."""

    @abstractmethod
    def judge(self, record: Record, response: str) -> Grade:
        pass

    def sample(self, index: int, split: str) -> TaskSample:
        return self._samples[index]

    def grade(self, sample: TaskSample, response: str) -> Grade:
        """Problems with the same question may have other answers."""
        return self.judge(self._record_of[sample], response)


FILE_TASKS: Registry[type[FileTask]] = Registry("file_task", "idlm.infer.evaluation.benchmarks")


def verdict_of(*, is_correct: bool, reason: str) -> Grade:
    return Grade(correct=is_correct, final_answer_correct=is_correct, reason="" if is_correct else reason)


def read_records(name: str, path: str, task: type[FileTask]) -> Iterator[Record]:
    """Yield the objects of a file: JSON lines (may be compressed), or one JSON list."""
    fields = task.fields
    fix = f"give data=FILE with the problems of {name}; nothing is downloaded"
    with opened("IDLM-0481", path, key="data", fix=fix) as file:
        content = file.read().removeprefix(BOM)
        is_list = content.decode().lstrip().startswith("[")
    expected = ", ".join(f"{field!r} ({KINDS[kind]})" for field, kind in fields.items())
    fix = f"task={name} takes objects with {expected}, one a line or in one list"
    for where, record in _objects(path, [content] if is_list else io.BytesIO(content), fix, is_list=is_list):
        missing = [field for field, kind in fields.items() if not _has(record, field, kind)]
        if missing:
            found = f"has {sorted(record)}" if isinstance(record, dict) else "is not an object"
            raise UserError(
                "IDLM-0482",
                f"{where}: {missing[0]!r} is not there or is not {KINDS[fields[missing[0]]]}; it {found}",
                fix=fix,
            )
        for field, mark in task.marks.items():
            _, found, value = record[field].rpartition(mark)
            if not (found and value.strip()):
                raise UserError("IDLM-0482", f"{where}: {field!r} has no value after {mark!r}", fix=fix)
        yield types.MappingProxyType(record)


def _objects(path: str, lines: Iterable[bytes], fix: str, *, is_list: bool) -> Iterator[tuple[str, Any]]:
    for number, value in json_lines(lines):
        if isinstance(value, Exception):
            # A list spans lines.
            number += getattr(value, "lineno", 1) - 1
            problem = json_problem(value)
            raise UserError("IDLM-0482", f"{path}:{number} is not JSON: {problem}", fix=fix) from value
        if is_list:
            yield from ((f"{path}, record {index}", record) for index, record in enumerate(value))
        else:
            yield f"{path}:{number}", value


def _has(record: Any, field: str, kind: type) -> bool:
    """Whether a field is there; `a|b` is met by either name."""
    names = [name for name in field.split("|") if isinstance(record, dict) and name in record]
    value: Any = record[names[0]] if names else None
    items = value if kind is list and isinstance(value, list) else []
    return isinstance(value, kind) and all(isinstance(item, str) for item in items)
