"""Conversations that are written as text, by marks such as `### Human:`, `USER:` or `<|im_start|>user`."""

from __future__ import annotations

import re


def _marks(names: str) -> str:
    """The marks that begin a turn of one of `names`: a word at the beginning of a line, in capitals or after
    ###, each with a colon; or a tag."""
    tag = rf"<[|｜]?(?:(?:im_start|start_header_id|start_of_turn|turn)[|｜]?>\s*)?(?:{names})\b(?:[|｜]?>)?"
    return rf"(?im:(?:^[ \t]*\**|###[ \t]*)(?:{names})\**:\**)|\b(?:{names.upper()}):|(?i:{tag})"


_QUESTION = re.compile(rf"{_marks('human|user|prompter')}|###[ \t]*Instruction:|\[INST\]")
_ANSWER = re.compile(
    rf"{_marks('assistant|gpt|chatgpt|bot')}|<start_of_turn>model|###[ \t]*Response:|\[/INST\]"
)
_WORDS = ("assistant", "gpt:", "gpt|", "bot:", "bot>", "bot|", "response:", "[/inst]", ">model")
"""Parts of marks of answers. Few texts have one, and looking for them takes a thirtieth of the time."""


def is_transcript(text: str) -> bool:
    """Return whether a text has a turn of a user and an answer after it."""
    # A name may be bold.
    lower = text.lower().replace("*", "")
    if not any(word in lower for word in _WORDS):
        return False
    question = _QUESTION.search(text)
    return question is not None and _ANSWER.search(text, question.end()) is not None


def opens_answer(text: str) -> bool:
    """Return whether a text ends in the mark after which the assistant speaks."""
    return re.search(rf"(?:{_ANSWER.pattern})(?:<\|[a-z_]+\|>)?\s*\Z", text[-64:]) is not None
