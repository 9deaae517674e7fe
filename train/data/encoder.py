"""Text as samples: token ids, and which of them are targets. All sources share it."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import numpy as np

from idlm.errors import UserError
from idlm.text.chat import TRAILING, Template, conversation
from idlm.text.detokenizer import answer_text
from idlm.text.left_out import TurnText
from idlm.text.templates import Message, with_date, writes_date
from idlm.text.thoughts import CLOSE, OPEN, REASONING_KEYS, other_tag, reasoning, without_thinking
from idlm.text.tokenizer import (
    encode_bare,
    encode_messages,
    encode_text,
    num_token_ids,
    special_tokens,
    without_ends,
)
from idlm.text.transcripts import is_transcript, opens_answer
from idlm.train.data.cache import holds_mask
from idlm.train.data.layout import Sample

SILENT = "answers of calls alone, which the chat template leaves out, are context"
HISTORY = "the chat template leaves out thoughts of earlier turns"
SPECIAL = "texts hold those of special tokens, which become those tokens, as at inference"
UNKNOWN = "answers have characters that the tokenizer does not have, and teach its unknown token"
TRANSCRIPT = "texts hold the turns of a chat, of which the words of users are targets too"
OPENED = "prompts end as those of a chat that is written as text, and are one turn of a user here"
OTHER_TAGS = f"answers begin with a thought in other tags than {OPEN}, which is trained as a part of them"
LATER_BLOCK = f"answers hold a {OPEN} block after their beginning, which is not removed"
RESULT = "<tool_response>"
TAGS_TWICE = "turns of tools hold the tags that the chat template writes around them"
RETOKENISED = "token_ids are not those of text in this tokenizer, and the text trains"
RENDERING = 10
"""Goes up when records become other samples: caches hold them."""


class Encoder:
    """Turns text into token ids with supervision flags; refuses the mask token, which only objectives
    position.

    `thinking`: `keep` trains thoughts, as a `<think>` block where the template leaves them out; `strip`
    removes them from assistant turns, `off` also renders with enable_thinking=False. `turns`: supervise `all`
    assistant turns of a conversation, the `last` one, or `each` in a sample of its own that ends with it.
    `left_out`: `error` or `accept` for text that the template leaves out. `date`: the day that
    a template writes; None: today."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        mask_token_id: int | None,
        use_chat_template: bool,
        thinking: str = "keep",
        turns: str = "all",
        left_out: str = "error",
        date: datetime.date | None = None,
    ) -> None:
        self.use_chat_template = use_chat_template and bool(getattr(tokenizer, "chat_template", None))
        self.date: str | None = None
        if writes_date(tokenizer):
            date = date or datetime.date.today()
            tokenizer, self.date = with_date(tokenizer, date), date.isoformat()
        self.tokenizer = tokenizer
        self.mask_token_id = mask_token_id
        self.thinking, self.turns, self.left_out = thinking, turns, left_out
        self._ends = special_tokens(tokenizer)
        self._special = re.compile("|".join(map(re.escape, self._ends)) or "(?!)")
        self._vanishing: dict[str, dict[Any, frozenset[int]]] = {}
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
            RENDERING,
            self.tokenizer.backend_tokenizer.to_str(),
            str(self.tokenizer.special_tokens_map),
            str(self.tokenizer.chat_template),
            self.thinking,
            self.turns,
            self.left_out,
            tokenizers.__version__,
            transformers.__version__,
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def pair(self, prompt: str, response: str, *, origin: str) -> Sample:
        """Prompt as context, response and eos as targets; uses the chat template where there is one."""
        response = self._response(response, origin)
        if self.use_chat_template:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            sample = self._conversation(turns, origin=origin)
            return replace(sample, notes=(*sample.notes, OPENED)) if opens_answer(prompt) else sample
        (prompt_ids,) = encode_bare(self.tokenizer, [prompt])
        return self._checked(Sample.from_pair(prompt_ids, self._with_eos(response), origin=origin))

    def text(self, text: str, *, origin: str) -> Sample:
        """Every token is a target but what the tokenizer puts in front; eos is at the end."""
        (prefix,) = encode_bare(self.tokenizer, [""])
        token_ids = self._with_eos(text)
        if token_ids[: len(prefix)] == prefix:
            token_ids = token_ids[len(prefix) :]
        is_special = self._special.search(without_ends(text, self._ends))
        found = {SPECIAL: is_special, TRANSCRIPT: is_transcript(text)}
        sample = Sample.from_pair(prefix, token_ids, origin=origin)
        return self._checked(replace(sample, notes=tuple(note for note in found if found[note])))

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

        `messages` in OpenAI's form: `content` may be absent with tool calls or reasoning, and arguments of
        calls are mappings. `untrained`: indices of assistant turns that are context. The template gets
        `tools` and `template_kwargs`."""
        template = self._template(tools, template_kwargs)
        rendered = [
            self._turn(message, origin, is_target=index not in untrained)
            for index, message in enumerate(messages)
        ]
        silent = self._silent(template, rendered, untrained)
        untrained |= silent
        ends = [
            index + 1
            for index, message in enumerate(rendered)
            if message["role"] == "assistant" and index not in untrained
        ]
        if not ends:
            raise _nothing_to_predict(origin, SILENT if silent else "no assistant turn")
        samples = [
            self._conversation(rendered[:end], origin=origin, template=template, untrained=untrained)
            for end in (ends if self.turns == "each" else [len(rendered)])
        ]
        notes = [SILENT] if silent else []
        if self.turns == "each" and ends[-1] < len(rendered):
            notes.append(TRAILING)
        samples[-1] = replace(samples[-1], notes=(*samples[-1].notes, *notes))
        return samples

    def _silent(
        self, template: Template, messages: Sequence[Message], untrained: AbstractSet[int]
    ) -> frozenset[int]:
        """Return the targets of which the template writes nothing, with `left_out=accept`. Training on them
        would teach to end a turn at once."""
        calls = {
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("tool_calls") and not message["content"].strip()
        }
        if self.left_out == "error" or not calls - untrained:
            return frozenset()
        last = messages[: max(calls - untrained) + 1]
        done = conversation(template, last, turns="last", untrained=untrained, known=self._known(template))
        lost = {piece.turn for piece in done.left_out if piece.field == "tool_calls"}
        return frozenset(calls & lost - untrained)

    def _template(
        self, tools: Sequence[Mapping[str, Any]] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> Template:
        names = {"enable_thinking": self._enable_thinking, "template_kwargs": template_kwargs}
        return Template.of(self.tokenizer, tools, **names)

    def _known(self, template: Template) -> dict[Any, frozenset[int]]:
        """Return what `left_out` has found out about the template with the same variables."""
        return self._vanishing.setdefault(repr(template.names), {})

    def answer(self, prompt: Any, answer: Mapping[str, Any], *, origin: str) -> list[Sample]:
        """A record of `idlm-generate`: the prompt as it was fed, then the tokens that were generated.

        The record's token ids are used where this tokenizer decodes them to the record's text and thinking is
        kept; otherwise the text is rendered like any other. An answer that a limit cut off gets no
        end-of-turn token. Raises UserError IDLM-0227 where the record comes from another tokenizer or
        template."""
        if isinstance(prompt, str) and self.use_chat_template:
            prompt = [{"role": "user", "content": prompt}]
        is_chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
        if is_chat:
            prompt_ids = encode_messages(self.tokenizer, prompt)
        else:
            prompt_ids = encode_bare(self.tokenizer, [prompt])[0] if isinstance(prompt, str) else list(prompt)
        highest = max([*prompt_ids, *answer["token_ids"]], default=0)
        if highest >= self._num_ids:
            raise UserError(
                "IDLM-0227",
                f"{origin} has the token id {highest}, the tokenizer has {self._num_ids}",
                fix="use the tokenizer of the model that answered",
            )
        dated = f"; the chat template writes the date, which is {self.date} here" if self.date else ""
        if len(prompt_ids) != answer.get("num_prompt_tokens", len(prompt_ids)):
            raise UserError(
                "IDLM-0227",
                f"{origin}: the prompt has {len(prompt_ids)} tokens here and had "
                f"{answer['num_prompt_tokens']} when it was answered{dated}",
                fix="use the tokenizer and the chat template of the model that answered (data.chat_template)"
                + (", and the day of the answers: data.date=YYYY-MM-DD" if self.date else ""),
            )
        token_ids = answer["token_ids"]
        is_ours = answer_text(self.tokenizer, token_ids) == answer["text"]
        if is_ours and token_ids and self.thinking == "keep":
            return [self._checked(Sample.from_pair(prompt_ids, token_ids, origin=origin))]
        response = self._response(answer["text"], origin)
        if is_chat:
            turns = [self._turn(message, origin) for message in prompt]
            turns.append({"role": "assistant", "content": response})
            sample = self._conversation(turns, origin=origin, turns="last")
        else:
            sample = self._checked(Sample.from_pair(prompt_ids, self._with_eos(response), origin=origin))
        if answer["finish_reason"] != "stop":
            # The end of the turn, its last supervised token, would teach to stop in mid-sentence.
            sample = self._checked(sample.piece(0, int(np.flatnonzero(sample.supervised)[-1])))
        return [sample if is_ours else replace(sample, notes=(*sample.notes, RETOKENISED))]

    def _conversation(
        self,
        messages: Sequence[Message],
        *,
        origin: str,
        template: Template | None = None,
        turns: str | None = None,
        untrained: AbstractSet[int] = frozenset(),
    ) -> Sample:
        template = template or self._template()
        done = conversation(
            template,
            messages,
            turns="all" if (turns or self.turns) == "all" else "last",
            untrained=untrained,
            known=self._known(template),
        )
        notes = set(done.notes)
        for piece in done.left_out:
            is_history = piece.is_thought and piece.turn not in done.answers
            if self.left_out == "error" and not is_history:
                raise _left_out(piece, origin)
            notes.add(HISTORY if is_history else f"the chat template leaves out {piece.kind}")
        if self.date is not None:
            notes.add(f"the chat template writes the day's date, here always {self.date} (data.date)")
        for message in messages:
            notes |= self._notes(str(message["role"]), str(message.get("content") or ""), template)
        ids, flags = np.asarray(done.token_ids, dtype=np.int64), np.asarray(done.supervised, dtype=bool)
        return self._checked(
            Sample(token_ids=ids, supervised=flags, origin=origin, notes=tuple(sorted(notes)))
        )

    def _notes(self, role: str, text: str, template: Template) -> set[str]:
        """Return what is unusual about a turn. A special token at the end of an answer is not."""
        is_answer = role == "assistant"
        found = {
            SPECIAL: self._special.search(without_ends(text, self._ends) if is_answer else text),
            OTHER_TAGS: is_answer and other_tag(text),
            LATER_BLOCK: is_answer and self.thinking != "keep" and OPEN in text,
            TAGS_TWICE: role == "tool" and text.lstrip().startswith(RESULT) and RESULT in template.text,
        }
        return {note for note, holds in found.items() if holds}

    def _turn(self, message: Mapping[str, Any], origin: str, *, is_target: bool = True) -> dict[str, Any]:
        """Return a message as the template gets it, which may add text to an empty content."""
        content = message.get("content") or ""
        if message["role"] != "assistant":
            return dict(message) | {"content": content}
        dropped = () if self.thinking == "keep" else REASONING_KEYS
        kept = {key: value for key, value in message.items() if key not in dropped}
        if self.thinking != "keep":
            content = without_thinking(content, origin=origin)
        elif thought := reasoning(kept).strip():
            content = _without_repeated(content, thought, origin)
        is_empty = not content.strip() and not any(kept.get(key) for key in ("tool_calls", *REASONING_KEYS))
        if is_target and is_empty:
            raise _nothing_to_predict(origin, "an empty response")
        return kept | {"content": content}

    def _response(self, text: str, origin: str) -> str:
        """Return the assistant's text, without its thinking unless `thinking` is `keep`."""
        response = text if self.thinking == "keep" else without_thinking(text, origin=origin)
        if not response.strip():
            raise _nothing_to_predict(origin, "an empty response")
        return response

    def _with_eos(self, text: str) -> list[int]:
        """Return the ids of a text, which end in eos once, also where the text has it."""
        text = without_ends(text, (self.tokenizer.eos_token,))
        return [*encode_text(self.tokenizer, text), self.tokenizer.eos_token_id]

    def _checked(self, sample: Sample) -> Sample:
        if self.mask_token_id is not None and (sample.token_ids == self.mask_token_id).any():
            raise holds_mask(sample.origin, self.mask_token_id)
        bos = self.tokenizer.bos_token_id
        if bos is not None and bos != self.tokenizer.eos_token_id and (sample.token_ids[:2] == bos).sum() > 1:
            raise UserError(
                "IDLM-0228",
                f"{sample.origin} begins with two bos tokens (id {bos})",
                fix="remove the bos token's text from the data: it is added where the model expects it",
            )
        if not sample.num_targets:
            raise _nothing_to_predict(sample.origin, f"{len(sample)} tokens")
        unknown = self.tokenizer.unk_token_id
        # In byte-level vocabularies such as GPT-2's one token is eos and, by name, unknown.
        is_taught = unknown != self.tokenizer.eos_token_id and unknown in sample.token_ids[sample.supervised]
        return replace(sample, notes=(*sample.notes, UNKNOWN)) if is_taught else sample


