"""Conversations as training samples, without a check of what the template leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

from idlm.text.chat import Template, conversation
from idlm.text.templates import Message


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    enable_thinking: bool | None = None,
    turns: Literal["all", "last"] = "all",
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    untrained: AbstractSet[int] = frozenset(),
) -> tuple[list[int], list[bool]]:
    """Return (ids, supervised) of `conversation`."""
    template = Template.of(tokenizer, tools, enable_thinking=enable_thinking, template_kwargs=template_kwargs)
    done = conversation(template, messages, turns=turns, untrained=untrained)
    return done.token_ids, done.supervised
