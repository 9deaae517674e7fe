"""Conversations as training samples, without a check of what the template leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from idlm.text.chat import Template, conversation
from idlm.text.templates import Message


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    turns: Literal["all", "last"] = "all",
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[bool]]:
    """Return (ids, supervised) of `conversation`."""
    template = Template.of(tokenizer, tools, enable_thinking=None, template_kwargs=template_kwargs)
    done = conversation(template, messages, turns=turns)
    return done.token_ids, done.supervised