def _left_out(piece: TurnText, origin: str) -> UserError:
    if piece.is_thought:
        fix = "train without the thoughts (data.thinking=strip)"
    elif piece.turn < 0:
        fix = "remove the tools from the data, or use a chat template that writes them"
    elif piece.role == "assistant":
        what = "text" if piece.field == "content" else "calls"
        fix = f"delete the {what}, or use a chat template that writes {what} there (after a {OPEN} block)"
    else:
        fix = f"give the {piece.role} turn a role that the template writes there, or remove it"
    text = f" ({piece.text.strip()!r:.60})" if piece.text else ""
    return UserError(
        "IDLM-0225",
        f"{origin}: the chat template leaves out {piece.name}{text}",
        fix=f"{fix}; data.left_out=accept trains without what is left out, and counts it",
    )


def _without_repeated(content: str, thought: str, origin: str) -> str:
    """Return a content without the block that has the turn's `thought` once more."""
    before, close, answer = content.partition(CLOSE)
    inline = before.strip()
    if not close or (inline.removeprefix(OPEN).strip() != thought and not inline.startswith(OPEN)):
        return content
    if inline.removeprefix(OPEN).strip() != thought:
        raise UserError(
            "IDLM-0202",
            f"{origin}: an assistant turn has a thought of its own and another one in its content",
            fix="delete one of them, or set data.thinking=strip",
        )
    return answer.lstrip("\n")


def _nothing_to_predict(origin: str, found: str) -> UserError:
    return UserError(
        "IDLM-0204",
        f"{origin} has nothing to predict ({found})",
        fix="give it a prompt and a response of at least one token, or set data.on_bad_record=skip",
    )
