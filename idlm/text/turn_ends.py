"""How a chat template ends the assistant's turns, which is seen in what it draws."""

from __future__ import annotations

import functools
import re
from typing import Any

from idlm.errors import UserError
from idlm.text.templates import Message, render
from idlm.text.tokenizer import special_tokens

WORD = "zqcontentqz"
QUESTION: Message = {"role": "user", "content": "a"}
ANSWER: Message = {"role": "assistant", "content": WORD}
_TOOL = {"type": "function", "function": {"name": "a", "description": "a", "parameters": {"properties": {}}}}


@functools.lru_cache(maxsize=64)
def after_end(tokenizer: Any, text: str, has_tools: bool = False) -> str:
    """Return what the template `text` writes after the end of the last turn and is no part of it: an eos
    where no answer is to follow (Phi-3), what opens the next answer, whether one is to follow or not
    (Command A), or a last instruction (Command R+ with tools). Empty for one that does none of these."""
    eos, tokens = tokenizer.eos_token or "", special_tokens(tokenizer)
    drawn = functools.partial(_drawn, tokenizer, has_tools)
    closed, opened, answered = drawn(QUESTION), drawn(QUESTION, is_open=True), drawn(QUESTION, ANSWER)
    if closed == opened or not answered.startswith(closed):
        ending = answered.partition(WORD)[2]
        ends = re.escape(eos) if eos and eos in ending else "|".join(map(re.escape, tokens))
        rest = re.split(ends, ending, maxsplit=1)[-1]
        if rest.strip() and rest != ending and closed.endswith(rest):
            return rest
    rest = closed.removesuffix(eos)
    has_two = rest != closed and rest.rstrip().endswith(tokens) and not opened.startswith(closed)
    return eos if has_two else ""


@functools.lru_cache(maxsize=64)
def next_tags(tokenizer: Any, text: str, has_tools: bool = False) -> tuple[str, str]:
    """Return the special token that begins a user's turn after an answer, and a tool's, where the template
    `text` writes nothing after an answer itself: models such as GLM-4 end their answers by generating it.
    Empty where the template closes answers, or begins these turns with text or with what opens the
    assistant's."""

    def after(*turns: Message, is_open: bool = False) -> str:
        return _drawn(tokenizer, has_tools, QUESTION, ANSWER, *turns, is_open=is_open).partition(WORD)[2]

    closed, with_question, opened = after(), after(QUESTION), after(QUESTION, is_open=True)
    opener = opened.removeprefix(with_question).lstrip()
    tag = re.compile(rf"\s*({'|'.join(map(re.escape, special_tokens(tokenizer)))})")

    def tag_of(longer: str) -> str:
        found = None if closed.strip() else tag.match(longer.removeprefix(closed))
        return found[0] if found and not opener.startswith(found[1]) else ""

    return tag_of(with_question), tag_of(after({"role": "tool", "content": "a"}))


def _drawn(tokenizer: Any, has_tools: bool, *turns: Message, is_open: bool = False) -> str:
    """Return the text of turns; empty where the template refuses them."""
    try:
        return render(tokenizer, turns, open_turn=is_open, tools=[_TOOL] * has_tools)
    except UserError:
        return ""
