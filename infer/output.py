"""Output files of the command lines: JSON lines, complete under their own name or partial under another.

Not for checkpoints: idlm.checkpoint publishes those.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from idlm.errors import UserError
from idlm.infer.continuation import Begun
from idlm.paths import telling_of_path


class AnswerFile:
    """An open file of records; every record is on disk before the next one is computed."""

    def __init__(self, out: TextIO, path: Path) -> None:
        self._out, self._path = out, path
        self.num_records = 0

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; UserError IDLM-0442 when the disk does not take it. JSON has neither NaN nor
        infinities: such log-probabilities (of tokens that a law excludes, of a broken model) are null.
        """
        try:
            self._out.write(_as_json(record) + "\n")
            self._out.flush()
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        self.num_records += 1


def _as_json(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_with_nulls(record), ensure_ascii=False, allow_nan=False)


def _with_nulls(value: Any) -> Any:
    """Plain data with null for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def partial_path(output: str) -> Path:
    """Where records stand until the last one is written: beside the file itself, not beside a link to it."""
    return Path(f"{_place(output)}.partial")


def _place(output: str) -> Path:
    return Path(output).resolve() if Path(output).is_symlink() else Path(output)


def check_output(output: str | None, *, overwrite: bool, resume: bool = False) -> None:
    """Refuse, before anything is computed, a file that could not be written or that would be lost."""
    if output is None:
        return
    with telling_of_path("IDLM-0442", output, fix="choose another output="):
        _check_place(output, overwrite=overwrite, resume=resume)


def _check_place(output: str, *, overwrite: bool, resume: bool) -> None:
    path, partial = Path(output), partial_path(output)
    # Also where it does not matter whether it is there: its name is the longer one.
    has_partial = partial.exists()
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(
            "IDLM-0442",
            f"output={output!r} is a device or a pipe, and a finished file takes the place of its name",
            fix="give the name of a file; without output= the answers go to the terminal",
        )
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"lies in {str(path.parent)!r}, which is not a folder"
        raise UserError("IDLM-0442", f"output={output!r} {reason}", fix="give a file in an existing folder")
    if overwrite:
        return
    if path.exists():
        raise UserError("IDLM-0431", f"output={output!r} exists", fix="give overwrite=true or another name")
    if has_partial and not resume:
        raise UserError(
            "IDLM-0431",
            f"{str(partial)!r} exists: the answers of an interrupted run",
            fix="give resume=true to go on with it, overwrite=true, or keep it under another name",
        )


@contextmanager
def answer_file(output: str, *, begun: Begun | None = None, how_to_go_on: str = "") -> Iterator[AnswerFile]:
    """Write to `<output>.partial`, rename it at the end; when stopped, say where the finished answers are.

    `how_to_go_on` is said behind that. With `begun` a partial file that is there keeps its answers.
    """
    partial = partial_path(output)
    failed_outside: BaseException | None = None
    try:
        if begun is not None:
            os.truncate(partial, begun.num_bytes)
        with partial.open("w" if begun is None else "a", encoding="utf-8") as out:
            answers = AnswerFile(out, partial)
            if begun is not None:
                out.writelines(raw.decode() for raw in begun.kept)
                answers.num_records = begun.num_records
            try:
                yield answers
            except BaseException as error:
                failed_outside = error
                _keep(partial, answers.num_records, how_to_go_on)
                raise
            out.flush()
            os.fsync(out.fileno())
        partial.replace(_place(output))
    except OSError as error:
        if error is failed_outside:
            raise
        raise _cannot_write(partial, error) from error


def _cannot_write(partial: Path, error: OSError) -> UserError:
    return UserError(
        "IDLM-0442", f"cannot write {str(partial)!r}: {error.strerror}", fix="choose another output="
    )


def _keep(partial: Path, num_records: int, how_to_go_on: str) -> None:
    if num_records:
        print(f"stopped: {num_records} finished answers are in {partial}{how_to_go_on}", file=sys.stderr)
    else:
        partial.unlink(missing_ok=True)
