"""Prompts of `idlm-generate`: texts, and JSON lines with `prompt`, `prompt_ids` or `messages` and settings of
their own. _L: by the number of a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.config import SamplingConfig
from idlm.paths import telling_of_path
from idlm.suggest import did_you_mean

SHAPES = ("prompt", "prompt_ids", "messages")
KEYS = (*SHAPES, "id", "sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One request: what to answer (text, ids or a conversation), under which id and settings.

    `place` (`file:line`) goes in front of every complaint about it. `is_numbered`: the id is the line's
    number, for want of one.
    """

    place: str
    request_id: str
    prompt: str | list[int] | list[dict[str, str]]
    params: SamplingParams
    is_numbered: bool = False


def text_prompts(texts: Sequence[str], sampling: SamplingConfig, *, place: str) -> list[PromptLine]:
    """Requests of plain texts under the ids 0, 1, 2, ..."""
    lines = []
    for number, text in enumerate(texts):
        where = place if len(texts) == 1 else f"{place} {number + 1}"
        check_text(where, text)
        _check_shape(where, "prompt", text)
        lines.append(PromptLine(place=where, request_id=str(number), prompt=text, params=sampling.params()))
    return lines


def read_prompts(path: str, sampling: SamplingConfig) -> Iterator[PromptLine]:
    """Yield the requests of a file, with `sampling` where a line sets nothing else. Blank lines pass.

    UserError with file and line number for anything that is not a request.
    """
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse(f"{path}:{number}", number, line, sampling)


def _opened(path: str) -> BinaryIO:
    source, fix = Path(path), "give a file of JSON lines; text that is piped in needs no input="
    with telling_of_path("IDLM-0430", path, fix=fix):
        if not source.is_file():
            raise UserError("IDLM-0430", f"input={path!r} is not a file", fix=fix)
        return source.open("rb")


def check_prompts(path: str, sampling: SamplingConfig) -> None:
    """Read a whole file beforehand, so that a mistake in its last line is known before a model is loaded.

    Lines may share an id that they were given: those who give it know why. No line is given another's number.
    """
    is_numbered_L = bytearray()
    num_lines = num_named = 0
    for line in read_prompts(path, sampling):
        num_lines += 1
        if line.is_numbered:
            number = int(line.request_id)
            is_numbered_L.extend(bytes(number - len(is_numbered_L)))
            is_numbered_L.append(True)
        else:
            num_named += 1
    if not num_lines:
        raise UserError("IDLM-0430", f"input={path!r} has no lines", fix="give a file of JSON lines")
    # Few files have lines of both kinds: reading those again is cheaper than to remember every id.
    for line in read_prompts(path, sampling) if 0 < num_named < num_lines else ():
        if not line.is_numbered and _is_set(is_numbered_L, line.request_id):
            name = line.request_id
            raise UserError(
                "IDLM-0465",
                f"{line.place}: id {name!r} is also that of line {name}, which has none: its number",
                fix="give every line an id, or none, or use ids that are no numbers",
            )


def _is_set(flags_L: bytearray, name: str) -> bool:
    """Whether `name` is written as the number of a line whose flag is set."""
    if not name.isdecimal() or len(name) > len(str(len(flags_L))):
        return False
    number = int(name)
    return str(number) == name and number < len(flags_L) and bool(flags_L[number])


def _parse(place: str, number: int, line: bytes, sampling: SamplingConfig) -> PromptLine:
    record = _record(place, line)
    if not isinstance(record, dict) or sum(key in record for key in SHAPES) != 1:
        raise UserError("IDLM-0433", f"{place} needs exactly one of {SHAPES}", fix='write {"prompt": "..."}')
    unknown = [key for key in record if key not in KEYS]
    if unknown:
        raise UserError(
            "IDLM-0434",
            f"{place}: unknown key {unknown[0]!r}{did_you_mean(unknown[0], KEYS)}",
            fix=f"use {KEYS}",
        )
    request_id = record.get("id", number)
    if isinstance(request_id, bool) or not isinstance(request_id, str | int):
        raise UserError(
            "IDLM-0436",
            f"{place}: id is {request_id!r}",
            fix="give a text or a whole number, or leave it out",
        )
    shape = next(key for key in SHAPES if key in record)
    _check_shape(place, shape, record[shape])
    return PromptLine(
        place=place,
        request_id=str(request_id),
        prompt=record[shape],
        params=_params(place, record.get("sampling", {}), sampling),
        is_numbered="id" not in record,
    )


def _record(place: str, line: bytes) -> Any:
    try:
        text = line.decode("utf-8-sig")
        record = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise UserError(
            "IDLM-0432", f"{place} is not valid JSON: {error}", fix="one JSON object per line, in UTF-8"
        ) from error
    check_text(place, json.dumps(record, ensure_ascii=False))
    return record


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; ValueError for a key that is given twice, of which readers take the one or the other."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found


def _params(place: str, changes: Any, sampling: SamplingConfig) -> SamplingParams:
    known = tuple(SamplingConfig.__dataclass_fields__)
    if not isinstance(changes, dict):
        raise UserError(
            "IDLM-0435", f"{place}: sampling is {changes!r}", fix='write {"sampling": {"temperature": 0}}'
        )
    bad = [key for key in changes if key not in known]
    if bad:
        raise UserError(
            "IDLM-0435",
            f"{place}: unknown sampling {bad[0]!r}{did_you_mean(bad[0], known)}",
            fix=f"use {known}",
        )
    for key in ("stop", "stop_token_ids"):
        if not isinstance(changes.get(key, []), list):
            raise UserError(
                "IDLM-0435",
                f"{place}: {key}={changes[key]!r} must be a list",
                fix=f'write {{"{key}": [...]}}',
            )
    try:
        return sampling.params(**changes)
    except UserError as error:
        raise UserError(error.code, f"{place}: {error.message}", fix=error.fix) from error


def _check_shape(place: str, shape: str, prompt: Any) -> None:
    problem = _problem(shape, prompt)
    if problem:
        raise UserError("IDLM-0436", f"{place}: {shape} {problem[0]}", fix=problem[1])


def _problem(shape: str, prompt: Any) -> tuple[str, str] | None:
    """What is wrong with the value of a shape's key, and what to do."""
    wants = str if shape == "prompt" else list
    if not isinstance(prompt, wants):
        return f"is {prompt!r}", f"give a {wants.__name__}"
    if not prompt:
        return "is empty", "give at least one token"
    if shape == "prompt_ids":
        bad = [token for token in prompt if isinstance(token, bool) or not isinstance(token, int)]
        return (f"holds {bad[0]!r}", "give whole numbers") if bad else None
    if shape == "messages":
        bad = [message for message in prompt if not _is_message(message)]
        return (f"hold {bad[0]!r}", 'write {"role": "user", "content": "..."}, both texts') if bad else None
    return None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def check_text(place: str, text: str) -> None:
    """UserError IDLM-0436 for halves of surrogate pairs: no tokenizer and no file takes them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "IDLM-0436", f"{place}: not valid text at {text[error.start : error.end]!r}", fix="give UTF-8"
        ) from error
