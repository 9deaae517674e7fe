"""Tools and calls of tools, in the form that chat templates expect: that of OpenAI, except that the arguments
of a call are an object, which the template writes as JSON itself, as the server does too.

Nulls around a schema or the arguments are keys that were left out. Those inside are the user's own, except in
tables (see `values.without_nulls`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from idlm.train.data.records.names import TOOLS_KEYS
from idlm.train.data.records.values import parsed, present, shown, unusable

TOOL = '{"type": "function", "function": {"name": str, "description": str, "parameters": {...}}}'
CALL = '{"type": "function", "function": {"name": str, "arguments": {...}}}'
ARGUMENT_KEYS = ("arguments", "parameters", "args")
"""Names of what a function is called with; the first is that of the template."""
WRITE_CALL = f"write the call as {CALL}, or its arguments as JSON text"


def tools_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools beside a conversation: a list or its JSON text, of which each item may be text too."""
    given = {key: _tools(value, key) for key, value in present(record, TOOLS_KEYS).items()}
    (first, *others) = given.values() or [[]]
    if any(other != first for other in others):
        raise unusable(f"the record has different {' and '.join(given)}", fix="delete one of them")
    return first


def _tools(value: Any, key: str) -> list[dict[str, Any]]:
    fix = f"write {key} as [{TOOL}, ...] or as its JSON text, or delete the key"
    tools = parsed(value, key, fix=fix)
    if not isinstance(tools, list):
        raise unusable(f"{key}={shown(value)}, which is not a list", fix=fix)
    return [_function(parsed(tool, name, fix=fix), name, TOOL) for name, tool in _named(tools, key)]


def calls_of(value: Any, name: str) -> list[dict[str, Any]]:
    """Return the calls of a turn: one or a list, or its JSON text."""
    given = parsed(value, name, fix=WRITE_CALL)
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
