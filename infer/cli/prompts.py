"""Prompts of `idlm-generate`: texts, or JSON lines with `prompt`, `prompt_ids` or `messages` and sampling
settings of their own, and a system prompt (of `idlm-chat` too)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from idlm.config.suggest import did_you_mean
from idlm.contracts import RECORD_KEYS, SamplingParams
from idlm.errors import UserError
from idlm.files.paths import json_lines, json_problem, opened
from idlm.files.records import without_nulls
from idlm.infer.cli.config import check_text
from idlm.text.templates import render

SHAPES = ("prompt", "prompt_ids", "messages")
KEYS = (*SHAPES, "id", "sampling")
ROLES = ("system", "developer", "user", "assistant", "tool")
CALL_KEYS = ("tool_calls", "function_call")
WRITE_TURN = 'write {"role": "user", "content": "..."}, both texts, or parts of type text'


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One request. `location` (`file:line`) begins error messages; `carried` keys are copied to the output
    record."""

    location: str
    request_id: str
    prompt: str | list[int] | list[dict[str, str]]
    params: SamplingParams
    carried: Mapping[str, Any] = field(default_factory=dict)


def text_prompts(texts: Sequence[str], sampling: SamplingParams, *, location: str) -> Iterator[PromptLine]:
    """Yield requests of plain texts with the ids 0, 1, 2, ..."""
    for number, text in enumerate(texts):
        where = location if len(texts) == 1 else f"{location} {number + 1}"
        check_text(where, text)
        yield PromptLine(location=where, request_id=str(number), prompt=text, params=sampling)


def read_prompts(
    path: str, sampling: SamplingParams, *, drop_last_turn: bool = False, carry_keys: bool = False
) -> Iterator[PromptLine]:
    """Yield the requests of a file, which may be compressed. `sampling` applies where a line sets nothing
    else. `drop_last_turn` removes the assistant turn that a conversation ends in; `carry_keys` copies unknown
    keys for the output record. UserError for other lines."""
    fix = "give a file of JSON lines; text that is piped in needs no input="
    with opened("IDLM-0430", path, key="input", fix=fix) as lines:
        yield from read_lines(path, lines, sampling, drop_last_turn=drop_last_turn, carry_keys=carry_keys)


def read_lines(
    path: str,
    lines: Iterable[bytes],
    sampling: SamplingParams,
    *,
    first: int = 1,
    drop_last_turn: bool,
    carry_keys: bool,
) -> Iterator[PromptLine]:
    """As `read_prompts`, from lines of a file; `first` is the number of the first one."""
    for number, value in json_lines(lines, first=first):
        location = f"{path}:{number}"
        record = _record(location, value)
        # Before the other checks: an unknown key may be a misspelt one.
        carried = _carried(location, record, carry_keys=carry_keys)
        yield PromptLine(
            location=location,
            request_id=_request_id(location, record.get("id", number)),
            prompt=_prompt(location, record, drop_last_turn=drop_last_turn),
            params=_params(location, record.get("sampling", {}), sampling),
            carried=carried,
        )


def check_prompts(lines: Iterable[PromptLine], *, source: str | None = None) -> None:
    """Read all requests, to detect mistakes before a model is loaded. UserError IDLM-0430 if the file
    `source` has none, IDLM-0465 for two lines with one id."""
    locations: dict[str, str] = {}
    for line in lines:
        first = locations.setdefault(line.request_id, line.location)
        if first != line.location:
            raise UserError(
                "IDLM-0465",
                f"{line.location}: id {line.request_id!r} is also the id of {first}",
                fix="give every line its own id; the id of a line without one is its number",
            )
    if not locations:
        raise UserError("IDLM-0430", f"input={source!r} has no lines", fix="give a file of JSON lines")


def _record(where: str, record: Any) -> dict[str, Any]:
    """The value of a line, checked. UserError IDLM-0432 for the error of reading it."""
    if isinstance(record, Exception):
        raise UserError(
            "IDLM-0432",
            f"{where} is not valid JSON: {json_problem(record)}",
            fix="one JSON object per line, in UTF-8; plain text is piped in (< FILE), without input=",
        ) from record
    given = record if isinstance(record, dict) else {}
    # Tables write null where a row has no value.
    own = without_nulls({key: value for key, value in given.items() if key in KEYS})
    if sum(key in own for key in SHAPES) != 1:
        fix = "jq -c '.[]' FILE writes lines" if isinstance(record, list) else 'write {"prompt": "..."}'
        raise UserError("IDLM-0433", f"{where} needs exactly one of {SHAPES}", fix=fix)
    found = own | {key: value for key, value in given.items() if key not in KEYS}
    check_text(where, json.dumps(found, ensure_ascii=False))
    return found


def _carried(location: str, record: dict[str, Any], *, carry_keys: bool) -> dict[str, Any]:
    """The unknown keys; UserError IDLM-0434 unless `carry_keys`, or if the output record uses one."""
    carried = {key: value for key, value in record.items() if key not in KEYS}
    for key in carried:
        if not carry_keys:
            raise UserError(
                "IDLM-0434",
                f"{location}: unknown key {key!r}{did_you_mean(key, KEYS)}",
                fix=f"use {KEYS}; carry_keys=true carries other keys through to the output records",
            )
        if key in RECORD_KEYS:
            problem = f"{location}: key {key!r} cannot be carried: an output record has its own"
            raise UserError("IDLM-0434", problem, fix="give it another name")
    return carried


def _request_id(location: str, given: Any) -> str:
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise UserError(
            "IDLM-0436", f"{location}: id is {given!r}", fix="give a text or a whole number, or leave it out"
        )
    return str(given)


