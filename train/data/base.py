"""What a data source is, and how text becomes a `Sample`: one encoding for every source.

A source is map-style and pure: sample i never depends on what was read before it. It does not pack and does not know
the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from idlm.errors import UserError
from idlm.registry import Registry
from idlm.train.layout import Sample

if TYPE_CHECKING:
    from idlm.train.config import DataConfig

Message = dict[str, str]


class Source(Protocol):
    """`num_samples` is None for an endless source; `sample(i)` is a pure function of i."""

    num_samples: int | None

    def sample(self, index: int) -> Sample: ...


SOURCES: Registry[Callable[..., Source]] = Registry("source", "idlm.train.data")
"""Factories `(config: DataConfig, encoder: Encoder) -> Source`."""


class Encoder:
    """Text to token ids with supervision flags; refuses the mask token, which only the objective may place."""

    def __init__(self, tokenizer: Any, *, mask_token_id: int | None, use_chat_template: bool) -> None:
        self.tokenizer = tokenizer
        self.mask_token_id = mask_token_id
        self.use_chat_template = use_chat_template and bool(getattr(tokenizer, "chat_template", None))
        if tokenizer.eos_token_id is None:
            raise UserError(
                "IDLM-0211",
                "the tokenizer has no eos token, so a model trained with it could never stop",
                fix="set eos_token in the tokenizer's tokenizer_config.json",
            )

    def pair(self, prompt: str, response: str, *, origin: str) -> Sample:
        """Prompt as context, response and eos as targets; through the chat template where there is one."""
        if self.use_chat_template:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            return self.messages(turns, origin=origin)
        prompt_ids = self.tokenizer(prompt)["input_ids"]
        return self._checked(Sample.from_pair(prompt_ids, self._with_eos(response), origin=origin))

    def text(self, text: str, *, origin: str) -> Sample:
        """Every token a target, closed by eos."""
        prefix = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        return self._checked(Sample.from_pair(prefix, self._with_eos(text), origin=origin))

    def messages(self, messages: Sequence[Message], *, origin: str) -> Sample:
        """The assistant turns that the rendered conversation contains verbatim are targets, the rest is context.

        A template may rewrite earlier turns (Qwen3 drops their reasoning); such a turn is context only, because the
        model would be trained on a text that it never has to produce.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                "IDLM-0207",
                f"{origin} has `messages`, but the tokenizer has no chat template",
                fix="use a tokenizer with a chat template, or give `prompt` and `response`",
            )
        rendered = self._render(messages, is_open=False)
        spans = []
        for turn, message in enumerate(messages):
            before = self._render(messages[:turn], is_open=True) if message["role"] == "assistant" and turn else None
            if before is None:
                continue
            after = self._render(messages[: turn + 1], is_open=False)
            if rendered.startswith(after) and after.startswith(before):
                spans.append((len(before), len(after)))
        if not spans:
            raise UserError(
                "IDLM-0206",
                f"{origin} has no assistant turn to learn from ({len(messages)} messages)",
                fix="end the conversation with a message whose role is assistant, after at least one other message",
            )
        encoded = self.tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.asarray([start for start, _ in encoded["offset_mapping"]])
        supervised = np.zeros(len(starts), dtype=bool)
        for first, last in spans:
            supervised |= (starts >= first) & (starts < last)
        token_ids = np.asarray(encoded["input_ids"], dtype=np.int64)
        return self._checked(Sample(token_ids=token_ids, supervised=supervised, origin=origin))

    def _render(self, messages: Sequence[Message], *, is_open: bool) -> str:
        return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=is_open)

    def _with_eos(self, text: str) -> list[int]:
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*token_ids, self.tokenizer.eos_token_id]

    def _checked(self, sample: Sample) -> Sample:
        if self.mask_token_id is not None and (sample.token_ids == self.mask_token_id).any():
            raise UserError(
                "IDLM-0203",
                f"{sample.origin} contains the mask token (id {self.mask_token_id})",
                fix="remove the mask token's text from the data, or choose another model.mask_token_id",
            )
        if len(sample) < 2 or not sample.supervised[1:].any():
            raise UserError(
                "IDLM-0204",
                f"{sample.origin} has nothing to predict ({len(sample)} tokens)",
                fix="give it a prompt and a response of at least one token",
            )
        return sample
