"""Prompts of `idlm-generate`: texts, and JSON lines with `prompt`, `prompt_ids` or `messages` and settings of
their own.
"""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from idlm.config.suggest import did_you_mean
from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.files.json_lines import DAMAGE, unpacked
from idlm.files.paths import translate_path_errors

SHAPES = ("prompt", "prompt_ids", "messages")
KEYS = (*SHAPES, "id", "sampling")
RECORD_KEYS = (
    *("prompt", "decoder", "accelerators", "run_config", "tokens_per_forward", "acceptance_rate"),
    *(item.name for item in dataclasses.fields(Completion)),
)
"""Keys of an output record, none of which a line may carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One request: what to answer (text, ids or a conversation), under which id and settings.

    `place` (`file:line`) goes in front of every complaint about it. `carried`: keys that only the output
    record has a use for.
    """

    place: str
    request_id: str
    prompt: str | list[int] | list[dict[str, str]]
    params: SamplingParams
    carried: Mapping[str, Any] = field(default_factory=dict)


def text_prompts(texts: Sequence[str], sampling: SamplingParams, *, place: str) -> list[PromptLine]:
    """Requests of plain texts under the ids 0, 1, 2, ..."""
    lines = []
    for number, text in enumerate(texts):
        where = place if len(texts) == 1 else f"{place} {number + 1}"
        check_text(where, text)
        _check_shape(where, "prompt", text)
        lines.append(PromptLine(place=where, request_id=str(number), prompt=text, params=sampling))
    return lines


def read_prompts(
    path: str, sampling: SamplingParams, *, drop_last_turn: bool = False, carry_keys: bool = False
) -> Iterator[PromptLine]:
    """Yield the requests of a file (`.gz` too), with `sampling` where a line sets nothing else. Blank lines
    pass.

    `drop_last_turn` takes off the assistant turn that a conversation ends in; `carry_keys` keeps unknown keys
    for the output record. Without them both are refused. UserError with file and line number for anything
    that is not a request.
    """
    with _opened(path) as file:
        try:
            for number, line in enumerate(unpacked(file, Path(path)), start=1):
                if line.strip():
                    yield _parse(
                        f"{path}:{number}",
                        number,
                        line,
                        sampling,
                        drop_last_turn=drop_last_turn,
                        carry_keys=carry_keys,
                    )
        except DAMAGE as error:
            raise UserError(
                "IDLM-0430",
                f"input={path!r} breaks off or is damaged: {error}",
                fix="copy or download the file again",
            ) from error


def _opened(path: str) -> BinaryIO:
    source, fix = Path(path), "give a file of JSON lines; text that is piped in needs no input="
    with translate_path_errors("IDLM-0430", path, fix=fix):
        if not source.is_file():
            raise UserError("IDLM-0430", f"input={path!r} is not a file", fix=fix)
        return source.open("rb")


def check_prompts(
    path: str, sampling: SamplingParams, *, drop_last_turn: bool = False, carry_keys: bool = False
) -> None:
    """Read a whole file beforehand, so that a mistake in its last line is known before a model is loaded.

    UserError IDLM-0465 names two lines that have one id; a line without an id has its number.
    """
    options = {"drop_last_turn": drop_last_turn, "carry_keys": carry_keys}
    # Eight bytes a line: equal hashes are rare, and then the file is read again.
    hashes = array("q", (hash(line.request_id) for line in read_prompts(path, sampling, **options)))
    if not hashes:
        raise UserError("IDLM-0430", f"input={path!r} has no lines", fix="give a file of JSON lines")
    import numpy as np

    in_order = np.frombuffer(hashes, dtype=np.int64).copy()
    in_order.sort()
    repeated = set(in_order[1:][in_order[1:] == in_order[:-1]].tolist())
    places: dict[str, str] = {}
    for line in read_prompts(path, sampling, **options) if repeated else ():
        name = line.request_id
        if name in places:
            raise UserError(
                "IDLM-0465",
                f"{line.place}: id {name!r} is also that of {places[name]}",
                fix="give every line an id of its own; a line without one has its number",
            )
        if hash(name) in repeated:
            places[name] = line.place


def _parse(
    place: str,
    number: int,
    line: bytes,
    sampling: SamplingParams,
    *,
    drop_last_turn: bool,
    carry_keys: bool,
) -> PromptLine:
    record = _record(place, line)
    if not isinstance(record, dict) or sum(key in record for key in SHAPES) != 1:
        raise UserError("IDLM-0433", f"{place} needs exactly one of {SHAPES}", fix='write {"prompt": "..."}')
    carried = {key: value for key, value in record.items() if key not in KEYS}
    _check_carried(place, carried, carry_keys=carry_keys)
    request_id = record.get("id", number)
    if isinstance(request_id, bool) or not isinstance(request_id, str | int):
        raise UserError(
            "IDLM-0436",
            f"{place}: id is {request_id!r}",
            fix="give a text or a whole number, or leave it out",
        )
    shape = next(key for key in SHAPES if key in record)
    prompt = record[shape]
    _check_shape(place, shape, prompt)
    if shape == "messages":
        prompt = _open_turns(place, prompt, drop_last_turn=drop_last_turn)
    return PromptLine(
        place=place,
        request_id=str(request_id),
        prompt=prompt,
        params=_params(place, record.get("sampling", {}), sampling),
        carried=carried,
    )


def _check_carried(place: str, carried: Mapping[str, Any], *, carry_keys: bool) -> None:
    """UserError IDLM-0434 for unknown keys that are not carried, or whose place in a record is taken."""
    if carried and not carry_keys:
        key = next(iter(carried))
        raise UserError(
            "IDLM-0434",
            f"{place}: unknown key {key!r}{did_you_mean(key, KEYS)}",
            fix=f"use {KEYS}; carry_keys=true carries other keys through to the output records",
        )
    taken = [key for key in carried if key in RECORD_KEYS]
    if taken:
        raise UserError(
            "IDLM-0434",
            f"{place}: key {taken[0]!r} cannot be carried: an output record has its own",
            fix="give it another name",
        )


def _open_turns(place: str, messages: list[dict[str, str]], *, drop_last_turn: bool) -> list[dict[str, str]]:
    """The conversation for the assistant to continue; UserError IDLM-0436 where it is answered already."""
    num_kept = len(messages)
    while num_kept and messages[num_kept - 1]["role"] == "assistant":
        num_kept -= 1
    if num_kept == len(messages):
        return messages
    if not drop_last_turn or not num_kept:
        raise UserError(
            "IDLM-0436",
            f"{place}: messages end in an assistant turn, so they are answered already"
            if num_kept
            else f"{place}: messages hold assistant turns only",
            fix="end them in a turn of the user, or give drop_last_turn=true to answer that turn anew",
        )
    return messages[:num_kept]


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


def _params(place: str, changes: Any, sampling: SamplingParams) -> SamplingParams:
    known = tuple(SamplingParams.__dataclass_fields__)
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
        return dataclasses.replace(sampling, **changes)
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
