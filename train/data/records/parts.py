"""Parts of records: the names that data sets use for them, texts, and JSON in texts.

Errors name a value by its key; `build.encode` puts the record's location before them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from idlm.errors import UserError
from idlm.files.paths import json_problem, json_value
from idlm.text.thoughts import REASONING_KEYS

_NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
_KEYS = {part: tuple(names.split()) for part, names in _NAMES["keys"].items()}
CALL_ROLES = tuple(_NAMES["roles"].pop("calls").split())
"""Roles of turns whose text is the JSON of one call or of a list of calls."""
ROLES = {name: role for role, names in _NAMES["roles"].items() for name in names.split()}
"""Roles of turns, and the role of the message that each becomes."""
ROLE_KEYS, CONTENT_KEYS, SYSTEM_KEYS, TOOLS_KEYS = (
    _KEYS[part] for part in ("role", "content", "system", "tools")
)
TEXT_PARTS = (None, "text", "input_text", "output_text")
"""Types of those parts of a content that are text."""
HISTORY_KEY = "history"
TEMPLATE_KEYS = ("enable_thinking", "reasoning_effort")
"""Keys of a record that are variables of the chat template, as all keys in `TEMPLATE_DICT` are."""
TEMPLATE_DICT = "chat_template_kwargs"
MEDIA_KEYS = _KEYS["media"]
EXTRA_KEYS = (*SYSTEM_KEYS, *TOOLS_KEYS, HISTORY_KEY, TEMPLATE_DICT, *TEMPLATE_KEYS, *MEDIA_KEYS)
"""Parts of a conversation that a record of any shape may have next to its turns, and what no model reads."""

UNTRAINED_BY, _LISTED = (
    {name: int(value) for value, names in _NAMES[table].items() for name in names.split()}
    for table in ("untrained", "untrained_lists")
)
"""Weights of turns, and the value with which a turn is context alone."""
LISTED_WEIGHTS = UNTRAINED_BY | _LISTED
"""Weights of a record: a list with a value for each turn, or one value."""
TOKEN_WEIGHTS = _KEYS["token_weights"]

WEIGHT_WORDS = re.compile(
    r"(?:.*_)?(?:loss|train(?:ed|ing|able)?|mask(?:s|ed|ing)?|supervised?|learn(?:able)?|weights?|targets?"
    r"|labels?|ignored?|skip|include|exclude)(?:_.*)?"
)
"""What the name of a weight has that is none of these."""
THOUGHT_WORDS = re.compile(
    r"(?:.*_)?(?:thought|think|thinking|cot|rationale|reasoning)"
    r"(?:_?(?:trace|text|process|step|detail|block|trajector(?:y|ies)))?s?",
    re.IGNORECASE,
)
"""Names of what may be a thought or a part of the answer."""
MESSAGE_KEYS = ("role", "content", "tool_calls", *REASONING_KEYS)
"""Keys of a message that are rendered, or refused where the template leaves them out."""
CONTEXT_KEYS, QUESTION_PARTS, PROMPT_KEYS, LABEL_KEYS = (
    _KEYS[part] for part in ("context", "question_parts", "prompt", "label")
)
PAIR_ALIASES = tuple(
    (prompt, response) for prompt, names in _NAMES["pairs"].items() for response in names.split()
)
"""Other names of a prompt and its response."""
VALUE_KEYS = frozenset((*LABEL_KEYS, *LISTED_WEIGHTS, *TEMPLATE_KEYS))
"""What tables of text have as numbers and truth values."""
ANSWER_KEYS = tuple(dict.fromkeys(("completion", *(response for _, response in PAIR_ALIASES))))
TEXT_EXTRAS = ("role", *(key for key in EXTRA_KEYS if key not in MEDIA_KEYS), *ANSWER_KEYS)
"""Keys by which a record with a text is a part of a conversation."""
PARTS = re.compile(r'\s*\[\s*\{\s*"type"\s*:\s*"(?:input_|output_)?text"\s*,\s*"text"\s*:')
"""How the JSON text of a list of parts begins."""


def unusable(problem: str, *, fix: str) -> UserError:
    """UserError IDLM-0202 about a record; `build.encode` puts its location before the problem."""
    return UserError("IDLM-0202", problem, fix=fix)


def refuse_thoughts(given: Mapping[str, Any], name: str) -> None:
    """UserError IDLM-0202 where a record or a turn, called `name`, holds what may be a thought and none that
    is read, which that may repeat."""
    if thoughts_in(given):
        return
    for key, value in given.items():
        is_text = isinstance(value, (str, list, dict)) and not (is_empty(value) or is_mode(value))
        if is_text and THOUGHT_WORDS.fullmatch(key):
            raise unusable(
                f"{name} has {key}={shown(value)}, which may be a thought and is not read",
                fix=f"rename {key} to reasoning_content, write it into the answer, or delete it",
            )


def refuse_media(given: Mapping[str, Any], prefix: str = "") -> None:
    """UserError IDLM-0202 where a record or a turn has what no model of text reads."""
    for key, value in present(given, MEDIA_KEYS).items():
        raise unusable(
            f"{prefix}{key}={shown(value)} belongs to the conversation, and only text is read",
            fix=f"delete the record; delete the key {key} if the text stands without it",
        )


def thoughts_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is a thought and not the mode of one, by its key."""
    return {key: value for key, value in present(given, REASONING_KEYS).items() if not is_mode(value)}


def may_weigh(key: str, value: Any) -> bool:
    """Return whether a key that is not read has the name of a weight, and numbers or truth values."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()
    values = value if isinstance(value, list) and value else [value]
    return bool(WEIGHT_WORDS.fullmatch(name)) and all(isinstance(one, (bool, int, float)) for one in values)


def is_mode(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in _KEYS["modes"])


def shown(value: Any) -> str:
    return f"{value!r:.60}"


def present(record: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return those keys of a record that hold something: no null, no empty text, list or object."""
    found = {key: record[key] for key in keys if key in record}
    return {key: value for key, value in found.items() if not is_empty(value)}


def is_empty(value: Any) -> bool:
    return value in (None, [], {}) or (isinstance(value, str) and not value.strip())


def parsed(value: Any, name: str, *, fix: str) -> Any:
    """Parse JSON text; any other value is returned as it is. UserError IDLM-0202 if it is not valid."""
    if not isinstance(value, str):
        return value
    try:
        return json_value(value)
    except (ValueError, RecursionError) as error:
        raise unusable(
            f"{name}={shown(value)} is text that is not valid JSON: {json_problem(error)}", fix=fix
        ) from error


def parsed_or(text: str, default: Any) -> Any:
    """Return the value of JSON text, and `default` for other text."""
    try:
        return json_value(text)
    except (ValueError, RecursionError):
        return default


def text_of(value: Any, name: str) -> str:
    """Return a text, or the joined parts of one. UserError IDLM-0202 for anything that is not text."""
    if isinstance(value, list):
        return "".join(_part(part, f"{name}[{index}]") for index, part in enumerate(value))
    if not isinstance(value, str):
        raise unusable(
            f"{name}={shown(value)}, which is not text", fix=f"write {name} as text, or delete the record"
        )
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
