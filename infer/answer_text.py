"""The text of a growing answer, which ends before its first stop string.

Stop strings may name tokens that the text does not show, such as `<|im_end|>`, alone or within text. They do
not act within the reasoning that begins an answer, nor in the line breaks after it, so that a stop string of
line breaks leaves the answer; but one with `</think>` may end the answer there.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from idlm.contracts import SamplingParams
from idlm.text.detokenizer import Detokenizer
from idlm.text.templates import all_template_text
from idlm.text.thoughts import CLOSE, ThoughtReader, is_opened
from idlm.text.tokenizer import hidden_token_ids

FIRST_MARK, NUM_MARKS = 0xD800, 0x800
"""Half surrogates, which no text has, stand for tokens."""


class AnswerText:
    """Releases text as soon as it cannot belong to a stop string; the stop string ends it and is left out.

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
        for position, stops in begins:
            rest = self._held[position:]
            if any(stop.startswith(rest) for stop in stops):
                return position
        return len(self._held)


def _with_marks(stop: str, marks: Mapping[str, str]) -> str:
    """A stop string with marks in place of the names of hidden tokens."""
    names = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    return re.sub(names, lambda found: marks[found[0]], stop) if marks else stop
