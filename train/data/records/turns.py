"""Turns of a conversation, its tools and calls of tools as messages in OpenAI's form, whichever names a data
set has for their parts. Arguments of a call are an object, which the template writes as JSON itself.

Nulls around a schema or the arguments are keys that were left out. Those inside are the user's own, except in
tables (see `idlm.files.records.without_nulls`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError
from idlm.text.thoughts import REASONING_KEYS
from idlm.train.data.records.parts import (
    CALL_ROLES,
    CONTENT_KEYS,
    LISTED_WEIGHTS,
    MESSAGE_KEYS,
    ROLE_KEYS,
    ROLES,
    TOKEN_WEIGHTS,
    TOOLS_KEYS,
    UNTRAINED_BY,
    VALUE_KEYS,
    is_empty,
    may_weigh,
    parsed,
    parsed_or,
    present,
    refuse_media,
    shown,
    text_of,
    unusable,
)

TOOL = '{"type": "function", "function": {"name": str, "description": str, "parameters": {...}}}'
CALL = '{"type": "function", "function": {"name": str, "arguments": {...}}}'
ARGUMENT_KEYS = ("arguments", "parameters", "args")
"""Names of what a function is called with; the first is that of the template."""
WRITE_CALL = f"write the call as {CALL}, or its arguments as JSON text"
CALL_KEYS = ("tool_calls", "function_call")
HANDLED_KEYS = frozenset((*ROLE_KEYS, *CONTENT_KEYS, *UNTRAINED_BY, *TOKEN_WEIGHTS, *CALL_KEYS))
WRITE_TURNS = 'write a list of {"role": str, "content": str}'
WRITE_LINES = "write the table as JSON lines (`to_json` of datasets, or of pandas with lines=True)"
_ITEMS = re.compile(r"\s*\[\s*\{")
"""How a list of turns begins, as JSON or as Python writes it."""
_ROLE = re.compile(rf"['\"]({'|'.join(ROLE_KEYS)})['\"]\s*:\s*['\"]({'|'.join(ROLES)})['\"]", re.IGNORECASE)
WRITE_WEIGHT = "write 0 or 1, true or false, or delete it"


def tools_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of a conversation: a list or its JSON text, of which each item may be text too."""
    found: dict[str, list[dict[str, Any]]] = {}
    for key, value in present(record, TOOLS_KEYS).items():
        fix = f"write {key} as [{TOOL}, ...] or as its JSON text, or delete the key"
        tools = parsed(value, key, fix=fix)
        if not isinstance(tools, list | None):
            raise unusable(f"{key}={shown(value)}, which is not a list", fix=fix)
        named = _named(tools or [], key)
        found[key] = [_function(parsed(tool, name, fix=fix), name, TOOL) for name, tool in named]
    first = next(iter(found.values()), [])
    if any(other != first for other in found.values()):
        raise unusable(f"the record has different {' and '.join(found)}", fix="delete one of them")
    return first


def calls_of(value: Any, name: str) -> list[dict[str, Any]]:
    """Return the calls of a turn: one or a list, or its JSON text."""
    given = parsed(value, name, fix=WRITE_CALL)
    if given is None:
        return []
    calls = _named(given, name) if isinstance(given, list) else [(name, given)]
    return [_call(call, index) for index, call in calls]


def _named(items: list[Any], name: str) -> list[tuple[str, Any]]:
    return [(f"{name}[{index}]", item) for index, item in enumerate(items)]


def _call(call: Any, name: str) -> dict[str, Any]:
    whole = _function(call, name, CALL)
    function = {key: value for key, value in whole["function"].items() if key not in ARGUMENT_KEYS}
    arguments = next(iter(present(whole["function"], ARGUMENT_KEYS).values()), None)
    if arguments is None and len(function) > 1:
        raise unusable(f"{name} has no arguments, only the keys {sorted(function)}", fix=WRITE_CALL)
    arguments = {} if arguments is None else parsed(arguments, f"{name}.arguments", fix=WRITE_CALL)
    if not isinstance(arguments, dict):
        raise unusable(f"{name}.arguments={shown(arguments)}, which is not a JSON object", fix=WRITE_CALL)
    return whole | {"function": function | {"arguments": arguments}}


