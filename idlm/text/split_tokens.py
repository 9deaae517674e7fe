"""Texts that are no more than text: special tokens that they spell are encoded as their letters are, while
those of the chat template around them stay special.

The template renders texts in which a character stands for each special token. Then the template's own special
tokens are marked, the texts are put back, and a copy of the tokenizer with marks in place of special tokens
encodes the whole. So nothing else of the encoding changes. Marks of turns count as special tokens here.

A template may also make a special token of parts: of two texts that it joins, of one that it changes, of a
name between `<|` and `|>`. A rendering without such parts has fewer special tokens; then they are refused."""

from __future__ import annotations

import contextlib
import copy
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from idlm.errors import UserError

_FIRST_STAND_IN = 0x100000
"""Private characters begin here; those that a text has do not stand for a token in it."""

_NO_PART = "\uf8fe"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KNOWN = {*ROLES, "text", "object", "string", "number", "integer", "boolean", "array", "auto", "none"}
"""Texts by which templates decide, which are parts of special tokens too."""

_MARK = re.compile(r"(?s)(?=.*[^\W_])(?=.*[^\w\s])")
"""What the mark of a turn has: a letter or digit, and punctuation."""


class SplitTokens:
    """Encodes conversations whose texts may spell special tokens. `special`: ids of all of them, and of
    added tokens that count as such; `hidden`: of those that are text where a text spells them. Not for
    several threads at once."""

    def __init__(self, tokenizer: Any, special: Collection[int], hidden: Collection[int]) -> None:
        self._tokenizer, self._hidden_ids = tokenizer, frozenset(hidden)
        self._tokens = {str(tokenizer.convert_ids_to_tokens(idx)): idx for idx in special}
        self._any = _pattern(self._tokens)
        self._hidden = _pattern(token for token, idx in self._tokens.items() if idx in self._hidden_ids)
        self._parts = "\n".join(token for token, idx in self._tokens.items() if idx in self._hidden_ids)
        breaking = {char for char in self._parts if not char.isspace() and not re.match(r"\w", char)}
        self._no_parts = str.maketrans(dict.fromkeys(breaking, _NO_PART))
        # No text can hold a mark, because it is not known before.
        key = secrets.token_hex(16)
        self._marks = {token: f"\uf8ff{key}-{index}\uf8ff" for index, token in enumerate(self._tokens)}
        self._backend: Any = None
        self._ids: dict[int, int] = {}

    def stand_ins(self, value: Any) -> dict[str, str]:
        """A character for each hidden token that texts within the JSON `value` spell."""
        texts = [*texts_of(value)]
        found = {token for text in texts for token in self._hidden.findall(text)}
        if not found:
            return {}
        taken = set().union(*texts)
        free = (char for char in map(chr, count(_FIRST_STAND_IN)) if char not in taken)
        return dict(zip(sorted(found), free, strict=False))

    def replaced(self, value: Any, stand_ins: Mapping[str, str]) -> Any:

        def change(text: str) -> str:
            return self._hidden.sub(lambda token: stand_ins[token[0]], text)

        return _mapped(value, change, change)

    def check(self, value: Any, text: str, render: Callable[[Any], str]) -> None:
        """Raise UserError IDLM-0240 if the template made a special token of parts that texts within `value`
        spell. `text`: what `render` makes of it."""
        without = _mapped(value, self._without_parts, lambda key: key.translate(self._no_parts))
        if without == value:
            return
        made = Counter(self._hidden.findall(text)) - Counter(self._hidden.findall(render(without)))
        if made:
            raise UserError(
                "IDLM-0240",
                f"the messages and the chat template together spell the special token {min(made)}",
                fix="leave parts of it out of the messages, or set split_special_tokens=false",
            )

    def _without_parts(self, text: str) -> str:
        is_part = text not in _KNOWN and bool(text.strip()) and text in self._parts
        return _NO_PART if is_part else text.translate(self._no_parts)

    def encode(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """The ids of a conversation that was rendered with stand-ins. UserError IDLM-0240 if the vocabulary
        itself, without its list of special tokens, makes one of letters."""
        if self._backend is None:
            self._backend = self._copy()
        text = restored(self._any.sub(lambda token: self._marks[token[0]], text), stand_ins)
        found: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        # Letters that the vocabulary lacks are its unknown token, as in any text.
        made = self._hidden_ids.intersection(found) - {self._tokenizer.unk_token_id}
        if made:
            token = self._tokenizer.convert_ids_to_tokens(min(made))
            raise UserError(
                "IDLM-0240",
                f"the messages spell the special token {token}, which this tokenizer cannot write as text",
                fix="leave it out of the messages, or set split_special_tokens=false",
            )
        return [self._ids.get(idx, idx) for idx in found]

    def _copy(self) -> Any:
        """The tokenizer with marks in place of special tokens."""
        from tokenizers import AddedToken

        backend = copy.deepcopy(self._tokenizer.backend_tokenizer)
        for token, mark in self._marks.items():
            given = self._tokenizer.added_tokens_decoder.get(self._tokens[token])
            flags = {
                name: getattr(given, name, False)
                for name in ("lstrip", "rstrip", "single_word", "normalized")
            }
            backend.add_special_tokens([AddedToken(token, special=True, **flags)])
            backend.add_tokens([AddedToken(mark, special=False, **flags)])
            self._ids[backend.token_to_id(mark)] = self._tokens[token]
        backend.encode_special_tokens = True
        return backend


def written_marks(
    tokenizer: Any, template: str, render: Callable[[Any], str], *, tags: Collection[str]
) -> frozenset[int]:
    """Ids of added tokens that a template writes, such as marks of turns, special or not, without `tags`:
    those in its text, and those that it composes when it `render`s turns. Words, whitespace and punctuation
    are none: names of fields and roles hold them, or any text does."""
    texts, first = [template], {"role": "user", "content": "a"}
    for turn in ({"role": role, "content": "a"} for role in ROLES):
        for turns in ([turn], [first, turn]):
            with contextlib.suppress(UserError):
                texts.append(render(turns))
    added = ((idx, token.content) for idx, token in tokenizer.added_tokens_decoder.items())
    return frozenset(
        idx
        for idx, text in added
        if text not in tags and _MARK.match(text) and any(text in each for each in texts)
    )


def restored(text: str, stand_ins: Mapping[str, str]) -> str:
    """The text with tokens in place of the characters that stand for them."""
    for token, char in stand_ins.items():
        text = text.replace(char, token)
    return text


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def texts_of(value: Any) -> Iterator[str]:
    """All texts of a JSON value, names of fields included, in any order and of any depth."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            left += (*one.keys(), *one.values())
        elif isinstance(one, (list, tuple)):
            left += one


def _mapped(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change_key(key): _mapped(item, change, change_key) for key, item in value.items()}
    return [_mapped(item, change, change_key) for item in value] if isinstance(value, Sequence) else value
