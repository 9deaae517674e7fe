"""Reasoning and calls of tools in an answer, and which of them a chat template requires."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from idlm.infer.server.messages import AnswerEvent
from idlm.infer.structured.schemas import json_rule, literal
from idlm.text.thoughts import CLOSE, TAGS, ThoughtReader, num_open

BEGIN, END = "<tool_call>", "</tool_call>"
STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|</tool_call>', re.DOTALL)
"""A string of JSON, which may have no end yet, or the end of a call."""


class ParsedPart(NamedTuple):
    """A part of an answer. `kind`: content, reasoning, or call; then `text` is the arguments of the call of
    the tool `name`, a JSON object."""

    kind: str
    text: str
    name: str = ""


class AnswerParser:
    """`thinks`: reasoning is parsed, which the prompt has begun if `is_open`. `calls`: so are calls.
    `text_of`: the text of a token."""

    def __init__(
        self,
        *,
        thinks: bool = False,
        is_open: bool = False,
        calls: bool = False,
        text_of: Callable[[int], str] = str,
    ) -> None:
        self.thinks, self._text_of = thinks, text_of
        self._reader, self._has_thought = ThoughtReader(is_open=is_open), is_open
        self._num_tokens, self._tail = 0, ""
        self._breaks, self._is_blank = "", True
        """Line breaks that end the reasoning so far, and whether it has nothing else."""
        self._calls = HermesParser() if calls else None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the tag that ends the reasoning; 0 without any."""
        return self._num_tokens if self._has_thought else 0

    def read(self, event: AnswerEvent) -> list[ParsedPart]:
        """The pieces that an event of the answer makes certain; its tokens are counted."""
        for token_id in event.token_ids if self.thinks else ():
            if CLOSE in self._tail:
                break
            self._num_tokens += 1
            self._tail = self._tail[-len(CLOSE) :] + self._text_of(token_id)
        return self.push(event.text, is_last=event.figures is not None)

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
            self._has_thought |= kind == "open"
            if kind == "answer":
                pieces.append(ParsedPart("content", part))
            elif kind == "thought":
                part = part.lstrip("\n") if self._is_blank else self._breaks + part
                kept = part.rstrip("\n")
                self._breaks, self._is_blank = part[len(kept) :], self._is_blank and not kept
                pieces += [ParsedPart("reasoning", kept)] if kept else []
        return pieces


def parses_reasoning(parser: str, template: str) -> bool:
    """Whether answers are parsed for reasoning; auto: if the template has one of the tags."""
    return parser == "think" or (parser == "auto" and TAGS.search(template) is not None)


def parses_calls(parser: str, template: str) -> bool:
    """The same for calls; other formats have the same tags, and tags for each argument in them."""
    is_json = "arguments" in template and not any(tag in template for tag in ("<function=", "<arg_key>"))
    return parser == "hermes" or (parser == "auto" and BEGIN in template and is_json)


class HermesParser:
    """Calls of tools as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

    A machine over an answer's content, which may come in any parts: the pieces of all parts, with adjacent
    content joined, are those of the whole text. A call is released when it is whole. What is in the tags and
    is no call stays content, tags included. Space before and after calls belongs to nothing. `calls_grammar`
    is the other direction: whatever matches it is read back as calls of the given tools."""

    def __init__(self) -> None:
        self._held, self._space = "", ""
        self._is_call, self._follows_call = False, False

    def push(self, text: str, *, is_last: bool = False) -> list[ParsedPart]:
        self._held += text
        pieces: list[ParsedPart] = []
        while self._is_call or self._held:
            if not self._is_call:
                text, begin, rest = self._held.partition(BEGIN)
                kept = text if begin or is_last else text[: len(text) - num_open(text, BEGIN)]
                pieces += self._content(kept)
                self._held, self._is_call = (rest, True) if begin else (text[len(kept) :], False)
                if not begin:
                    break
            body, end, rest = _partition(self._held, is_last=is_last)
            if not end and not is_last:
                break
            if (call := read_call(body)) is None:
                pieces += self._content(BEGIN + body + end)
            else:
                pieces.append(call)
                self._space, self._follows_call = "", True
            self._held, self._is_call = rest, False
        if is_last and not self._follows_call:
            pieces += [ParsedPart("content", self._space)] if self._space else []
        return pieces

    def _content(self, text: str) -> list[ParsedPart]:
        """Content; space at its end is held until more content follows."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        kept, self._follows_call = kept.lstrip() if self._follows_call else kept, False
        return [ParsedPart("content", kept)]


def _partition(text: str, *, is_last: bool) -> tuple[str, str, str]:
    """The text before the end of a call, the end, and what follows. An end tag inside a JSON string does not
    count, unless nothing else ends the call."""
    if END not in text and not is_last:
        return text, "", ""
    found = next((one for one in STRING.finditer(text) if one[0] == END), None)
    if found is None and not is_last:
        return text, "", ""
    if found is None or read_call(text[: found.start()]) is None:
        return text.partition(END)
    return text[: found.start()], END, text[found.end() :]


def calls_grammar(
    tools: Mapping[str, Any], *, is_forced: bool, has_many: bool, answer: Sequence[str] = ()
) -> str:
    """Lark grammar of answers that call tools: JSON schemas of the arguments by name, each of an object.
    `is_forced`: the answer is calls, at least one, else text with calls in it; `has_many`: it may have more
    than one. `answer`: rules for what the whole answer is if it calls nothing; then it has no other text."""
    # Where calls are the model's own choice, their text may be spelled in its way too.
    options, is_whole = {} if is_forced else {"no_forcing": True}, is_forced or bool(answer)
    lines, names = [f"%llguidance {json.dumps(options)}"], [f"call_{number}" for number in range(len(tools))]
    for rule, (name, schema) in zip(names, tools.items(), strict=True):
        head, tail = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', f"}}\n{END}"
        begin = literal(BEGIN + head) if is_whole else f"begin {literal(head)}"
        lines.append(f"{rule}: {begin} {json_rule(schema)} {literal(tail)}")
    call = f"({' | '.join(names)})"
    if is_whole:
        calls = f'{call} ("\\n" {call})*' if has_many else call
        return "\n".join([*lines, f"start: {calls}{' | answer' if answer else ''}", *answer])
    lines += [f"begin[lazy]: TEXT {literal(BEGIN)}", r"TEXT: /(.|\n)*/"]
    lines.append(rf"LAST: /(.|\n)*/ & ~/(.|\n)*{BEGIN}(.|\n)*/")
    return "\n".join([*lines, f"start: {call}{'*' if has_many else '?'} LAST"])


def read_call(body: str) -> ParsedPart | None:
    """The call of a JSON object with a name and, if there are any, arguments; None for anything else."""
    try:
        call = json.loads(body)
        if not isinstance(call, dict):
            return None
        name, arguments = call.get("name"), call.get("arguments", {})
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        return None
    return ParsedPart("call", text, name)
