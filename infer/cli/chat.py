"""Conversations of `idlm-generate`: system prompts, and the chat on a terminal."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from idlm.errors import UserError
from idlm.infer.cli.config import GenerateConfig, check_text, require_tokenizer
from idlm.infer.cli.progress import print_stream
from idlm.infer.cli.prompts import PromptLine
from idlm.text.tokenizer import encode_messages

if TYPE_CHECKING:
    from idlm.infer.engine import Engine

SYSTEM_ROLES = ("system", "developer")


def with_system(lines: Iterable[PromptLine], system: str | None) -> Iterator[PromptLine]:
    """Put a system prompt before every text, and before every conversation without one; None changes nothing.
    UserError IDLM-0458 for token ids, which are rendered already.
    """
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


def chat(engine: Engine, config: GenerateConfig) -> int:
    """Read turns from the terminal until end of file."""
    require_tokenizer(engine.tokenizer, "a chat")
    print("chat: one line is one turn, an empty line starts over, Ctrl-D ends", file=sys.stderr)
    beginning = [] if config.system is None else [{"role": "system", "content": config.system}]
    messages = list(beginning)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return 0
        if not text:
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": text})
        try:
            check_text("this turn", text)
            prompt = encode_messages(engine.tokenizer, messages) if engine.tokenizer.chat_template else text
            completion = print_stream(engine, prompt, config.sampling, has_stats=config.stats)
        except UserError as error:
            print(f"error {error}\n  an empty line starts over", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": completion.text})