def _prompt(location: str, record: dict[str, Any], *, drop_last_turn: bool) -> Any:
    """The prompt of a line; of a conversation, the turns before the answer. UserError IDLM-0436."""
    shape = next(key for key in SHAPES if key in record)
    prompt = record[shape]
    _check_prompt(location, shape, prompt)
    if shape != "messages":
        return prompt
    prompt = [{**message, "content": _joined(message.get("content"))} for message in prompt]
    num_open = len(prompt)
    while num_open and prompt[num_open - 1].get("role") == "assistant":
        num_open -= 1
    _check_turns(location, prompt[: num_open if drop_last_turn else None])
    if num_open < len(prompt) and not (drop_last_turn and num_open):
        what = "end in an assistant turn, so they are answered already"
        raise UserError(
            "IDLM-0436",
            f"{location}: messages {what if num_open else 'hold assistant turns only'}",
            fix="end them in a turn of the user, or give drop_last_turn=true to answer that turn anew",
        )
    return prompt[:num_open]


def _check_prompt(location: str, shape: str, prompt: Any) -> None:
    kind, item = {"prompt": (str, str), "prompt_ids": (list, int), "messages": (list, dict)}[shape]
    problem = fix = ""
    if not isinstance(prompt, kind):
        problem, fix = f"is {prompt!r}", f"give a {kind.__name__}"
    elif not prompt:
        problem, fix = "is empty", "give at least one token or message"
    elif bad := [one for one in prompt if isinstance(one, bool) or not isinstance(one, item)]:
        problem, fix = f"holds {bad[0]!r}", WRITE_TURN if item is dict else "give whole numbers"
    if problem:
        raise UserError("IDLM-0436", f"{location}: {shape} {problem}", fix=fix)


def _joined(content: Any) -> Any:
    """The text of a content in parts, as OpenAI's clients write it; anything else as it is."""
    parts = [part if isinstance(part, dict) else {} for part in content] if isinstance(content, list) else []
    are_texts = [part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts]
    return "".join(part["text"] for part in parts) if parts and all(are_texts) else content


def _check_turns(location: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError IDLM-0436 for a turn that a chat template would leave out or could not render."""
    for message in messages:
        role, problem, fix = message.get("role"), "", WRITE_TURN
        if calls := [key for key in CALL_KEYS if message.get(key)]:
            problem = f"a turn with {calls[0]}, which is not read here"
            fix = f"leave {calls[0]} out, or send the conversation to idlm-serve, which reads tools and calls"
        elif not all(isinstance(message.get(key), str) for key in ("role", "content")):
            problem = repr(message)
        elif role not in ROLES:
            problem, fix = f"a turn of the role {role!r}{did_you_mean(role, ROLES)}", f"use one of {ROLES}"
        if problem:
            raise UserError("IDLM-0436", f"{location}: messages hold {problem}", fix=fix)


def _params(location: str, changes: Any, sampling: SamplingParams) -> SamplingParams:
    known = tuple(SamplingParams.__dataclass_fields__)
    problem, fix = "", f"use {known}"
    if not isinstance(changes, dict):
        problem, fix = f"sampling is {changes!r}", 'write {"sampling": {"temperature": 0}}'
    else:
        for key, value in changes.items():
            if key not in known:
                problem = f"unknown sampling {key!r}{did_you_mean(key, known)}"
            elif key in ("stop", "stop_token_ids") and not isinstance(value, list):
                problem, fix = f"{key}={value!r} must be a list", f'write {{"{key}": [...]}}'
    if problem:
        raise UserError("IDLM-0435", f"{location}: {problem}", fix=fix)
    try:
        return dataclasses.replace(sampling, **changes)
    except UserError as error:
        raise UserError(error.code, f"{location}: {error.message}", fix=error.fix) from error


def with_system(lines: Iterable[PromptLine], system: str | None) -> Iterator[PromptLine]:
    """Put a system prompt before every text, and before every conversation without one; None changes nothing.
    UserError IDLM-0458 for token ids, which are rendered already."""
    for line in lines:
        is_text = isinstance(line.prompt, str)
        messages: Any = [{"role": "user", "content": line.prompt}] if is_text else line.prompt
        if system is not None and not isinstance(messages[0], dict):
            raise UserError(
                "IDLM-0458",
                f"{line.location}: system= cannot precede prompt_ids, which are a whole prompt",
                fix="give the line as prompt or messages, or leave system= out",
            )
        if system is not None and messages[0]["role"] not in ("system", "developer"):
            line = dataclasses.replace(line, prompt=[{"role": "system", "content": system}, *messages])
        yield line


def check_system(tokenizer: Any, system: str | None) -> None:
    """UserError IDLM-0458 if the tokenizer cannot render the system prompt or leaves it out."""
    if system is None:
        return
    if tokenizer is None or not tokenizer.chat_template:
        what = "no tokenizer" if tokenizer is None else "a tokenizer without a chat template"
        raise UserError(
            "IDLM-0458",
            f"system= needs a chat template, and the checkpoint has {what}",
            fix="leave system= out, or add chat_template to the checkpoint's tokenizer_config.json",
        )
    turn = {"role": "user", "content": "x"}
    given = ([{"role": "system", "content": text}, turn] for text in (system, f"{system}x"))
    if len({render(tokenizer, messages, open_turn=True) for messages in given}) == 1:
        raise UserError(
            "IDLM-0458",
            "the checkpoint's chat template leaves system prompts out",
            fix="leave system= out, and put its text into the first turn",
        )
