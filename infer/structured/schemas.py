"""Constraints as rules of llguidance's Lark, and what it leaves out of a JSON schema.

Unknown annotations refuse no request: they are left out, which is noted. Anything else that it
does not support is a problem, unless the schema itself sets `lenient`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from idlm.contracts import Constraint

JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}", "lenient": True}
"""Without a bound, a model may write blanks for ever."""
ANY_OBJECT = {"type": "object"}
OPTIONS_KEY = "x-guidance"
HEAD = "%llguidance"
"""How grammars begin that are composed here."""
_NOT_LENIENT = {"$comment": "not lenient"}
"""Marks a schema within a grammar that does not itself set the leniency that `json_rule` adds."""
LEFT_OUT = {"uniqueItems": "uniqueItems is not enforced"}
"""Keywords without which a schema still describes answers."""
_FORMAT, _KEYS, _ONE_OF = "Unknown format: ", "Unimplemented keys: ", "oneOf "
_TIMES = re.compile(r" \(\d+ times\)$")
_START = re.compile("^start:", re.MULTILINE)
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


def read_warnings(constraint: Constraint, warnings: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """What llguidance's warnings mean: notes for the user about what is left out of the constraint's schemas,
    and why they cannot be used, else empty."""
    notes, problem, is_lenient = dict[str, None](), "", _is_lenient(constraint)
    for warning in (_TIMES.sub("", each.strip()) for each in warnings):
        keys = json.loads(warning.removeprefix(_KEYS)) if warning.startswith(_KEYS) else []
        if warning.startswith(_FORMAT):
            notes[f"format {warning.removeprefix(_FORMAT)!r} is not enforced"] = None
        elif warning.startswith(_ONE_OF):
            notes["oneOf is anyOf: an answer may match several of its schemas"] = None
        elif warning.startswith(_KEYS) and {*keys} <= {*LEFT_OUT}:
            notes |= dict.fromkeys(LEFT_OUT[key] for key in sorted(keys))
        elif is_lenient:
            notes[warning] = None
        else:
            problem = problem or warning
    return tuple(notes), problem


def _is_lenient(constraint: Constraint) -> bool:
    """Of a grammar, whether each schema does: a warning does not name the schema."""
    if constraint.kind == "grammar":
        # Of a grammar that a user writes, llguidance refuses what other schemas have.
        return json.dumps(_NOT_LENIENT)[1:-1] not in constraint.text
    is_schema = constraint.kind == "json_schema"
    return is_schema and _own_options(json.loads(constraint.text)).get("lenient") is True


def _own_options(schema: dict[str, Any]) -> dict[str, Any]:
    options = schema.get(OPTIONS_KEY)
    return options if isinstance(options, dict) else {}


def answer_rules(constraint: Constraint) -> list[str]:
    """Lines of Lark that define the rule `answer`; the constraint is no grammar itself."""
    text = constraint.text
    if constraint.kind in ("json_schema", "json_object"):
        return [f"answer: {json_rule(json.loads(text) if text else ANY_OBJECT)}"]
    if constraint.kind == "choice":
        # One terminal: alternatives of a rule are limited to 2,000.
        return ["answer: ANSWER", f"ANSWER: {' | '.join(map(literal, json.loads(text)))}"]
    assert constraint.kind == "regex", f"{constraint.kind=}"
    return ["answer: ANSWER", f"ANSWER: /{_SLASH.sub(_escaped, text)}/"]


def after_thought(constraint: Constraint, close: str) -> Constraint:
    """The same for an answer that ends a thought first, by the tag `close`; of grammars for those of
    `calls_grammar` alone, which have one line for the whole answer."""
    if constraint.kind == "grammar":
        rules = [_START.sub("answer_:", constraint.text.partition("\n")[2])]
    else:
        rules = [*answer_rules(constraint), "answer_: answer"]
    lines = [f"{HEAD} {json.dumps({'no_forcing': True})}", r"start: thought /\n*/ answer_", *rules]
    lines += [f"thought[lazy]: THOUGHT {literal(close)}", r"THOUGHT: /(.|\n)*/"]
    return Constraint(kind="grammar", text="\n".join(lines))


def json_rule(schema: dict[str, Any]) -> str:
    """A schema within a rule of Lark, with the options that it does not set itself."""
    own = _own_options(schema)
    # An object of any kind leaves nothing out.
    mark = {} if own.get("lenient") is True or schema == ANY_OBJECT else _NOT_LENIENT
    whole = {**schema, **mark, OPTIONS_KEY: {**JSON_OPTIONS, **own}}
    return f"%json {json.dumps(whole, ensure_ascii=False)}"


def literal(text: str) -> str:
    # Else JSON would escape characters beyond 16 bits as two, which Lark does not support.
    return json.dumps(text, ensure_ascii=False)


def _escaped(found: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n"}.get(found[0], found[0])
