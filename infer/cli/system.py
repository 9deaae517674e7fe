"""System prompts of `idlm-generate` and `idlm-chat`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from idlm.errors import UserError
from idlm.infer.cli.prompts import PromptLine
from idlm.text.tokenizer import encode_messages

SYSTEM_ROLES = ("system", "developer")


def with_system(lines: Iterable[PromptLine], system: str | None) -> Iterator[PromptLine]:
    """Put a system prompt before every text, and before every conversation without one; None changes nothing.
    UserError IDLM-0458 for token ids, which are rendered already."""
    return iter(lines) if system is None else (_with_system(line, system) for line in lines)


def _with_system(line: PromptLine, system: str) -> PromptLine:
    first = {"role": "system", "content": system}
    if isinstance(line.prompt, str):
        return dataclasses.replace(line, prompt=[first, {"role": "user", "content": line.prompt}])
    messages = [message for message in line.prompt if isinstance(message, dict)]
    if not messages:
        raise UserError(
            "IDLM-0458",
            f"{line.place}: system= cannot precede prompt_ids, which are a whole prompt",
            fix="give the line as prompt or messages, or leave system= out",
        )
    has_own = messages[0]["role"] in SYSTEM_ROLES
    return line if has_own else dataclasses.replace(line, prompt=[first, *messages])


def check_system(tokenizer: Any, system: str | None) -> None:
    """UserError IDLM-0458 if the tokenizer cannot render the system prompt or leaves it out."""
    if system is None:
        return
    if tokenizer is None or not tokenizer.chat_template:
        what = "no tokenizer" if tokenizer is None else "a tokenizer without a chat template"
        raise UserError(
            "IDLM-0458",
            f"system= needs a chat template, and the checkpoint has {what}",
            fix="leave system= out, or add chat_template to the checkpoint's tokenizer_config.json",
        )
    turn = {"role": "user", "content": "x"}
    rendered = [
        encode_messages(tokenizer, [{"role": "system", "content": text}, turn])
        for text in (system, f"{system}x")
    ]
    if rendered[0] == rendered[1]:
        raise UserError(
            "IDLM-0458",
            "the checkpoint's chat template leaves system prompts out",
            fix="leave system= out, and put its text into the first turn",
        )
