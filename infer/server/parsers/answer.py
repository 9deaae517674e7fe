"""All parsers of an answer, one after the other, and which of them a chat template asks for."""

from __future__ import annotations

from idlm.infer.server.parsers import hermes, think
from idlm.infer.server.parsers.pieces import Piece
from idlm.text.thoughts import CLOSE


class AnswerParser:
    """`thinks`: reasoning is parsed, which the prompt has begun if `is_open`. `calls`: so are calls."""

    def __init__(self, *, thinks: bool = False, is_open: bool = False, calls: bool = False) -> None:
        self.thinks = thinks
        self._think = think.ThinkParser(is_open=is_open) if thinks else None
        self._calls = hermes.HermesParser() if calls else None

    def push(self, text: str, *, is_last: bool) -> list[Piece]:
        """The pieces that more text makes certain; all if it is the last."""
        pieces = [Piece("content", text)] if text else []
        if self._think is not None:
            pieces = self._think.push(text, is_last=is_last)
        if self._calls is None:
            return pieces
        content = "".join(piece.text for piece in pieces if piece.kind == "content")
        others = [piece for piece in pieces if piece.kind != "content"]
        return others + self._calls.push(content, is_last=is_last)


def parses_reasoning(parser: str, template: str) -> bool:
    """Whether answers are parsed for reasoning; auto: if the template knows the tags."""
    return parser == "think" or (parser == "auto" and CLOSE in template)


def parses_calls(parser: str, template: str) -> bool:
    """The same for calls; other formats have the same tags, and functions in them."""
    knows = hermes.BEGIN in template and "arguments" in template and "<function=" not in template
    return parser == "hermes" or (parser == "auto" and knows)
