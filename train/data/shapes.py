"""The shapes that a record of a file may have, how they are told apart, and the samples that a record
becomes.

All records of one source have one shape: a file of several shapes is a mistake far more often than intended.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError
from idlm.train.data.base import Encoder
from idlm.train.data.layout import Sample

AUTO = "auto"
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
UNSUPPORTED = ("tools", "functions")
MAX_ID = 2**31
"""Caches store ids in 31 bits."""

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """`keys`: alternative sets of keys, one of which a record must have; `example` is shown to users."""

    keys: tuple[tuple[str, ...], ...]
    example: str
    samples: Callable[[Record, Encoder, str], list[Sample]]

    def fits(self, record: Record) -> bool:
        """Return whether the record has the keys, with any values."""
        return any(all(key in record for key in keys) for keys in self.keys)


def detect_shape(record: Record, wanted: str, *, origin: str) -> str:
    """Return the name of the record's shape; UserError IDLM-0202 where no shape or more than one fits."""
    if wanted != AUTO:
        if not SHAPES[wanted].fits(record):
            raise _unknown(record, origin, f"is not of data.shape={wanted}")
        return wanted
    fitting = [name for name, shape in SHAPES.items() if shape.fits(record)]
    if "answers" in fitting:
        fitting = ["answers"]
    if not fitting:
        raise _unknown(record, origin, "has none of the known shapes")
    if len(fitting) > 1:
        raise UserError(
            "IDLM-0202",
            f"{origin} fits several shapes: {', '.join(fitting)}",
            fix=f"choose one of them: data.shape={fitting[0]}",
        )
    return fitting[0]


def check_same_shape(record: Record, shape: str, *, origin: str, first: str) -> None:
    """Raise UserError IDLM-0230 where the record does not have the shape of the first record."""
    if not SHAPES[shape].fits(record):
        raise UserError(
            "IDLM-0230",
            f"{origin} has the keys {sorted(record)}, but {first} is of the shape {shape!r}: "
            f"{SHAPES[shape].example}",
            fix="put each shape into a file of its own and train on one of them",
        )


def samples_of(record: Record, shape: str, encoder: Encoder, *, origin: str) -> list[Sample]:
    """Return the samples of one record; UserErrors name `origin`."""
    unsupported = [key for key in UNSUPPORTED if record.get(key)]
    if unsupported:
        raise _malformed(origin, f"{unsupported[0]!r}, which is not supported", shape)
    return SHAPES[shape].samples(record, encoder, origin)


def _messages(record: Record, encoder: Encoder, origin: str) -> list[Sample]:
    messages = record["messages"]
    _check_messages(messages, origin, "messages")
    return encoder.messages([without_nulls(message) for message in messages], origin=origin)


