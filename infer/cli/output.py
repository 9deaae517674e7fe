"""Output files of the command lines: JSON lines, written to `<output>.partial` and renamed when complete, by
one run at a time.

Not for checkpoints: idlm/publish.py writes those."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from idlm.errors import UserError
from idlm.files.disk import release_lock, take_lock
from idlm.files.paths import translate_path_errors

if TYPE_CHECKING:
    from idlm.infer.cli.resume import ResumeState


class AnswerFile:
    """An open file of records. Every record is written out before the next one is computed."""

    def __init__(self, out: TextIO, path: Path, num_records: int) -> None:
        self._out, self._path = out, path
        self.num_records = num_records

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; UserError IDLM-0442 when the disk refuses it. JSON has neither NaN nor infinities,
        so such log-probabilities (of excluded tokens, of a broken model) become null."""
        try:
            text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        except ValueError:
            text = json.dumps(_with_nulls(record), ensure_ascii=False)
        try:
            self._out.write(text + "\n")
            self._out.flush()
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        self.num_records += 1


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def partial_path(output: str) -> Path:
    """Where records are written until the last one: next to the file itself, not next to a link to it."""
    return Path(f"{_target(output)}.partial")


def _target(output: str) -> Path:
    return Path(output).resolve() if Path(output).is_symlink() else Path(output)


@contextmanager
def exclusive_output(output: str | None, *, overwrite: bool, resume: bool = False) -> Iterator[None]:
    """Check that `output` can be written and would not be lost (UserError IDLM-0431, 0442), and lock it
    inside. UserError IDLM-0462 when another run, which is alive, has the lock."""
    if output is None:
        yield
        return
    _check_output(output, overwrite=overwrite, resume=resume)
    path = Path(f"{partial_path(output)}.lock")
    try:
        owner = take_lock(path, of=f"output={output!r}")
    except OSError as error:
        raise _cannot_write(path, error) from error
    if owner is not None:
        fix = "wait until it ends, or give another output="
        raise UserError("IDLM-0462", f"{owner} is writing output={output!r}", fix=fix)
    try:
        # The run that had the lock may have finished after the first check.
        _check_output(output, overwrite=overwrite, resume=resume)
        yield
    finally:
        release_lock(path)


def _check_output(output: str, *, overwrite: bool, resume: bool) -> None:
    with translate_path_errors("IDLM-0442", output, fix="choose another output="):
        path, partial = Path(output), partial_path(output)
        # The partial file has the longer name, so this also detects a name that is too long.
        has_partial, exists = partial.exists(), path.exists()
        if path.is_dir() or not path.parent.is_dir():
            reason = "is a folder" if exists else f"is in {str(path.parent)!r}, which is not a folder"
            raise UserError(
                "IDLM-0442", f"output={output!r} {reason}", fix="give a file in an existing folder"
            )
        if exists and not path.is_file():
            raise UserError(
                "IDLM-0442",
                f"output={output!r} is a device or a pipe, which the finished file would replace",
                fix="give the name of a file; without output= the answers go to the terminal",
            )
    if overwrite or resume:
        return
    if exists:
        raise UserError("IDLM-0431", f"output={output!r} exists", fix="give overwrite=true or another name")
    if has_partial:
        raise UserError(
            "IDLM-0431",
            f"{str(partial)!r} exists: the answers of an interrupted run",
            fix="give resume=true to continue it, overwrite=true, or move it",
        )


@contextmanager
def answer_file(output: str, *, earlier: ResumeState | None = None, advice: str = "") -> Iterator[AnswerFile]:
    """Write to `<output>.partial`, which begins with the finished answers of `earlier`, and rename it at the
    end. When the run is stopped, print where the finished answers are, followed by `advice`."""
    partial, num_finished = partial_path(output), 0
    caller_error: BaseException | None = None
    try:
        if earlier is not None:
            _copy_finished(earlier, partial)
            num_finished = len(earlier.finished_lines)
        # JSON can escape what is not valid Unicode, such as a path.
        escapes = "backslashreplace"
        with partial.open("w" if earlier is None else "a", encoding="utf-8", errors=escapes) as out:
            answers = AnswerFile(out, partial, num_finished)
            try:
                yield answers
            except BaseException as error:
                caller_error = error
                if answers.num_records:
                    what = f"{answers.num_records} finished answers are in {partial}{advice}"
                    print(f"stopped: {what}", file=sys.stderr)
                else:
                    partial.unlink(missing_ok=True)
                raise
            out.flush()
            os.fsync(out.fileno())
        partial.replace(_target(output))
    except OSError as error:
        if error is caller_error:
            raise
        raise _cannot_write(partial, error) from error


def _copy_finished(earlier: ResumeState, partial: Path) -> None:
    """Write the finished answers to `partial` in one step; until then `earlier.source` is unchanged."""
    new = Path(f"{partial}.new")
    try:
        with earlier.source.open("rb") as source, new.open("wb") as copy:
            copy.writelines(
                line for number, line in enumerate(source, start=1) if number in earlier.finished_lines
            )
            copy.flush()
            os.fsync(copy.fileno())
        new.replace(partial)
    finally:
        new.unlink(missing_ok=True)


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        "IDLM-0442", f"cannot write {str(path)!r}: {error.strerror}", fix="choose another output="
    )
