"""The bytes of single tokens, which may be parts of characters, and where each token of a text begins."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from idlm.text.detokenizer import Detokenizer
from idlm.text.tokenizer import added_prefix, plain_text

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""Byte-level BPE writes each byte as a character that can be printed."""


class TokenBytes:
    """Bytes of tokens by the tokenizer's decoder: byte-level BPE, or sentencepiece with its byte tokens. The
    space that a token begins with stays, also where the decoder drops that of a text's first token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {idx: token.content for idx, token in tokenizer.added_tokens_decoder.items()}
        decoder = tokenizer.backend_tokenizer.decoder
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        steps = {step["type"]: step for step in state.get("decoders", [state] if state else [])}
        self._is_byte_level, self._has_byte_tokens = "ByteLevel" in steps, "ByteFallback" in steps
        given = (steps.get("Replace", {}).get("pattern", {}), steps.get("Metaspace", {}))
        self._space = given[0].get("String") or given[1].get("replacement")

    def __call__(self, token_id: int) -> bytes:
        """Those of a token; a token that is added stands for its text."""
        name = self._added.get(token_id) or self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return b""
        if token_id in self._added:
            return str(name).encode()
        if self._is_byte_level and all(char in _BYTE_OF for char in name):
            return bytes(_BYTE_OF[char] for char in name)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match[1], 16)])
        if self._space is not None:
            return str(name).replace(self._space, " ").encode()
        return plain_text(self._tokenizer, [token_id]).encode()


class TokenOffsets:
    """Counts the characters of a text before each of its tokens; tokens of one character begin where it does.
    Options are those of `Detokenizer`."""

    def __init__(self, tokenizer: Any, *, start: int = 0, **options: Any) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, **options)
        self._num_chars = start

    def push(self, token_ids: Iterable[int]) -> list[int]:
        positions = []
        for token_id in token_ids:
            positions.append(self._num_chars)
            if self._detokenizer is not None:
                self._num_chars += len(self._detokenizer.push([token_id]))
        return positions


def space_between(tokenizer: Any, last: Sequence[int], first: Sequence[int]) -> str:
    """The space that the token `first` begins with and that its text alone lacks, where it continues the text
    of `last`; each is one id or none."""
    lengths = [len(Detokenizer(tokenizer, after=after).push(first)) for after in (last, ())]
    return " " * (lengths[0] - lengths[1])


def prompt_offsets(tokenizer: Any, prompt: str | list[int], token_ids: list[int]) -> list[int]:
    """The positions of a prompt's tokens in it; what the tokenizer has put in front of a text is not there,
    unless the text spells it."""
    num_before = 0
    if tokenizer is not None and isinstance(prompt, str):
        prefix = added_prefix(tokenizer)
        is_added = token_ids[: len(prefix)] == prefix and not prompt.startswith(plain_text(tokenizer, prefix))
        num_before = len(prefix) if is_added else 0
    positions = TokenOffsets(tokenizer, shows_hidden=True)
    return [0] * num_before + positions.push(token_ids[num_before:])