def _sharegpt(record: Record, encoder: Encoder, origin: str) -> list[Sample]:
    turns = record["conversations"]
    if not _is_list_of(turns, ("from", "value")):
        raise _malformed(origin, "conversations that are not a list of {from, value} texts", "sharegpt")
    strange = [turn["from"] for turn in turns if turn["from"] not in SHAREGPT_ROLES]
    if strange:
        known = ", ".join(SHAREGPT_ROLES)
        raise _malformed(origin, f"a turn from {strange[0]!r}; known are {known}", "sharegpt")
    messages = [{"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    return encoder.messages(messages, origin=origin)


def _pair(record: Record, encoder: Encoder, origin: str) -> list[Sample]:
    key = "response" if "response" in record else "completion"
    prompt, response = _texts(record, ("prompt", key), origin, "pair")
    return [encoder.pair(prompt, response, origin=origin)]


def _alpaca(record: Record, encoder: Encoder, origin: str) -> list[Sample]:
    instruction, output = _texts(record, ("instruction", "output"), origin, "alpaca")
    context = record.get("input") or ""
    if not isinstance(context, str):
        raise _malformed(origin, "an input that is not text", "alpaca")
    prompt = f"{instruction}\n\n{context}" if context.strip() else instruction
    return [encoder.pair(prompt, output, origin=origin)]


def _text(record: Record, encoder: Encoder, origin: str) -> list[Sample]:
    (text,) = _texts(record, ("text",), origin, "text")
    if not text.strip():
        raise UserError(
            "IDLM-0204", f"{origin} has nothing to predict (an empty text)", fix="delete the record"
        )
    return [encoder.text(text, origin=origin)]


def _answers(record: Record, encoder: Encoder, origin: str) -> list[Sample]:
    prompt, token_ids = record["prompt"], record["token_ids"]
    _texts(record, ("text", "finish_reason"), origin, "answers")
    if not _are_ids(token_ids):
        raise _malformed(origin, "token_ids that are not whole numbers in [0, 2**31)", "answers")
    if isinstance(prompt, list) and not _are_ids(prompt):
        _check_messages(prompt, origin, "answers")
    elif not isinstance(prompt, (str, list)) or not prompt:
        raise _malformed(origin, "a prompt that is neither text, ids nor messages", "answers")
    return encoder.answer(prompt, record, origin=origin)


SHAPES: dict[str, Shape] = {
    "messages": Shape((("messages",),), '{"messages": [{"role": str, "content": str}, ...]}', _messages),
    "sharegpt": Shape(
        (("conversations",),), '{"conversations": [{"from": str, "value": str}, ...]}', _sharegpt
    ),
    "answers": Shape(
        (("prompt", "text", "token_ids", "finish_reason"),), "a record of idlm-generate output=", _answers
    ),
    "pair": Shape(
        (("prompt", "response"), ("prompt", "completion")), '{"prompt": str, "response": str}', _pair
    ),
    "alpaca": Shape(
        (("instruction", "output"),), '{"instruction": str, "input": str, "output": str}', _alpaca
    ),
    "text": Shape((("text",),), '{"text": str}', _text),
}
SHAPE_CHOICES = (AUTO, *SHAPES)


@functools.cache
def known_keys() -> frozenset[str]:
    """Return all keys that are read; other columns of a table need not be loaded."""
    keys = {key for shape in SHAPES.values() for keys in shape.keys for key in keys}
    return frozenset(keys | {"input", "num_prompt_tokens", *UNSUPPORTED})


def wanted_columns(names: Sequence[str]) -> list[str]:
    """Return the columns that a shape may have; all where there are none, so that an error can name them."""
    return [name for name in names if name in known_keys()] or list(names)


def without_nulls(record: Record) -> dict[str, Any]:
    """Return a record of a table without its nulls, which stand for keys that the record lacks."""
    return {key: value for key, value in record.items() if value is not None}


def _texts(record: Record, keys: tuple[str, ...], origin: str, shape: str) -> list[str]:
    wrong = [key for key in keys if not isinstance(record[key], str)]
    if wrong:
        raise _malformed(origin, f"{wrong[0]}={record[wrong[0]]!r:.60}, which is not text", shape)
    return [record[key] for key in keys]


def _check_messages(messages: Any, origin: str, shape: str) -> None:
    if not _is_list_of(messages, ("role", "content")):
        raise _malformed(origin, "messages that are not a list of {role, content} texts", shape)
    strange = [message["role"] for message in messages if message["role"] not in ROLES]
    if strange:
        # Many templates silently leave out a turn of an unknown role.
        raise UserError(
            "IDLM-0202",
            f"{origin} has a message of the role {strange[0]!r}{did_you_mean(strange[0], ROLES)}",
            fix=f"roles are {', '.join(ROLES)}; data.shape=sharegpt (from, value) knows human and gpt",
        )


def _is_list_of(turns: Any, keys: tuple[str, str]) -> bool:
    if not isinstance(turns, list) or not turns:
        return False
    return all(
        isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in keys) for turn in turns
    )


def _are_ids(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < MAX_ID for value in values)


def _malformed(origin: str, found: str, shape: str) -> UserError:
    return UserError("IDLM-0202", f"{origin} has {found}", fix=f"write it as {SHAPES[shape].example}")


def _unknown(record: Record, origin: str, problem: str) -> UserError:
    """The error about a record without a known shape; names the shape with the most similar keys."""
    candidates = [(name, keys) for name, shape in SHAPES.items() for keys in shape.keys if name != "answers"]

    def likeness(candidate: tuple[str, tuple[str, ...]]) -> float:
        ratios = [
            max((difflib.SequenceMatcher(None, key, given).ratio() for given in record), default=0.0)
            for key in candidate[1]
        ]
        return sum(ratios) / len(ratios)

    name, keys = max(candidates, key=likeness)
    missing = [key for key in keys if key not in record]
    lacks = f", which lacks {', '.join(missing)}" if missing else ""
    return UserError(
        "IDLM-0202",
        f"{origin} {problem}: it has the keys {sorted(record)}; the nearest shape is {name!r}{lacks}",
        fix=f"write {SHAPES[name].example}; shapes: {', '.join(SHAPES)}",
    )
