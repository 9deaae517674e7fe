"""How a chat template ends the assistant's turns, which is seen in what it draws."""

from __future__ import annotations

import functools
import re
from typing import Any

from idlm.errors import UserError
from idlm.text.templates import Message, render
from idlm.text.tokenizer import special_token_ids

WORD = "zqcontentqz"
QUESTION: Message = {"role": "user", "content": "a"}


@functools.lru_cache(maxsize=64)
def second_end(tokenizer: Any, text: str) -> str:
    """Return the eos that a template, such as that of Phi-3, writes after the end of the last turn, unless
    an answer is to follow; empty for one that does not."""
    eos = tokenizer.eos_token
    if not eos or ("eos_token" not in text and eos not in text):
        return ""
    try:
        drawn = [render(tokenizer, [QUESTION], open_turn=is_open) for is_open in (False, True)]
    except UserError:
        return ""
    rest = drawn[0].removesuffix(eos)
    has_two = (
        rest != drawn[0] and rest.rstrip().endswith(_ends(tokenizer)) and not drawn[1].startswith(drawn[0])
    )
    return eos if has_two else ""


@functools.lru_cache(maxsize=64)
def next_tags(tokenizer: Any, text: str) -> tuple[str, str]:
    """Return the special token that begins a user's turn after an answer, and a tool's, where the template
    writes nothing after an answer itself: models such as GLM-4 end their answers by generating it. Empty
    where the template closes answers, or begins these turns with text or with what opens the assistant's."""

    def after(*turns: Message, is_open: bool = False) -> str:
        try:
            answered = [QUESTION, {"role": "assistant", "content": WORD}, *turns]
            return render(tokenizer, answered, open_turn=is_open).partition(WORD)[2]
        except UserError:
            return ""

    closed, with_question, opened = after(), after(QUESTION), after(QUESTION, is_open=True)
    opener = opened.removeprefix(with_question).lstrip()
    tag = re.compile(rf"\s*({'|'.join(map(re.escape, _ends(tokenizer)))})")

    def tag_of(longer: str) -> str:
        found = None if closed.strip() else tag.match(longer.removeprefix(closed))
        return found[0] if found and not opener.startswith(found[1]) else ""

    return tag_of(with_question), tag_of(after({"role": "tool", "content": "a"}))


def _ends(tokenizer: Any) -> tuple[str, ...]:
    return tuple(tokenizer.convert_ids_to_tokens(sorted(special_token_ids(tokenizer))))
