"""Output files of the command lines: JSON lines, complete under their own name or partial under another, and
of one run at a time.

Not for checkpoints: idlm.checkpoint publishes those.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from idlm.errors import UserError
from idlm.files.disk import NO_LOCKS, lock_file
from idlm.files.paths import translate_path_errors

if TYPE_CHECKING:
    from idlm.infer.cli.resume import ResumeState

COPIED_BYTES = 1 << 20
"""At once, from the file of an earlier run."""


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


@contextmanager
def exclusive_output(output: str | None, *, overwrite: bool, resume: bool = False) -> Iterator[None]:
    """Refuse, before anything is computed, a file that could not be written or that would be lost, and keep
    other runs off it inside. UserError IDLM-0431, 0442, and 0462 for a file that another run has.
    """
    if output is None:
        yield
        return
    _check_place(output, overwrite=overwrite, resume=resume)
    path = Path(f"{partial_path(output)}.lock")
    lock = _lock(output, path)
    try:
        # The run that had the lock may have finished behind the first look.
        _check_place(output, overwrite=overwrite, resume=resume)
        yield
    finally:
        # Before the lock is gone: behind it, the file may be another run's.
        with contextlib.suppress(OSError):
            path.unlink()
        if lock is not None:
            os.close(lock)


def _lock(output: str, path: Path) -> int | None:
    """The lock of an output; None on a file system without locks."""
    try:
        lock = lock_file(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise _cannot_write(path, error) from error
        warnings.warn(
            f"the file system of output={output!r} has no locks ({error.strerror}): see to it that no other "
            "run writes it",
            stacklevel=4,
        )
        return None
    if lock is None:
        raise UserError(
            "IDLM-0462",
            f"another run is writing output={output!r}",
            fix="wait for its end, or give another output=",
        )
    return lock


def _check_place(output: str, *, overwrite: bool, resume: bool) -> None:
    with translate_path_errors("IDLM-0442", output, fix="choose another output="):
        path, partial = Path(output), partial_path(output)
        # Also where it does not matter whether it is there: its name is the longer one.
        has_partial = partial.exists()
        is_file, is_folder, is_there = path.is_file(), path.is_dir(), path.exists()
        lies_in_folder = path.parent.is_dir()
    if is_there and not (is_file or is_folder):
        raise UserError(
            "IDLM-0442",
            f"output={output!r} is a device or a pipe, and a finished file takes the place of its name",
            fix="give the name of a file; without output= the answers go to the terminal",
        )
    if is_folder or not lies_in_folder:
        reason = "is a folder" if is_folder else f"lies in {str(path.parent)!r}, which is not a folder"
        raise UserError("IDLM-0442", f"output={output!r} {reason}", fix="give a file in an existing folder")
    if overwrite or resume:
        return
    if is_there:
        raise UserError("IDLM-0431", f"output={output!r} exists", fix="give overwrite=true or another name")
    if has_partial:
        raise UserError(
            "IDLM-0431",
            f"{str(partial)!r} exists: the answers of an interrupted run",
            fix="give resume=true to go on with it, overwrite=true, or keep it under another name",
        )


@contextmanager
def answer_file(
    output: str, *, find_resume_state: ResumeState | None = None, how_to_go_on: str = ""
) -> Iterator[AnswerFile]:
    """Write to `<output>.partial`, rename it at the end; when stopped, say where the finished answers are.

    `how_to_go_on` is said behind that. The answers that `find_resume_state` keeps stand at its beginning.
    """
    partial = partial_path(output)
    failed_outside: BaseException | None = None
    try:
        if find_resume_state is not None:
            _keep_begun(find_resume_state, partial)
        # JSON has escapes for what is no text, as a path may be.
        escapes = "backslashreplace"
        with partial.open("w" if find_resume_state is None else "a", encoding="utf-8", errors=escapes) as out:
            answers = AnswerFile(out, partial)
            answers.num_records = 0 if find_resume_state is None else find_resume_state.num_records
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


def _keep_begun(find_resume_state: ResumeState, partial: Path) -> None:
    """Make `partial` a file of the answers that are kept. Their source is whole until all of them are there,
    and where it is another file, afterwards too.
    """
    if (
        find_resume_state.source == partial
        and len(find_resume_state.spans) == 1
        and find_resume_state.spans[0][0] == 0
    ):
        os.truncate(partial, find_resume_state.spans[0][1])
        return
    aside = Path(f"{partial}.new")
    try:
        with find_resume_state.source.open("rb") as source, aside.open("wb") as copy:
            for first, end in find_resume_state.spans:
                source.seek(first)
                for at in range(first, end, COPIED_BYTES):
                    copy.write(source.read(min(COPIED_BYTES, end - at)))
            copy.flush()
            os.fsync(copy.fileno())
        aside.replace(partial)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _cannot_write(partial: Path, error: OSError) -> UserError:
    return UserError(
        "IDLM-0442", f"cannot write {str(partial)!r}: {error.strerror}", fix="choose another output="
    )


def _keep(partial: Path, num_records: int, how_to_go_on: str) -> None:
    if num_records:
        print(f"stopped: {num_records} finished answers are in {partial}{how_to_go_on}", file=sys.stderr)
    else:
        partial.unlink(missing_ok=True)
