"""Token ids to text: the one definition of an answer's text, whole or piece by piece."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from idlm.text.tokenizer import has_common_decode, hidden_token_ids, plain_text

REPLACEMENT = "\ufffd"
MAX_BYTES = 4
"""Largest number of bytes of a character, and so of tokens that it is split over."""
PIECEWISE = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
"""Steps of decoders that give each token its text, whatever is before it, if no character is broken; only a
text's first token may lose a space."""


@functools.lru_cache(maxsize=16)
def _is_piecewise(tokenizer: Any) -> bool:
    """Whether its decoder has such steps alone."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None or not has_common_decode(tokenizer.__class__):
        return False
    state = json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state])
    # A step that strips the end of a text, or replaces what several tokens may spell, needs all of it.
    replaced = [step["pattern"].get("String", "") for step in steps if "pattern" in step]
    is_known = all(step["type"] in PIECEWISE and not step.get("stop") for step in steps)
    return is_known and all(len(each) == 1 for each in replaced)


@functools.lru_cache(maxsize=32)
def _known_texts(tokenizer: Any, shows_hidden: bool) -> dict[int, tuple[str, str]]:
    """Texts of ids, as far as they were needed: after another token, and alone."""
    return {}


class Detokenizer:
    """Turns a stream of token ids into pieces of text; the cuts between calls make no difference.

    If no character is broken, the text is what transformers decodes without special tokens, with spaces
    unchanged. A character split over several tokens is held back until it is complete or can no longer become
    so: each byte token that belongs to no character becomes one U+FFFD, where transformers replaces a whole
    run of them, with characters before it that a stream could not take back. Ids without a token are dropped,
    and hidden tokens unless `shows_hidden`. A stream of n ids takes time in the order of n."""

    def __init__(self, tokenizer: Any, *, shows_hidden: bool = False) -> None:
        self._tokenizer = tokenizer
        self._dropped = frozenset() if shows_hidden else hidden_token_ids(tokenizer)
        self._is_piecewise, self._known = _is_piecewise(tokenizer), _known_texts(tokenizer, shows_hidden)
        # Decoding starts one settled group early, because some decoders strip the first token's space.
        self._context: list[int] = []
        self._before = ""
        self._pending: list[int] = []
        self._num_emitted = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids and return the text that is settled by them (often empty, never wrong)."""
        parts, known = list[str](), self._known
        for token_id in token_ids:
            follows = bool(self._before) and not self._pending
            if follows and token_id in known:
                text, self._before = known[token_id]
                self._context = [token_id]
            elif self.visible([token_id]):
                text = self._push_one(token_id)
                is_whole = not self._pending and self._context == [token_id] and REPLACEMENT not in text
                if follows and is_whole and self._is_piecewise:
                    known[token_id] = text, self._before
            else:
                continue
            parts.append(text)
        return "".join(parts)

    def flush(self) -> str:
        """Return the text still held back; an incomplete character becomes U+FFFD."""
        return self._take_whole(self._text(self._pending), len(self._pending)) if self._pending else ""

    def visible(self, token_ids: Iterable[int]) -> list[int]:
        """Return those of the ids that are text."""
        given = list(token_ids)
        # Look up each id once: a long answer has few different ids, and the look-up costs more than decoding.
        ids = list(set(given) - self._dropped)
        names = self._tokenizer.convert_ids_to_tokens(ids)
        text_ids = {token_id for token_id, name in zip(ids, names, strict=True) if name is not None}
        return [token_id for token_id in given if token_id in text_ids]

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._text(self._pending)
        settled = text.rstrip(REPLACEMENT)
        if len(settled) == len(text):
            return self._take_whole(text, len(self._pending))
        if len(settled) > self._num_emitted:
            return self._emit_beginning(text, settled)
        num_broken = self._num_broken()
        if not num_broken:
            return ""
        delta = self._take_whole(self._text(self._pending[:num_broken]), num_broken)
        rest = self._text(self._pending)
        return delta if rest.endswith(REPLACEMENT) else delta + self._take_whole(rest, len(self._pending))

    def _emit_beginning(self, text: str, settled: str) -> str:
        """Return the newly `settled` start of the pending `text`, whose end is a broken character."""
        delta = settled[self._num_emitted :]
        # Only the last token is broken: the others need not be decoded again.
        self._pending = self._pending[-1:]
        self._num_emitted = len(self._text(self._pending)) - (len(text) - len(settled))
        return delta

    def _num_broken(self) -> int:
        """Return how many of the pending ids, which end in a broken character, no later id can complete."""
        cuts = range(1, len(self._pending))
        for cut in cuts:
            if not self._text(self._pending[cut:]).endswith(REPLACEMENT):
                return cut
        if len(self._pending) < MAX_BYTES:
            return 0
        # Every cut through a character breaks it once more.
        halves = [self._text(self._pending[:cut]) + self._text(self._pending[cut:]) for cut in cuts]
        return min(cuts, key=lambda cut: len(halves[cut - 1]))

    def _take_whole(self, text: str, num_ids: int) -> str:
        """Return the rest of the `text` of the first `num_ids` pending ids and remove them."""
        delta = text[self._num_emitted :]
        done, self._pending = self._pending[:num_ids], self._pending[num_ids:]
        before = plain_text(self._tokenizer, done)
        # A context must have text without a broken character at its end, to show whether later ids change it.
        if not before.endswith(REPLACEMENT) and (before or not self._context):
            self._context, self._before = done, before
        self._num_emitted = max(self._num_emitted - len(text), 0)
        return delta

    def _text(self, token_ids: list[int]) -> str:
        """Return the text of ids after the context, or alone if they break a run of bytes at its end."""
        text = plain_text(self._tokenizer, self._context + token_ids)
        if self._context and not text.startswith(self._before):
            return plain_text(self._tokenizer, token_ids)
        return text[len(self._before) :]


def answer_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text that a stream of these ids gives, decoded in one call if no character is broken."""
    detokenizer = Detokenizer(tokenizer)
    shown = detokenizer.visible(token_ids)
    text = plain_text(tokenizer, shown)
    return text if REPLACEMENT not in text else detokenizer.push(shown) + detokenizer.flush()
