"""The contract of a data source, and the encoding of text into samples that all sources share.

A source is map-style and pure: sample i does not depend on what was read before. It neither packs samples nor
knows the objective. A new source is one new file in `train/data/sources` that registers itself in `SOURCES`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from idlm.errors import UserError
from idlm.registry import Registry
from idlm.text.chat import render_conversation
from idlm.text.detokenizer import answer_text
from idlm.text.tokenizer import Message, encode_messages, encode_prompt, num_token_ids
from idlm.train.config.data import DataConfig
from idlm.train.data.layout import Sample
from idlm.train.data.mixture import MixedSource

CACHE_FOLDER = "data_cache"
CORRECT = "correct"
THINKING = ("keep", "strip", "off")
TURNS = ("all", "last", "each")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class Source(Protocol):
    """`num_samples` is None for an endless source; `sample(i)` is a pure function of i."""

    num_samples: int | None

    def sample(self, index: int) -> Sample: ...


@runtime_checkable
class JudgedSource(Protocol):
    """A source that checks a model's answers to its prompts."""

    num_samples: int | None

    def sample(self, index: int) -> Sample: ...

    def question(self, index: int) -> str: ...

    def verdict(self, index: int, answer: str) -> str: ...


SOURCES: Registry[Callable[..., Source]] = Registry("source", "idlm.train.data.sources")
"""Factories `(config: DataConfig, encoder: Encoder) -> Source`. `is_endless` and `has_splits` are attributes
of the factory, because they must be known before it opens anything.
"""


def is_endless(source: str) -> bool:
    """Return whether the source generates samples without end; by default a source is finite."""
    return source in SOURCES.names() and bool(getattr(SOURCES.get(source), "is_endless", False))


def has_splits(source: str) -> bool:
    """Return whether the source has a validation split of its own, without `eval.path`."""
    return bool(getattr(SOURCES.get(source), "has_splits", False))


def open_source(data: DataConfig, encoder: Encoder, *, output_dir: str) -> Source:
    """Return the source of `data`, or its mixture of sources; this process tokenises what is not cached."""
    folder = data.cache_dir or str(Path(output_dir).absolute().parent / CACHE_FOLDER)
    opened: list[Any] = [
        SOURCES.get(one.source)(dataclasses.replace(one, cache_dir=folder), encoder) for one in data.parts()
    ]
    if not data.sources:
        source: Source = opened[0]
        return source
    return MixedSource(opened, [one.weight for one in data.sources], seed=data.seed)


def make_encoder(config: DataConfig, tokenizer: Any, mask_token_id: int | None) -> Encoder:
    """Return the encoder for a run's data settings; `mask_token_id` None allows every token."""
    return Encoder(
        tokenizer,
        mask_token_id=mask_token_id,
        use_chat_template=config.chat_template,
        thinking=config.thinking,
        turns=config.turns,
    )


