"""Text of a growing answer: incremental detokenization, and stop strings that may span tokens."""

from __future__ import annotations

from typing import Protocol


class IncrementalDetokenizer(Protocol):
    """Turns token ids into text piece by piece, and holds incomplete characters back until `flush`."""

    def push(self, token_ids: list[int]) -> str: ...

    def flush(self) -> str: ...


class AnswerText:
    """Releases text as soon as it cannot belong to a stop string; the stop string ends it and is left out."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        # By first character, so that a long list costs little where none of its strings begins.
        self._stops: dict[str, list[str]] = {}
        for text in stop:
            self._stops.setdefault(text[0], []).append(text)
        self._held = ""
        self._released: list[str] = []
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All released text."""
        return "".join(self._released)

    def push(self, token_ids: list[int]) -> str:
        """Append tokens; returns the newly released text."""
        return self._release(self._detokenizer.push(token_ids), is_last=False)

    def finish(self) -> str:
        """End the answer; returns the text that was held back."""
        return self._release(self._detokenizer.flush(), is_last=True)

    def _release(self, delta: str, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        self._held += delta
        begins = [(place, stops) for place, char in enumerate(self._held) if (stops := self._stops.get(char))]
        hits = (place for place, stops in begins if self._held.startswith(tuple(stops), place))
        hit = next(hits, None)
        if hit is not None:
            self.is_stopped = True
            released, self._held = self._held[:hit], ""
        else:
            cut = len(self._held) if is_last else self._first_open(begins)
            released, self._held = self._held[:cut], self._held[cut:]
        self._released.append(released)
        return released

    def _first_open(self, begins: list[tuple[int, list[str]]]) -> int:
        """First position from which the held text, to its end, is the beginning of a stop string."""
        for place, stops in begins:
            rest = self._held[place:]
            if any(stop.startswith(rest) for stop in stops):
                return place
        return len(self._held)
