"""Calls of tools, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write them.

A machine over an answer's content, which may come in any parts: the pieces of all parts, with adjacent
content joined, are those of the whole text. A call is released when it is whole. What is in the tags and is
no call stays content, tags included. Space before and after calls belongs to nothing.
"""

from __future__ import annotations

import json

from idlm.infer.server.parsers.pieces import Piece, num_open

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """Splits content from calls."""

    def __init__(self) -> None:
        self._held, self._space = "", ""
        self._is_call, self._follows_call = False, False

    def push(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """The pieces that more text makes certain; all if it is the last."""
        self._held += text
        pieces: list[Piece] = []
        while self._is_call or self._held:
            if not self._is_call:
                text, begin, rest = self._held.partition(BEGIN)
                kept = text if begin or is_last else text[: len(text) - num_open(text, BEGIN)]
                pieces += self._content(kept)
                self._held, self._is_call = (rest, True) if begin else (text[len(kept) :], False)
                if not begin:
                    break
            body, end, rest = self._held.partition(END)
            if not end and not is_last:
                break
            pieces += self._call(body, end)
            self._held, self._is_call = rest, False
        if is_last and not self._follows_call:
            pieces += [Piece("content", self._space)] if self._space else []
        return pieces

    def _content(self, text: str) -> list[Piece]:
        """Content; space at its end is held until more content follows."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        kept, self._follows_call = kept.lstrip() if self._follows_call else kept, False
        return [Piece("content", kept)]

    def _call(self, body: str, end: str) -> list[Piece]:
        call = read_call(body)
        if call is None:
            return self._content(BEGIN + body + end)
        self._space, self._follows_call = "", True
        return [call]


def read_call(body: str) -> Piece | None:
    """The call of a JSON object with a name and, if there are any, arguments; None for anything else."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        return None
    return Piece("call", json.dumps(arguments, ensure_ascii=False), name)
