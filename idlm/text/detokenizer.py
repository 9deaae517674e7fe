"""Token ids to text: the one definition of an answer's text, whole or piece by piece.

If no character is broken, the text is what transformers decodes without special tokens, with spaces
unchanged. Each byte token that belongs to no character becomes one U+FFFD. Transformers replaces a whole run
of byte tokens if one of them is broken, including characters before it, which a stream could not take back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from idlm.text.tokenizer import hidden_token_ids, plain_text

REPLACEMENT = "\ufffd"
MAX_BYTES = 4
"""Largest number of bytes of a character, and so of tokens that it is split over."""
CHUNK = 64


class Detokenizer:
    """Turns a stream of token ids into pieces of text; the cuts between calls make no difference.

    A character split over several tokens is held back until it is complete or can no longer become so. Ids
    without a token are dropped, and hidden tokens unless `keeps_hidden`. Mutable: one object per generated
    sequence. A stream of n ids takes time in the order of n."""

    def __init__(self, tokenizer: Any, *, keeps_hidden: bool = False) -> None:
        self._tokenizer = tokenizer
        self._dropped = frozenset() if keeps_hidden else hidden_token_ids(tokenizer)
        # Decoding starts one settled group early, because some decoders strip the first token's space.
        self._context: list[int] = []
        self._before = ""
        self._pending: list[int] = []
        self._num_emitted = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids and return the text that is settled by them (often empty, never wrong)."""
        kept = self.kept(token_ids)
        return "".join(self._push_chunk(kept[start : start + CHUNK]) for start in range(0, len(kept), CHUNK))

    def flush(self) -> str:
        """Return the text still held back; an incomplete character becomes U+FFFD."""
        return self._settle(self._text(self._pending), len(self._pending)) if self._pending else ""

    def kept(self, token_ids: Iterable[int]) -> list[int]:
        """Return those of the ids that are text."""
        given = list(token_ids)
        # Look up each id once: a long answer has few different ids, and the look-up costs more than decoding.
        asked = list(set(given) - self._dropped)
        names = self._tokenizer.convert_ids_to_tokens(asked)
        text_ids = {token_id for token_id, name in zip(asked, names, strict=True) if name is not None}
        return [token_id for token_id in given if token_id in text_ids]

    def _push_chunk(self, token_ids: list[int]) -> str:
        """Decode many ids at once if no character is broken: the same result, and much faster."""
        if len(token_ids) > 1 and self._before:
            together = self._pending + token_ids
            text = self._text(together)
            if REPLACEMENT not in text:
                self._pending = together
                return self._settle(text, len(together))
        return "".join(map(self._push_one, token_ids))

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._text(self._pending)
        settled = text.rstrip(REPLACEMENT)
        if len(settled) == len(text):
            return self._settle(text, len(self._pending))
        if len(settled) > self._num_emitted:
            return self._emit_beginning(text, settled)
        num_broken = self._num_broken()
        if not num_broken:
            return ""
        delta = self._settle(self._text(self._pending[:num_broken]), num_broken)
        rest = self._text(self._pending)
        return delta if rest.endswith(REPLACEMENT) else delta + self._settle(rest, len(self._pending))

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

    def _settle(self, text: str, num_ids: int) -> str:
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
        if self._context:
            text = plain_text(self._tokenizer, self._context + token_ids)
            if text.startswith(self._before):
                return text[len(self._before) :]
        return plain_text(self._tokenizer, token_ids)


def answer_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text that a stream of these ids gives, decoded in one call if no character is broken."""
    detokenizer = Detokenizer(tokenizer)
    kept = detokenizer.kept(token_ids)
    text = plain_text(tokenizer, kept)
    return text if REPLACEMENT not in text else detokenizer.push(kept) + detokenizer.flush()
