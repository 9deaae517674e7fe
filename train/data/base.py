"""What a data source is, and how text becomes a `Sample`: one encoding for every source.

A source is map-style and pure: sample i never depends on what was read before it. It does not pack and does
not know the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from idlm.errors import UserError
from idlm.registry import Registry
from idlm.tokens import Message, render_conversation
from idlm.train.layout import Sample

if TYPE_CHECKING:
    pass


class Source(Protocol):
    """`num_samples` is None for an endless source; `sample(i)` is a pure function of i."""

    num_samples: int | None

    def sample(self, index: int) -> Sample: ...


SOURCES: Registry[Callable[..., Source]] = Registry("source", "idlm.train.data")
"""Factories `(config: DataConfig, encoder: Encoder) -> Source`."""


class Encoder:
    """Text to token ids with supervision flags; refuses the mask token: only objectives place it."""

    def __init__(self, tokenizer: Any, *, mask_token_id: int | None, use_chat_template: bool) -> None:
        self.tokenizer = tokenizer
        self.mask_token_id = mask_token_id
        self.use_chat_template = use_chat_template and bool(getattr(tokenizer, "chat_template", None))
        if tokenizer.eos_token_id is None:
            raise UserError(
                "IDLM-0207",
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
        """The assistant turns are targets, the rest is context."""
        token_ids, supervised = render_conversation(self.tokenizer, messages)
        return self._checked(
            Sample(
                token_ids=np.asarray(token_ids, dtype=np.int64),
                supervised=np.asarray(supervised, dtype=bool),
                origin=origin,
            )
        )

    def _with_eos(self, text: str) -> list[int]:
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*token_ids, self.tokenizer.eos_token_id]

    def _checked(self, sample: Sample) -> Sample:
        if self.mask_token_id is not None and (sample.token_ids == self.mask_token_id).any():
            raise UserError(
                "IDLM-0206",
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