def _function(given: Any, name: str, example: str) -> dict[str, Any]:
    """Return {type, function, ...} of a tool or a call, which may be given as its function alone."""
    kept = (
        {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    )
    nested = kept.get("function")
    if not isinstance(nested, dict):
        identity = {key: kept.pop(key) for key in ("id", "type") if key in kept and "name" in kept}
        kept, nested = identity, kept
    function = {key: value for key, value in nested.items() if value is not None}
    if not isinstance(function.get("name"), str):
        raise unusable(
            f"{name}={shown(given)}, which has no name of a function", fix=f"write it as {example}"
        )
    return ({} if "type" in kept else {"type": "function"}) | kept | {"function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message, and whether it is a target if it is the assistant's. `extra` names keys (`messages[].id`)
    that a template may read and nothing else does. `continues`: calls of tools that belong to the assistant's
    message before them."""

    message: dict[str, Any]
    is_trained: bool = True
    extra: frozenset[str] = frozenset()
    continues: bool = False

    @property
    def role(self) -> str:
        return str(self.message["role"])


def plain_turns(*texts: str) -> list[Message]:
    roles = ("user", "assistant")
    return [Message(message={"role": roles[index % 2], "content": text}) for index, text in enumerate(texts)]


def turns_of(value: Any, name: str) -> list[Message]:
    """Return the turns of a list, of its JSON text, of one turn, or of an object of lists."""
    given = parsed(value, name, fix=WRITE_TURNS)
    if isinstance(given, Mapping):
        is_turn = any(isinstance(given.get(key), str) for key in ROLE_KEYS)
        given = [given] if is_turn else _transposed(given, name)
    if not isinstance(given, list) or not given:
        raise unusable(f"{name}={shown(value)}, which is not a list of turns", fix=WRITE_TURNS)
    found: list[Message] = []
    for index, one in enumerate(given):
        turn = _turn(one, f"{name}[{index}]")
        last = [(before.role, before.is_trained) for before in found[-1:]]
        if turn.continues and last == [(turn.role, turn.is_trained)]:
            calls = [*found[-1].message.get("tool_calls", []), *turn.message["tool_calls"]]
            joined = found[-1].message | {"tool_calls": calls}
            found[-1] = replace(found[-1], message=joined, extra=found[-1].extra | turn.extra)
        else:
            found.append(turn)
    return found


def are_turns(value: Any) -> bool:
    """Return whether a value is a list of objects with roles and contents, of which a role is known; a list
    of other objects may be an answer in JSON."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return False
    contents = [key for item in value for key in (*CONTENT_KEYS, *CALL_KEYS) if key in item]
    roles = [item[key] for item in value for key in ROLE_KEYS if key in item]
    known = [role for role in roles if isinstance(role, str) and role.strip().lower() in ROLES]
    return bool(known) and min(len(contents), len(roles)) >= len(value)


def with_cells(record: Mapping[str, Any], keys: Iterable[str], origin: str) -> dict[str, Any] | UserError:
    """Return a record whose texts under `keys` are cells of a table of text, with the values that other
    sources have, or the error about turns that are not JSON."""
    texts = [key for key in keys if isinstance(record[key], str)]
    try:
        return {**record} | {key: _cell(key, record[key], origin) for key in texts}
    except UserError as error:
        return error


def _cell(key: str, cell: str, origin: str) -> Any:
    if not cell:
        return None
    if key in VALUE_KEYS:
        # Python writes True where JSON has true.
        return parsed_or(cell.lower(), cell)
    found = parsed_or(cell, None) if _ITEMS.match(cell) else cell
    if found is None and _ROLE.search(cell):
        raise unusable(
            f"{origin}: {key}={shown(cell)} is a list of turns that is not JSON, as pandas writes one",
            fix=f"make the table again from its source: {WRITE_LINES}",
        )
    return found if are_turns(found) else cell


def history_turns(value: Any, name: str) -> list[Message]:
    """Return the turns of pairs [user, assistant], or those of `turns_of`."""
    fix = f"write {name} as [[user, assistant], ...]"
    given = parsed(value, name, fix=fix)
    if isinstance(given, list) and all(isinstance(item, (list, tuple)) for item in given):
        wrong = [item for item in given if len(item) != 2 or not all(isinstance(text, str) for text in item)]
        if wrong:
            raise unusable(f"{name} has {shown(wrong[0])}, which is not a pair of texts", fix=fix)
        return [turn for pair in given for turn in plain_turns(*pair)]
    return turns_of(given, name)


def weighted(turns: Sequence[Message], record: Mapping[str, Any]) -> list[Message]:
    """Return the turns with the weights that the record lists for them; a record as a whole has none."""
    found = list(turns)
    for key, value in record.items():
        if isinstance(value, list) and key not in LISTED_WEIGHTS and may_weigh(key, value):
            raise unusable(
                f"{key}={shown(value)}, which may be weights of turns and is not read",
                fix=f"rename {key} to weights, with 0 or 1 for each turn, or delete it",
            )
    for key, value in present(record, tuple(LISTED_WEIGHTS)).items():
        if not isinstance(value, list):
            if value != 1 - LISTED_WEIGHTS[key]:
                raise unusable(
                    f"{key}={shown(value)} is a weight of the whole record, which is not read",
                    fix=f"delete the key {key}, or the record; data.sources weighs whole files",
                )
            continue
        if len(value) != len(turns):
            raise unusable(
                f"{key} has {len(value)} values for {len(turns)} turns",
                fix=f"give each turn its own {key}, or delete the key {key}",
            )
        for index, one in enumerate(value):
            if one is None:
                continue
            is_trained = _is_trained({key: one}, f"{key}[{index}]", LISTED_WEIGHTS)
            found[index] = replace(found[index], is_trained=found[index].is_trained and is_trained)
    return found


def _transposed(columns: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the turns of an object of lists, as `datasets` has for sequences of objects."""
    lengths = {len(column) if isinstance(column, list) else -1 for column in columns.values()}
    if len(lengths) != 1 or -1 in lengths:
        raise unusable(
            f"{name}={shown(columns)}, which is an object and not a list of turns", fix=WRITE_TURNS
        )
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _turn(turn: Any, name: str) -> Message:
    if not isinstance(turn, Mapping):
        raise unusable(
            f"{name}={shown(turn)}, which is not an object with a role and a content", fix=WRITE_TURNS
        )
    given = {key: value for key, value in turn.items() if value is not None}
    refuse_media(given, f"{name}.")
    role, content = _role(given, name), _only(given, CONTENT_KEYS, name)
    rest = {key: value for key, value in given.items() if key not in HANDLED_KEYS} | reasoning_of(given, name)
    calls = [
        call for key, value in present(given, CALL_KEYS).items() for call in calls_of(value, f"{name}.{key}")
    ]
    if role in CALL_ROLES:
        calls, content = [*calls, *calls_of(content, f"{name} ({role})")], ""
    if content is None and not calls and not any(rest.get(key) for key in REASONING_KEYS):
        raise unusable(f"{name} ({role}) has no content: {shown(given)}", fix=WRITE_TURNS)
    message = {"role": ROLES[role], "content": "" if content is None else text_of(content, f"{name}.content")}
    is_trained = _weight(given, name)
    is_answer = message["role"] == "assistant"
    extra = [key for key in rest if key not in MESSAGE_KEYS or (key in REASONING_KEYS and not is_answer)]
    if is_trained and not is_answer:
        extra += [key for key in UNTRAINED_BY if key in given]
    return Message(
        message=message | ({"tool_calls": calls} if calls else {}) | rest,
        is_trained=is_trained,
        extra=frozenset(f"{name.partition('[')[0]}[].{key}" for key in extra),
        continues=role in CALL_ROLES,
    )


def _role(given: Mapping[str, Any], name: str) -> str:
    role = _only(given, ROLE_KEYS, name)
    if not isinstance(role, str):
        raise unusable(f"{name} has no role, only the keys {sorted(given)}", fix=WRITE_TURNS)
    role = role.strip().lower()
    if role not in ROLES:
        # Many templates silently leave out a turn of an unknown role.
        raise unusable(
            f"{name} has the role {role!r}{did_you_mean(role, ROLES)}", fix=f"roles are {', '.join(ROLES)}"
        )
    return role


def reasoning_of(given: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the thoughts of an answer, of which there is one, under the names that they have."""
    texts = {key: text_of(value, f"{name}.{key}") for key, value in present(given, REASONING_KEYS).items()}
    _only(texts, REASONING_KEYS, name)
    return texts


def _only(given: Mapping[str, Any], keys: Sequence[str], name: str) -> Any:
    """Return the value of the one key that a turn has; None where it has none."""
    values = {key: given[key] for key in keys if key in given}
    (first, *others) = values.values() or [None]
    if any(other != first for other in others):
        raise unusable(f"{name} has different values of {' and '.join(values)}", fix="delete one of them")
    return first


def _weight(given: Mapping[str, Any], name: str) -> bool:
    details = [key for key in TOKEN_WEIGHTS if not is_empty(given.get(key))]
    if details:
        raise unusable(
            f"{name}.{details[0]} weighs parts of a turn, which is not read",
            fix="weigh turns as a whole (weight=0 or 1), or delete it",
        )
    for key, value in given.items():
        is_other = key not in UNTRAINED_BY and may_weigh(key, value)
        if is_other and ROLES[_role(given, name)] == "assistant":
            raise unusable(
                f"{name} has {key}={shown(value)}, which may be a weight and is not read",
                fix=f"rename {key} to weight, with 0 for a turn that is not trained, or delete it",
            )
    return _is_trained(given, name, UNTRAINED_BY)


def _is_trained(given: Mapping[str, Any], name: str, untrained_by: Mapping[str, int]) -> bool:
    weights = {key: given[key] for key in untrained_by if key in given}
    for key, value in weights.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise unusable(f"{name} has {key}={shown(value)}, which is not read", fix=WRITE_WEIGHT)
    flags = {value != untrained_by[key] for key, value in weights.items()}
    if len(flags) > 1:
        raise unusable(f"{name} has weights that disagree: {weights}", fix="delete all but one of them")
    return False not in flags
