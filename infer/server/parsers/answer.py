"""All parsers of an answer, one after the other, and which of them a chat template asks for."""

from __future__ import annotations

from idlm.infer.server.parsers import hermes
from idlm.infer.server.parsers.hermes import ParsedPart
from idlm.text.thoughts import CLOSE, ThoughtReader


class AnswerParser:
    """`thinks`: reasoning is parsed, which the prompt has begun if `is_open`. `calls`: so are calls."""

    def __init__(self, *, thinks: bool = False, is_open: bool = False, calls: bool = False) -> None:
        self.thinks = thinks
        self._reader = ThoughtReader(is_open=is_open)
        self._breaks, self._is_blank = "", True
        """Line breaks that end the reasoning so far, and whether it has nothing else."""
        self._calls = hermes.HermesParser() if calls else None

    def push(self, text: str, *, is_last: bool) -> list[ParsedPart]:
        """The pieces that more text makes certain; all if it is the last."""
        pieces = [ParsedPart("content", text)] if text else []
        if self.thinks:
            pieces = self._read(text, is_last=is_last)
        if self._calls is None:
            return pieces
        content = "".join(piece.text for piece in pieces if piece.kind == "content")
        others = [piece for piece in pieces if piece.kind != "content"]
        return others + self._calls.push(content, is_last=is_last)

    def _read(self, text: str, *, is_last: bool) -> list[ParsedPart]:
        """Reasoning and content. Line breaks between tags and text belong to neither."""
        pieces = list[ParsedPart]()
        for kind, part in self._reader.push(text, is_last=is_last):
            if kind == "answer":
                pieces.append(ParsedPart("content", part))
            elif kind == "thought":
                part = part.lstrip("\n") if self._is_blank else self._breaks + part
                kept = part.rstrip("\n")
                self._breaks, self._is_blank = part[len(kept) :], self._is_blank and not kept
                pieces += [ParsedPart("reasoning", kept)] if kept else []
        return pieces


def parses_reasoning(parser: str, template: str) -> bool:
    """Whether answers are parsed for reasoning; auto: if the template knows the tags."""
    return parser == "think" or (parser == "auto" and CLOSE in template)


def parses_calls(parser: str, template: str) -> bool:
    """The same for calls; other formats have the same tags, and functions in them."""
    knows = hermes.BEGIN in template and "arguments" in template and "<function=" not in template
    return parser == "hermes" or (parser == "auto" and knows)