class Encoder:
    """Turns text into token ids with supervision flags; refuses the mask token, which only objectives place.

    `thinking`: `keep` leaves `<think>` blocks to the template, `strip` removes them from assistant turns,
    `off` also renders with enable_thinking=False. `turns`: supervise `all` assistant turns of a conversation,
    the `last` one, or `each` in a sample of its own that ends with it.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        mask_token_id: int | None,
        use_chat_template: bool,
        thinking: str = "keep",
        turns: str = "all",
    ) -> None:
        assert thinking in THINKING and turns in TURNS, f"{thinking=} {turns=}"
        self.tokenizer = tokenizer
        self.mask_token_id = mask_token_id
        self.use_chat_template = use_chat_template and bool(getattr(tokenizer, "chat_template", None))
        self.thinking, self.turns = thinking, turns
        self._num_ids = num_token_ids(tokenizer)
        self._enable_thinking = False if thinking == "off" else None
        if tokenizer.eos_token_id is None:
            raise UserError(
                "IDLM-0207",
                "the tokenizer has no eos token, so a model trained with it could never stop",
                fix="set eos_token in the tokenizer's tokenizer_config.json",
            )

    def fingerprint(self) -> str:
        """Return the sha256 of everything that decides which ids a text becomes (not of the mask token)."""
        import tokenizers
        import transformers

        facts = [
            self.tokenizer.backend_tokenizer.to_str(),
            str(self.tokenizer.special_tokens_map),
            str(self.tokenizer.chat_template) if self.use_chat_template else "",
            self.thinking,
            self.turns,
            tokenizers.__version__,
            transformers.__version__,
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def pair(self, prompt: str, response: str, *, origin: str) -> Sample:
        """Prompt as context, response and eos as targets; uses the chat template where there is one."""
        response = self._response(response, origin)
        if self.use_chat_template:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            return self._conversation(turns, origin=origin)
        prompt_ids = self.tokenizer(prompt)["input_ids"]
        return self._checked(Sample.from_pair(prompt_ids, self._with_eos(response), origin=origin))

    def text(self, text: str, *, origin: str) -> Sample:
        """Every token is a target; eos is added at the end."""
        prefix = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        return self._checked(Sample.from_pair(prefix, self._with_eos(text), origin=origin))

    def messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        origin: str,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        untrained: AbstractSet[int] = frozenset(),
    ) -> list[Sample]:
        """Assistant turns are targets, other turns are context; one sample, or one per turn (`each`).

        `messages` in OpenAI's form: `content` may be absent beside tool calls or reasoning, and arguments of
        calls are mappings. `untrained`: indices of assistant turns that are context. The template gets
        `tools` and `template_kwargs`.
        """
        rendered = [
            self._turn(message, origin, is_target=place not in untrained)
            for place, message in enumerate(messages)
        ]
        ends = [
            place + 1
            for place, message in enumerate(rendered)
            if message["role"] == "assistant" and place not in untrained
        ]
        if not ends:
            raise _nothing_to_predict(origin, "no assistant turn")
        draw = functools.partial(
            self._conversation,
            origin=origin,
            tools=tools,
            template_kwargs=template_kwargs,
            untrained=untrained,
        )
        return [draw(rendered[:end]) for end in ends] if self.turns == "each" else [draw(rendered)]

    def answer(self, prompt: Any, answer: Mapping[str, Any], *, origin: str) -> list[Sample]:
        """A record of `idlm-generate`: the prompt as it was fed, then the tokens that were generated.

        The record's token ids are used where this tokenizer decodes them to the record's text and thinking is
        kept; otherwise the text is rendered like any other. An answer that a limit cut off gets no
        end-of-turn token. Raises UserError IDLM-0227 where the record comes from another tokenizer or
        template.
        """
        prompt_ids = self._prompt_ids(prompt)
        highest = max([*prompt_ids, *answer["token_ids"]], default=0)
        if highest >= self._num_ids:
            raise UserError(
                "IDLM-0227",
                f"{origin} has the token id {highest}, the tokenizer has {self._num_ids}",
                fix="use the tokenizer of the model that answered",
            )
        if len(prompt_ids) != answer.get("num_prompt_tokens", len(prompt_ids)):
            raise UserError(
                "IDLM-0227",
                f"{origin}: the prompt has {len(prompt_ids)} tokens here and had "
                f"{answer['num_prompt_tokens']} when it was answered",
                fix="use the tokenizer and the chat template of the model that answered (data.chat_template)",
            )
        token_ids = answer["token_ids"]
        is_ours = answer_text(self.tokenizer, token_ids) == answer["text"]
        if is_ours and token_ids and self.thinking == "keep":
            return [self._checked(Sample.from_pair(prompt_ids, token_ids, origin=origin))]
        sample = self._rendered_answer(prompt, answer["text"], origin)
        if answer["finish_reason"] != "stop":
            # The end of the turn, its last supervised token, would teach to stop in mid-sentence.
            sample = self._checked(sample.piece(0, int(np.flatnonzero(sample.supervised)[-1])))
        return [sample]

    def _rendered_answer(self, prompt: Any, text: str, origin: str) -> Sample:
        if isinstance(prompt, str):
            return self.pair(prompt, text, origin=origin)
        if prompt and isinstance(prompt[0], int):
            token_ids = self._with_eos(self._response(text, origin))
            return self._checked(Sample.from_pair(prompt, token_ids, origin=origin))
        messages = [self._turn(message, origin) for message in prompt]
        messages.append({"role": "assistant", "content": self._response(text, origin)})
        return self._conversation(messages, origin=origin, turns="last")

    def _prompt_ids(self, prompt: Any) -> list[int]:
        """Return the ids that `idlm-generate` feeds for a text, a conversation or ids."""
        if isinstance(prompt, str):
            template: Literal["auto", "none"] = "auto" if self.use_chat_template else "none"
            return encode_prompt(self.tokenizer, prompt, template=template)
        if prompt and isinstance(prompt[0], int):
            return list(prompt)
        return encode_messages(self.tokenizer, prompt)

    def _conversation(
        self, messages: Sequence[Message], *, origin: str, turns: str | None = None, **settings: Any
    ) -> Sample:
        which: Literal["all", "last"] = "all" if (turns or self.turns) == "all" else "last"
        token_ids, supervised = render_conversation(
            self.tokenizer, messages, enable_thinking=self._enable_thinking, turns=which, **settings
        )
        ids, flags = np.asarray(token_ids, dtype=np.int64), np.asarray(supervised, dtype=bool)
        return self._checked(Sample(token_ids=ids, supervised=flags, origin=origin))

    def _turn(self, message: Mapping[str, Any], origin: str, *, is_target: bool = True) -> dict[str, Any]:
        """Return a message as the template gets it, which may add text to an empty content."""
        content = message.get("content") or ""
        if message["role"] != "assistant":
            return dict(message) | {"content": content}
        dropped = () if self.thinking == "keep" else REASONING_KEYS
        kept = {key: value for key, value in message.items() if key not in dropped}
        if self.thinking != "keep":
            content = without_thinking(content, origin=origin)
        is_empty = not content.strip() and not any(kept.get(key) for key in ("tool_calls", *REASONING_KEYS))
        if is_target and is_empty:
            raise _nothing_to_predict(origin, "an empty response")
        return kept | {"content": content}

    def _response(self, text: str, origin: str) -> str:
        """Return the assistant's text, without its thinking unless that is kept."""
        response = text if self.thinking == "keep" else without_thinking(text, origin=origin)
        if not response.strip():
            raise _nothing_to_predict(origin, "an empty response")
        return response

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
        bos = self.tokenizer.bos_token_id
        if bos is not None and bos != self.tokenizer.eos_token_id and (sample.token_ids[:2] == bos).sum() > 1:
            raise UserError(
                "IDLM-0228",
                f"{sample.origin} begins with two bos tokens (id {bos})",
                fix="remove the bos token's text from the data: it is added where the model expects it",
            )
        if not sample.num_targets:
            raise _nothing_to_predict(sample.origin, f"{len(sample)} tokens")
        return sample


def without_thinking(text: str, *, origin: str) -> str:
    """Return the text after its leading `<think>` block, whose opening tag may be in the prompt."""
    head, closing, rest = text.partition(THINK_CLOSE)
    is_opened = head.lstrip().startswith(THINK_OPEN)
    if closing and (is_opened or THINK_OPEN not in head):
        return rest.lstrip()
    if is_opened:
        raise UserError(
            "IDLM-0229",
            f"{origin} opens a {THINK_OPEN} block and does not close it",
            fix="close it, delete the record, or set data.thinking=keep",
        )
    return text


def _nothing_to_predict(origin: str, found: str) -> UserError:
    return UserError(
        "IDLM-0204",
        f"{origin} has nothing to predict ({found})",
        fix="give it a prompt and a response of at least one token",
    )
