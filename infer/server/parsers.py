"""Reasoning and calls of tools in an answer, and which of them a chat template requires."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from idlm.infer.server.messages import AnswerEvent
from idlm.infer.structured.schemas import HEAD, json_rule, literal
from idlm.text.calls import FORMATS, CallFormat, format_of
from idlm.text.thoughts import CLOSE, TAGS, ThoughtReader, num_open


class ParsedPart(NamedTuple):
    """A part of an answer. `kind`: content, reasoning, or call; then `text` is the arguments of the call of
    the tool `name`, a JSON object."""

    kind: str
    text: str
    name: str = ""


class AnswerParser:
    """`thinks`: reasoning is parsed, which the prompt has begun if `is_open`. `calls`: so are calls of this
    format, of the tools `names`. `text_of`: the text of a token."""

    def __init__(
        self,
        *,
        thinks: bool = False,
        is_open: bool = False,
        calls: CallFormat | None = None,
        names: Collection[str] = (),
        text_of: Callable[[int], str] = str,
    ) -> None:
        self.thinks, self._text_of = thinks, text_of
        self._reader, self._has_thought = ThoughtReader(is_open=is_open), is_open
        self._num_tokens, self._tail = 0, ""
        self._breaks, self._is_blank = "", True
        """Line breaks that end the reasoning so far, and whether it has nothing else."""
        self._calls = None if calls is None else CallParser(calls, names)

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


def call_format(parser: str, template: str) -> CallFormat | None:
    """How calls are parsed; auto: as the template writes them. None: they are not."""
    return format_of(template) if parser == "auto" else FORMATS.get(parser)


class CallParser:
    """Calls of tools in an answer's content, which may come in any parts: the pieces of all parts, with
    adjacent content joined, are those of the whole text. Calls are released when their group is whole. What
    is in the tags and is no call stays content, tags included, and so does a JSON object without a tag that
    calls none of the tools `names`. Space before and after calls belongs to nothing. `calls_grammar` is the
    other direction: whatever matches it is read back as calls of the given tools."""

    def __init__(self, given: CallFormat, names: Collection[str]) -> None:
        self._format, self._names, self._held, self._space = given, names, "", ""
        self._begun: str | None = None
        """What began the group that is read."""
        self._may_be_bare, self._follows_call = given.is_bare, False
        tag = re.escape(given.end)
        self._strings = re.compile(rf'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|{tag}', re.DOTALL)
        """A string of JSON, which may have no end yet, or the end of a group."""

    def push(self, text: str, *, is_last: bool = False) -> list[ParsedPart]:
        self._held += text
        pieces: list[ParsedPart] = []
        while self._begun is not None or self._held:
            if self._begun is None:
                text, begin, rest = self._found(is_last=is_last)
                pieces += self._content(text)
                self._held, self._begun = rest, begin
                if begin is None:
                    break
            body, end, rest = self._partition(self._held, is_last=is_last)
            if not end and not is_last:
                break
            assert self._begun is not None
            calls = self._format.read(body)
            if calls and (self._begun or all(name in self._names for name, _ in calls)):
                pieces += [ParsedPart("call", text, name) for name, text in calls]
                self._space, self._follows_call = "", True
            else:
                pieces += self._content(self._begun + body + end)
            self._held, self._begun = rest, None
        if is_last and not self._follows_call:
            pieces += [ParsedPart("content", self._space)] if self._space else []
        return pieces

    def _found(self, *, is_last: bool) -> tuple[str, str | None, str]:
        """The content before a group, what begins the group, and the rest; None if nothing does yet."""
        held, begin = self._held, self._format.begin
        if self._may_be_bare:
            start = held.lstrip()
            if not start and not is_last:
                return "", None, held
            self._may_be_bare = False
            if start.startswith("{"):
                return held[: len(held) - len(start)], "", start
        text, found, rest = held.partition(begin)
        if found:
            return text, found, rest
        kept = text if is_last else text[: len(text) - num_open(text, begin)]
        return kept, None, text[len(kept) :]

    def _content(self, text: str) -> list[ParsedPart]:
        """Content; space at its end is held until more content follows."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        kept, self._follows_call = kept.lstrip() if self._follows_call else kept, False
        return [ParsedPart("content", kept)]

    def _partition(self, text: str, *, is_last: bool) -> tuple[str, str, str]:
        """The text before the end of a group, the end, and what follows. An end tag inside a JSON string does
        not count, unless nothing else ends the group."""
        tag = self._format.end
        if not tag or (tag not in text and not is_last):
            return text, "", ""
        found = next((one for one in self._strings.finditer(text) if one[0] == tag), None)
        if found is None and not is_last:
            return text, "", ""
        if found is None or not self._format.read(text[: found.start()]):
            return text.partition(tag)
        return text[: found.start()], tag, text[found.end() :]


def calls_grammar(
    given: CallFormat,
    tools: Mapping[str, Any],
    *,
    is_forced: bool,
    has_many: bool,
    answer: Sequence[str] = (),
) -> str:
    """Lark grammar of answers that call tools: JSON schemas of the arguments by name, each of an object.
    `is_forced`: the answer is calls, at least one, else text with calls in it; `has_many`: it may have more
    than one. `answer`: rules for what the whole answer is if it calls nothing; then it has no other text."""
    # Where calls are the model's own choice, their text may be spelled in its way too.
    options, is_whole = {} if is_forced else {"no_forcing": True}, is_forced or bool(answer)
    lines, names = [f"{HEAD} {json.dumps(options)}"], [f"call_{number}" for number in range(len(tools))]
    for rule, (name, schema) in zip(names, tools.items(), strict=True):
        opening, closing = literal(given.opened(name)), literal(given.closing)
        lines.append(f"{rule}: {opening} {json_rule(schema)} {closing}")
    more = f"({literal(given.between)} call)*" if has_many and given.between else ""
    lines += [f"call: {' | '.join(names)}", f"calls: {given.lead} call {more} {literal(given.finish)}"]
    tag, any_text = literal(given.begin), r"(.|\n)*"
    if is_whole:
        group = "calls" if given.is_bare else f"{tag} calls"
        again = rf'("\n" {group})*' if has_many and given.between is None else ""
        return "\n".join([*lines, f"start: {group} {again}{' | answer' if answer else ''}", *answer])
    lines.append(f"LAST: /{any_text}/ & ~/{any_text}{re.escape(given.begin)}{any_text}/")
    if given.is_bare:
        return "\n".join([*lines, f"ELSE: LAST & ~/\\s*\\{{{any_text}/", f"start: {tag}? calls | ELSE"])
    lines += [f"begin[lazy]: TEXT {tag}", f"TEXT: /{any_text}/"]
    start = f"(begin calls){'*' if has_many else '?'} LAST" if given.end else "begin calls | LAST"
    return "\n".join([*lines, f"start: {start}"])
