"""Text of a growing answer: incremental decoding, and stop strings that may straddle tokens."""

from __future__ import annotations

from typing import Protocol


class IncrementalDetokenizer(Protocol):
    """Turns token ids into text piece by piece; holds incomplete characters back."""

    def push(self, token_ids: list[int]) -> str: ...

    def flush(self) -> str: ...


class AnswerText:
    """Releases text as soon as it cannot be part of a stop string any more.

    Not the stop string itself, nor anything behind it.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        # By their first characters: a long list then costs next to nothing where none of them begins.
        self._stops: dict[str, list[str]] = {}
        for text in stop:
            self._stops.setdefault(text[0], []).append(text)
        self._held = ""
        self._released: list[str] = []
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All that has been released."""
        return "".join(self._released)

    def push(self, token_ids: list[int]) -> str:
        """Add tokens; returns the newly released text."""
        return self._release(self._detokenizer.push(token_ids), is_last=False)

    def finish(self) -> str:
        """No more tokens: release what is held back."""
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
        """Where the held text first goes on as a stop string does, to its end."""
        for place, stops in begins:
            rest = self._held[place:]
            if any(stop.startswith(rest) for stop in stops):
                return place
        return len(self._held)
