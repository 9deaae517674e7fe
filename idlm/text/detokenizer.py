"""Token ids to text: the one definition of an answer's text, whole or piece by piece, up to a stop string."""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from idlm.contracts import SamplingParams
from idlm.text.templates import all_template_text
from idlm.text.thoughts import CLOSE, ThoughtReader, is_opened
from idlm.text.tokenizer import has_common_decode, hidden_token_ids, plain_text

REPLACEMENT = "\ufffd"
MAX_BYTES = 4
"""Largest number of bytes of a character, and so of tokens that it is split over."""
PIECEWISE = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
"""Steps of decoders that give each token its text, whatever is before it, if no character is broken; only a
text's first token may lose a space."""
FIRST_MARK, NUM_MARKS = 0xD800, 0x800
"""Half surrogates, which no text has, stand for tokens."""


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
    and hidden tokens unless `shows_hidden`. A stream of n ids takes time in the order of n.

    `after`: the id before the first one, whose text this one continues. Without it, and after a hidden
    token, decoders like those of sentencepiece drop the space that a text begins with."""

    def __init__(self, tokenizer: Any, *, shows_hidden: bool = False, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._dropped = frozenset() if shows_hidden else hidden_token_ids(tokenizer)
        self._is_piecewise, self._known = _is_piecewise(tokenizer), _known_texts(tokenizer, shows_hidden)
        # Decoding starts one settled group early, because some decoders strip the first token's space.
        self._context = self.visible(after)
        self._before = plain_text(tokenizer, self._context)
        if REPLACEMENT in self._before:
            self._context, self._before = [], ""
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


class AnswerText:
    """The text of a growing answer, which is released as soon as it cannot belong to a stop string; the first
    stop string ends it and is left out. Stop strings may name tokens that the text does not show, such as
    `<|im_end|>`, alone or within text. They do not act within the reasoning that begins an answer, nor in the
    line breaks after it, so that a stop string of line breaks leaves the answer; but one with `</think>` may
    end the answer there.

    `hidden`: names of tokens that the text does not show. `reasoning`: what may begin the answer,
    in which stop strings do not act; None: they always do."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        *,
        hidden: Mapping[int, str] | None = None,
        reasoning: ThoughtReader | None = None,
    ) -> None:
        self._detokenizer, self.has_stops, self._reasoning = detokenizer, bool(stop), reasoning
        # A stop string that has the tag may begin with it.
        self._searched = {"answer", *(("close", "gap") if any(CLOSE in each for each in stop) else ())}
        named = [(idx, name) for idx, name in (hidden or {}).items() if any(name in each for each in stop)]
        marks = {name: chr(FIRST_MARK + position) for position, (_, name) in enumerate(named[:NUM_MARKS])}
        self._marks = {idx: marks[name] for idx, name in named[:NUM_MARKS]}
        # One search sees the text as it is shown, the other one also the marks of hidden tokens.
        self._shown, self._marked = _Search(stop), _Search([_with_marks(each, marks) for each in stop])
        self._mark_positions: list[int] = []
        """Where marks are in the marked text."""
        self._held = ""
        self._num_released = 0
        """Characters after the reasoning."""
        self._released: list[str] = []
        self._num_taken = 0
        """Parts of the released text that were taken."""
        self.is_stopped = False

    @classmethod
    def of(cls, tokenizer: Any, prompt_ids: Sequence[int], params: SamplingParams) -> AnswerText:
        """The text of an answer to a prompt."""
        if not params.stop:
            return cls(Detokenizer(tokenizer), ())
        ids, acts = sorted(hidden_token_ids(tokenizer)), params.stop_in_reasoning
        acts = CLOSE not in all_template_text(tokenizer) if acts is None else acts
        return cls(
            Detokenizer(tokenizer),
            params.stop,
            hidden=dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)),
            reasoning=None if acts else ThoughtReader(is_open=is_opened(tokenizer, prompt_ids)),
        )

    @property
    def text(self) -> str:
        """All released text."""
        return "".join(self._released)

    def take(self) -> str:
        """The text that was released since the last call."""
        start, self._num_taken = self._num_taken, len(self._released)
        return "".join(self._released[start:])

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the newly released text."""
        if not token_ids:
            return ""
        if not self.has_stops:
            self._released.append(self._detokenizer.push(token_ids))
            return self._released[-1]
        if not self._marks:
            return self._push(self._detokenizer.push(token_ids))
        parts = list[str]()
        for token_id in token_ids:
            mark = self._marks.get(token_id)
            parts.append(self._push(self._detokenizer.push([token_id])) if mark is None else self._mark(mark))
        return "".join(parts)

    def finish(self) -> str:
        """End the answer; returns the text that was held back."""
        return self._push(self._detokenizer.flush(), is_last=True)

    def _push(self, text: str, *, is_last: bool = False) -> str:
        if self.is_stopped:
            return ""
        before, text = self._split(text, is_last=is_last)
        released = before + (self._search(text, text, is_last=is_last) if self.has_stops else text)
        self._released.append(released)
        return released

    def _split(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """The part of more text in which stop strings do not act, and the part in which they do."""
        if self._reasoning is None:
            return "", text
        parts = self._reasoning.push(text, is_last=is_last)
        searched = "".join(part.text for part in parts if part.kind in self._searched)
        return "".join(part.text for part in parts if part.kind not in self._searched), searched

    def _mark(self, mark: str) -> str:
        """Append a token that stop strings name."""
        if self.is_stopped or (self._reasoning is not None and self._reasoning.is_open):
            return ""
        released = ""
        if self._reasoning is not None:
            # No reasoning begins after such a token.
            before, text = self._split("", is_last=True)
            released = before + self._search(text, text, is_last=False)
        self._mark_positions.append(self._marked.length)
        released += self._search("", mark, is_last=False)
        self._released.append(released)
        return released

    def _search(self, shown: str, marked: str, *, is_last: bool) -> str:
        """Look for stop strings, and return the text before the first one, or before where one may begin."""
        self._held += shown
        self._shown.push(shown)
        ends, hits = [self._shown.end(is_last=is_last)], [self._shown.hit]
        if self._marks:
            self._marked.push(marked)
            end = self._marked.end(is_last=is_last)
            ends.append(end - bisect_left(self._mark_positions, end))
            hits.append(None if self._marked.hit is None else ends[-1])
        found = [hit for hit in hits if hit is not None]
        self.is_stopped = bool(found)
        size = min(found or ends) - self._num_released
        released, self._held = self._held[:size], self._held[size:]
        self._num_released += size
        return released


class _Search:
    """Stop strings in a growing text of `length` characters. `hit`: where the first one begins."""

    def __init__(self, stops: Sequence[str]) -> None:
        # By first character, so that a long list costs little where none of its strings begins.
        self._stops: dict[str, list[str]] = {}
        for text in stops:
            self._stops.setdefault(text[0], []).append(text)
        self._held = ""
        self.length = 0
        self.hit: int | None = None

    def push(self, text: str) -> None:
        """Append text."""
        self._held += text
        self.length += len(text)
        start = self.length - len(self._held)
        begins = [
            (position, stops) for position, char in enumerate(self._held) if (stops := self._stops.get(char))
        ]
        hits = (position for position, stops in begins if self._held.startswith(tuple(stops), position))
        hit = next(hits, None)
        self.hit = None if hit is None else start + hit
        self._held = self._held[self._first_open(begins) :]

    def end(self, *, is_last: bool) -> int:
        """The position of the hit; without one, that before which none can begin any more."""
        if self.hit is not None:
            return self.hit
        return self.length if is_last else self.length - len(self._held)

    def _first_open(self, begins: list[tuple[int, list[str]]]) -> int:
        """First position from which the held text, to its end, is the beginning of a stop string."""
        rests = ((position, self._held[position:], stops) for position, stops in begins)
        found = (position for position, rest, stops in rests if any(stop.startswith(rest) for stop in stops))
        return next(found, len(self._held))


def _with_marks(stop: str, marks: Mapping[str, str]) -> str:
    """A stop string with marks in place of the names of hidden tokens."""
    names = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    return re.sub(names, lambda found: marks[found[0]], stop) if marks else stop
