"""`<think>` blocks: in a message, and at the end of a prompt that a template opens or closes itself."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from idlm.errors import UserError
from idlm.text.tokenizer import plain_text

OPEN, CLOSE = "<think>", "</think>"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TAGS = re.compile(f"({OPEN}|{CLOSE})")
_PREFILL = re.compile(rf"(?:{OPEN}\s*(?:{CLOSE}\s*)?|{CLOSE}\s*)\Z")
_OTHER_TAG = re.compile(
    rf"\s*(?!(?-i:{OPEN}))<\|?(?:begin_of_|start_of_)?(?:think|thinking|thoughts?|reasoning|scratchpad)\|?>",
    re.IGNORECASE,
)
LAST_TOKENS = 8
"""Tokens of a prompt that are read to see where it ends; tags may be a few tokens."""
_EMPTY_BLOCK = re.compile(rf"(?:{OPEN}\s*)?{CLOSE}\s*")


class Thought(NamedTuple):
    """The reasoning of an assistant's message: the text between the tags, and white space after the block."""

    text: str
    gap: str = "\n\n"

    def is_in(self, body: str, content: str) -> bool:
        """Return whether a turn's text has the thought, besides its `content`."""
        rest = content.rpartition(CLOSE)[2].strip()
        return Rendering(body.replace(rest, "", 1)).has(self.text)

    @property
    def block(self) -> str:
        return f"{OPEN}{self.text}{CLOSE}{self.gap}"


class AnswerPart(NamedTuple):
    """Of an answer that may begin with reasoning. `kind`: open or close (a tag), thought, gap (line breaks
    after it) or answer."""

    kind: str
    text: str


class ThoughtReader:
    """Reads an answer that comes in any parts. `is_open`: the text so far ends in the reasoning; at first,
    the prompt has opened it. An answer that does not begin with the tag has none."""

    def __init__(self, *, is_open: bool) -> None:
        self._next, self._held = "thought" if is_open else "open", ""

    @property
    def is_open(self) -> bool:
        return self._next == "thought"

    def push(self, text: str, *, is_last: bool = False) -> list[AnswerPart]:
        """The parts of more text, which together are the text. What may be the beginning of a tag is held,
        unless it is the last."""
        text, self._held = self._held + text, ""
        parts = list[tuple[str, str]]()
        if self._next == "open":
            start = text.lstrip()
            if OPEN.startswith(start) and start != OPEN and not is_last:
                self._held = text
                return []
            self._next, size = "answer", 0
            if start.startswith(OPEN):
                self._next, size = "thought", len(text) - len(start) + len(OPEN)
            parts, text = [("open", text[:size])], text[size:]
        if self._next == "thought":
            thought, tag, rest = text.partition(CLOSE)
            if not tag:
                thought = text if is_last else text[: len(text) - num_open(text, CLOSE)]
                self._held = text[len(thought) :]
            self._next = "gap" if tag else "thought"
            parts, text = [*parts, ("thought", thought), ("close", tag)], rest
        if self._next == "gap":
            answer = text.lstrip("\n")
            self._next = "answer" if answer else "gap"
            parts, text = [*parts, ("gap", text[: len(text) - len(answer)])], answer
        return [AnswerPart(*part) for part in (*parts, ("answer", text)) if part[1]]


def reasoning(message: Mapping[str, Any]) -> str:
    """Return the thought that has a field of its own; empty without one."""
    found = next((message[key] for key in REASONING_KEYS if message.get(key)), "")
    return found if isinstance(found, str) else ""


def thought_of(message: Mapping[str, Any]) -> Thought | None:
    """Return the thought of a message: in a field, or a block that begins its content, whose opening tag may
    be in the prompt."""
    content = message.get("content") or ""
    head, closing, rest = content.partition(CLOSE)
    before, opening, inside = head.partition(OPEN)
    if closing and not (opening and before.strip()):
        text = inside if opening else head
        gap = rest[: len(rest) - len(rest.lstrip())]
        return Thought(text, gap) if text.strip() else None
    field = reasoning(message).strip("\n")
    return Thought(f"\n{field}\n") if field.strip() else None


