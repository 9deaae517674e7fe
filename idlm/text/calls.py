"""How families of models write calls of tools (`calls.toml`), and the reading of whole calls."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SEPARATORS = re.compile(r"[\s,;]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """An answer with calls is text and groups of calls. A group is `begin`, `lead`, one or more calls with
    `between` between them, and `finish`. A call is `opening`, in which NAME stands for the name, the
    arguments, and `closing`. This is what constraints allow; models write white space in other ways too.

    `needs`: texts that a chat template of the format has (none: `begin`). `tags`: what may be one token
    (none: `begin`). `lead` is Lark. `between`: None if a group has one call, and then groups have a line
    break between them. `end`: the tag that ends a group, which may lack at the end of an answer; empty: a
    group has all up to that end. `is_bare`: an answer that begins with a brace is a group without `begin`.
    `head`, `tail`: what precedes and follows arguments where calls are no JSON; empty: a call is a JSON
    object, or calls are a list of them."""

    begin: str
    opening: str
    closing: str = "}"
    needs: Sequence[str] = ()
    tags: Sequence[str] = ()
    lead: str = ""
    between: str | None = None
    finish: str = ""
    end: str = ""
    is_bare: bool = False
    head: str = ""
    tail: str = ""

    def opened(self, name: str) -> str:
        """The text of a call before its arguments."""
        written = name if self.head else json.dumps(name, ensure_ascii=False)
        return self.opening.replace("NAME", written)

    def read(self, body: str) -> list[tuple[str, str]]:
        """The calls of a group without `begin` and `end`, each a name and arguments as JSON; none if any part
        of it is something else."""
        try:
            return [_call(value, needs_arguments=self.is_bare) for value in self._values(body)]
        except (ValueError, RecursionError):
            return []

    def _values(self, body: str) -> Iterator[Any]:
        """The JSON objects of calls. Raises ValueError and RecursionError."""
        is_json, at = not self.head or body.lstrip().startswith(("[", "{")), 0
        while (at := _matched(_SEPARATORS, body, at).end()) < len(body):
            if is_json:
                value, at = _DECODER.raw_decode(body, at)
                yield from value if isinstance(value, list) else [value]
            else:
                head = _matched(re.compile(self.head), body, at)
                arguments, at = _DECODER.raw_decode(body, head.end())
                at = _matched(re.compile(self.tail), body, at).end()
                yield {"name": head["name"], "arguments": arguments}


def _matched(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str]:
    found = pattern.match(text, start)
    if found is None:
        raise ValueError(text[start : start + 40])
    return found


def _call(value: Any, *, needs_arguments: bool) -> tuple[str, str]:
    """The call of a JSON object with a name and, under one of two names, arguments. Raises ValueError."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments = name and value.get("arguments", value.get("parameters", None if needs_arguments else {}))
    if not (isinstance(name, str) and isinstance(arguments, dict)):
        raise ValueError("neither a name nor an object of arguments")
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FORMATS = {name: CallFormat(**fields) for name, fields in _TABLE.items()}
TAGS = tuple(dict.fromkeys(tag for each in FORMATS.values() for tag in each.tags or (each.begin,)))
_OTHERS = ("<function=", "<arg_key>")
"""In templates whose calls no format here has."""


def format_of(template: str) -> CallFormat | None:
    """The format of a chat template's calls; None if it has none that is known."""
    fits = (each for each in FORMATS.values() if all(map(template.__contains__, each.needs or (each.begin,))))
    return None if any(map(template.__contains__, _OTHERS)) else next(fits, None)
