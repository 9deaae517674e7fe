"""Values of records: texts, JSON in texts, and the nulls of tables.

Errors name a value by its key; `build.encode` puts the record's location before them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from idlm.errors import UserError
from idlm.files.paths import json_problem
from idlm.train.data.records.names import TEXT_PARTS


def unusable(problem: str, *, fix: str) -> UserError:
    """The error about a record; `build.encode` puts its location before the problem."""
    return UserError("IDLM-0202", problem, fix=fix)


def shown(value: Any) -> str:
    return f"{value!r:.60}"


def without_nulls(value: Any) -> Any:
    """Return a value of a table without the nulls of its structures, at every depth: a null there stands for
    a key that the row lacks. Items of lists are values of their own and stay."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def present(record: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return those keys of a record that hold something: no null, no empty text, list or object."""
    found = {key: record[key] for key in keys if key in record}
    return {key: value for key, value in found.items() if not is_empty(value)}


def is_empty(value: Any) -> bool:
    return value in (None, [], {}) or (isinstance(value, str) and not value.strip())


def parsed(value: Any, name: str, *, fix: str) -> Any:
    """Return the value of JSON text, any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise unusable(
            f"{name}={shown(value)} is text that is not valid JSON: {json_problem(error)}", fix=fix
        ) from error


def text_of(value: Any, name: str) -> str:
    """Return a text, which may be given in parts."""
    if isinstance(value, list):
        return "".join(_part(part, f"{name}[{index}]") for index, part in enumerate(value))
    if not isinstance(value, str):
        raise unusable(f"{name}={shown(value)}, which is not text", fix=f"write {name} as text")
    return value


def _part(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise unusable(
            f"{name} is a part of the type {kind!r}, and only text is read",
            fix='give parts {"type": "text", "text": str} alone, or delete the record',
        )
    if not isinstance(text, str):
        raise unusable(
            f"{name}={shown(part)}, which is not a part of text",
            fix='write the content as one text, or in parts {"type": "text", "text": str}',
        )
    return text