def split_prefill(prompt: str) -> tuple[str, str]:
    """Return a prompt as its text and the `<think>`, the empty block or the `</think>` that ends it."""
    found = _PREFILL.search(prompt)
    return (prompt, "") if found is None else (prompt[: found.start()], prompt[found.start() :])


def is_opened(tokenizer: Any, prompt_ids: Sequence[int]) -> bool:
    """Return whether a prompt ends within the tags, so that its answer begins with reasoning."""
    return plain_text(tokenizer, prompt_ids[-LAST_TOKENS:]).rstrip().endswith(OPEN)


def num_open(text: str, tag: str) -> int:
    """Return how many characters at the end of `text`, which has no whole tag, may begin the tag."""
    longest = min(len(text), len(tag) - 1)
    return next((num for num in range(longest, 0, -1) if text.endswith(tag[:num])), 0)


def is_closed(prefill: str) -> bool:
    """Return whether the prompt leaves no room for a thought."""
    return CLOSE in prefill


def after_prefill(prefill: str, body: str, thought: Thought | None, *, is_shown: bool) -> str:
    """Return an assistant's text after a prompt that ends in `prefill` ("" for none). `body`: what the
    template writes for the turn; `is_shown`: whether the thought is in it. A thought that is missing comes
    first; a block that the prompt opens is closed where there is none."""
    space = "\n" if prefill != prefill.rstrip() else ""
    is_lost = thought is not None and not is_shown
    inner = body.lstrip() if space or thought else body
    if (prefill or is_lost) and not is_shown:
        inner = _EMPTY_BLOCK.sub("", inner, count=1) if _EMPTY_BLOCK.match(inner) else inner
    if thought is not None and is_lost:
        inner = thought.block + inner.lstrip()
    if is_closed(prefill) or not prefill:
        return inner
    if inner.startswith(OPEN):
        rest = inner[len(OPEN) :]
        return rest.lstrip() if space else rest
    return inner if thought else f"{space}{CLOSE}\n\n{inner.lstrip()}"


def other_tag(text: str) -> str:
    """Return the tag of a thought that begins an answer and is not `<think>`; empty without one."""
    found = _OTHER_TAG.match(text)
    return found[0].strip() if found else ""


def refuse_open(text: str, *, origin: str) -> None:
    """UserError IDLM-0229 for an answer that ends within its leading `<think>` block."""
    if text.lstrip().startswith(OPEN) and CLOSE not in text:
        raise UserError(
            "IDLM-0229",
            f"{origin} opens a {OPEN} block and does not close it",
            fix="close it, delete the record, or set data.on_bad_record=skip",
        )


def without_thinking(text: str, *, origin: str) -> str:
    """Return the text after its leading `<think>` block, whose opening tag may be in the prompt. UserError
    IDLM-0229 for a block that is not closed, or has other tags."""
    refuse_open(text, origin=origin)
    if tag := other_tag(text):
        raise UserError(
            "IDLM-0229",
            f"{origin} has a thought in the tag {tag}, and only {OPEN} blocks are removed",
            fix=f"write the tags as {OPEN} and {CLOSE}, or set data.thinking=keep",
        )
    head, closing, rest = text.partition(CLOSE)
    is_leading = closing and (head.lstrip().startswith(OPEN) or OPEN not in head)
    return rest.lstrip() if is_leading else text


class Rendering:
    """A rendered text that is searched for others, whatever white space and escapes a template changes."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words: str | None = None

    def has(self, text: str) -> bool:
        wanted = text.strip()
        if wanted in self._text:
            return True
        forms = {wanted, json.dumps(wanted)[1:-1], json.dumps(wanted, ensure_ascii=False)[1:-1]}
        forms |= {html.escape(form, quote=False) for form in forms} | {html.escape(wanted)}
        if self._words is None:
            self._words = " ".join(self._text.split())
        return any(" ".join(form.split()) in self._words for form in forms)
