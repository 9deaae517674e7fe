"""The vocabulary as llguidance sees it: the bytes of every token, and how text is split into tokens.

llguidance by itself takes every added token of the form `<...>` for a special one, which is no text. Here a
token is text if answers show it (`hidden_token_ids`), so that a grammar's text can be a model's own tags, and
text that looks like a hidden token is spelled by other tokens."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse

from idlm.text.tokenizer import hidden_token_ids

MAX_SPELLED = 4096
"""Forced texts whose tokens are cached; grammars force the same ones again and again."""
LARK = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|<[^\s<>]+>')
"""Strings, comments and regular expressions of a Lark grammar, in which no token is named, and names."""


class Vocabulary:
    """`tokens` is llguidance's. Raises ValueError for a tokenizer that llguidance cannot read."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], llguidance: Any) -> None:
        hidden = hidden_token_ids(tokenizer)
        shown = {idx: token for idx, token in tokenizer.added_tokens_decoder.items() if idx not in hidden}
        source = _without_additions(tokenizer.backend_tokenizer, hidden)
        pieces = _Pieces(source, vocab_size, eos_ids[0], tokenizer.unk_token_id)
        special = {*eos_ids, *hidden}
        if isinstance(tokenizer.backend_tokenizer.decoder, Fuse):
            # Its tokens are joined as they are.
            for piece, token_id in tokenizer.get_vocab().items():
                pieces.tokens[token_id] = piece.encode()
        else:
            read = llguidance.LLTokenizer(source, n_vocab=vocab_size, slices=[])
            special |= {idx for idx in range(vocab_size) if read.is_special_token(idx)} - shown.keys()
            for token_id in tokenizer.get_vocab().values():
                pieces.tokens[token_id] = read.decode_bytes([token_id])
        # llguidance lets a token without bytes follow wherever a token may that is named.
        empty = [idx for idx, piece in enumerate(pieces.tokens) if not piece]
        special.update(empty)
        for idx in empty:
            pieces.tokens[idx] = f"<|no_text_{idx}|>".encode()
        pieces.special_token_ids = sorted(special)
        self.tokens = llguidance.LLTokenizer(pieces, n_vocab=vocab_size, eos_token=list(eos_ids))
        pieces.spell_greedily = self.tokens.greedy_tokenize
        self._names = {str(token.content): idx for idx, token in shown.items()}

    def with_ids(self, lark: str) -> str:
        """A Lark grammar with ids in place of names of added tokens that are text. It forces nothing then:
        llguidance takes a forced id back by the length of its text, which would break tested drafts."""
        has_ids = False

        def named(found: re.Match[str]) -> str:
            nonlocal has_ids
            name = f"<[{self._names[found[0]]}]>" if found[0] in self._names else found[0]
            has_ids |= name.startswith("<[")
            return name

        text = LARK.sub(named, lark)
        return f'%llguidance {{"no_forcing": true}}\n{text}' if has_ids else text


class _Pieces:
    """Tokens and the splitting of text. The names are those that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    spell_greedily: Any = None

    def __init__(self, source: str, vocab_size: int, eos_token_id: int, unknown_id: int | None) -> None:
        self._tokenizer = Tokenizer.from_str(source)
        self.eos_token_id, self._unknown_id = eos_token_id, unknown_id
        # Text that looks like a hidden token is text.
        self._tokenizer.encode_special_tokens = True
        self.tokens = [b""] * vocab_size
        self.special_token_ids: list[int] = []
        self._spell = functools.lru_cache(MAX_SPELLED)(self._split)

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text, up to what the vocabulary lacks."""
        return list(self._spell(text))

    def _split(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._unknown_id in ids:
            return tuple(ids[: ids.index(self._unknown_id)])
        is_text = b"".join(self.tokens[token_id] for token_id in ids) == text.encode()
        is_text = is_text and not set(ids).intersection(self.special_token_ids)
        return tuple(ids if is_text else self.spell_greedily(text))


def _without_additions(backend: Any, hidden: frozenset[int]) -> str:
    """The JSON of a tokenizer that adds and drops no spaces; added tokens are special only if hidden."""
    whole: dict[str, Any] = json.loads(backend.to_str())
    for token in whole["added_tokens"]:
        token |= {"special": token["id"] in hidden, "lstrip": False, "rstrip": False}
    settings = {"post_processor": None, "truncation": None, "padding": None}
    whole |= settings | {name: _bare(whole[name]) for name in ("normalizer", "pre_tokenizer")}
    return json.dumps(whole, ensure_ascii=False)


def _bare(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A step of the tokenizer without the space that it puts in front of a text."""
    if step is None or step["type"] == "Prepend":
        return None
    parts = next((name for name in ("normalizers", "pretokenizers") if name in step), None)
    if parts is not None:
        return {**step, parts: [kept for part in step[parts] if (kept := _bare(part)) is not None]}
    if "prepend_scheme" in step:
        return {**step, "prepend_scheme": "never"}
    return {**step, "add_prefix_space": False} if "add_prefix_space" in step else step
