"""Reasoning in `<think>` tags at the beginning of an answer, as Qwen3 writes it.

A machine over the answer's text, which may come in any parts: the pieces of all parts, joined by kind, are
those of the whole text. Line breaks between tags and text belong to neither reasoning nor content.
"""

from __future__ import annotations

from collections.abc import Callable

from idlm.infer.server.parsers.pieces import Piece
from idlm.text.thoughts import CLOSE, OPEN, num_open


class ThinkParser:
    """`is_open`: the prompt ends within the tags, so the answer begins with reasoning. An answer that does
    not begin with the tag is content; one whose reasoning does not end has no content.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._held = ""
        self._read: Callable[[bool], list[Piece]] = self._reason if is_open else self._begin
        self._is_blank = True
        """Nothing of the current part has been released."""

    def push(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """The pieces that more text makes certain; all if it is the last."""
        self._held += text
        return [piece for piece in self._read(is_last) if piece.text]

    def _begin(self, is_last: bool) -> list[Piece]:
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._held, self._read = start.removeprefix(OPEN), self._reason
            return self._reason(is_last)
        if OPEN.startswith(start) and not is_last:
            return []
        self._is_blank, self._read = False, self._answer
        return self._answer(is_last)

    def _reason(self, is_last: bool) -> list[Piece]:
        if self._is_blank:
            self._held = self._held.lstrip("\n")
        text, end, rest = self._held.partition(CLOSE)
        if end:
            self._held, self._is_blank, self._read = rest, True, self._answer
            return [Piece("reasoning", text.rstrip("\n")), *self._answer(is_last)]
        # Line breaks are held until something follows them.
        kept = text if is_last else text[: len(text) - num_open(text, CLOSE)]
        kept = kept.rstrip("\n")
        self._held, self._is_blank = text[len(kept) :], self._is_blank and not kept
        return [Piece("reasoning", kept)]

    def _answer(self, is_last: bool) -> list[Piece]:
        text = self._held.lstrip("\n") if self._is_blank else self._held
        self._held, self._is_blank = "", self._is_blank and not text
        return [Piece("content", text)]
