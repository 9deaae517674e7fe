"""Text of a growing answer: incremental decoding, and stop strings that may straddle tokens."""

from __future__ import annotations

from typing import Protocol


class IncrementalDetokenizer(Protocol):
    """Turns token ids into text piece by piece; holds incomplete characters back."""

    def push(self, token_ids: list[int]) -> str: ...

    def flush(self) -> str: ...


class AnswerText:
    """Releases text as soon as it cannot be part of a stop string any more.

    `text` is what has been released; the stop string itself and everything behind it never is.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer, self._stop = detokenizer, stop
        self._held = ""
        self.text = ""
        self.is_stopped = False

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
        hits = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if hits:
            self.is_stopped = True
            released, self._held = self._held[: min(hits)], ""
        else:
            keep = 0 if is_last else self._longest_stop_prefix()
            cut = len(self._held) - keep
            released, self._held = self._held[:cut], self._held[cut:]
        self.text += released
        return released

    def _longest_stop_prefix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
