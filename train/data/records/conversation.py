"""A record's turns together with what lies beside them: system prompt, history, tools, weights and variables
of the chat template."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from idlm.errors import UserError
from idlm.text.templates import all_template_text
from idlm.train.data.base import Encoder
from idlm.train.data.layout import Sample
from idlm.train.data.records.names import HISTORY_KEY, MEDIA_KEYS, SYSTEM_KEYS, TEMPLATE_DICT, TEMPLATE_KEYS
from idlm.train.data.records.tools import tools_of
from idlm.train.data.records.turns import Message, history_turns, weighted
from idlm.train.data.records.values import parsed, present, shown, text_of, unusable


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordConversation:
    """`turns` as the template gets them; `tools` are JSON schemas, `template_kwargs` variables of the
    template."""

    turns: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def samples(self, encoder: Encoder, *, origin: str) -> list[Sample]:
        """Encode the conversation; UserError IDLM-0204 where no turn is a target."""
        messages = [turn.message for turn in self.turns]
        answers = [turn for turn in self.turns if turn.role == "assistant"]
        if answers and not any(turn.is_trained for turn in answers):
            raise UserError(
                "IDLM-0204",
                f"{origin} has nothing to predict (all {len(answers)} assistant turns have the weight 0)",
                fix="delete the record, give a turn the weight 1, or set data.on_bad_record=skip",
            )
        numbered = enumerate(self.turns)
        untrained = {index for index, turn in numbered if turn.role == "assistant" and not turn.is_trained}
        return encoder.messages(
            messages,
            origin=origin,
            tools=self.tools,
            template_kwargs=self.template_kwargs,
            untrained=frozenset(untrained),
        )

    @property
    def is_pair(self) -> bool:
        """Whether this is one prompt and its response, with nothing beside them."""
        roles = [turn.role for turn in self.turns]
        has_more = self.tools or self.template_kwargs or any(len(turn.message) > 2 for turn in self.turns)
        return roles == ["user", "assistant"] and self.turns[-1].is_trained and not has_more

    def ignored_keys(self, encoder: Encoder, samples: Sequence[Sample]) -> set[str]:
        """Return the keys of turns, and the variables of the template, that nothing reads: the template has
        no such word, or `samples` lack the text."""
        read = _words(all_template_text(encoder.tokenizer))
        texts = [
            (name, turn.message.get(name.rpartition(".")[2])) for turn in self.turns for name in turn.extra
        ]
        named = [text for _, text in texts if isinstance(text, str)]
        whole = "".join(encoder.tokenizer.decode(sample.token_ids) for sample in samples if named)
        lost = {name for name, text in texts if isinstance(text, str) and text not in whole}
        variables = {
            key if key in TEMPLATE_KEYS else f"{TEMPLATE_DICT}.{key}" for key in self.template_kwargs
        }
        extra = variables.union(*(turn.extra for turn in self.turns))
        return lost.union(name for name in extra if name.rpartition(".")[2] not in read)


def conversation_of(record: Mapping[str, Any], turns: Sequence[Message]) -> RecordConversation:
    for key, value in present(record, MEDIA_KEYS).items():
        raise unusable(
            f"{key}={shown(value)} belongs to the conversation, and only text is read",
            fix=f"delete the record; delete the key {key} if the text stands without it",
        )
    found = weighted(turns, record)
    system = found[:1] if found[0].role == "system" else []
    history = [
        turn for key, value in present(record, (HISTORY_KEY,)).items() for turn in history_turns(value, key)
    ]
    return RecordConversation(
        turns=[*(_system(record, system) or system), *history, *found[len(system) :]],
        tools=_tools(record, found),
        template_kwargs=_template_kwargs(record),
    )


def _tools(record: Mapping[str, Any], turns: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
    """Return the tools beside the turns, or else those of a turn, where some templates look for them."""
    found = (tools_of(given) for given in (record, *(turn.message for turn in turns)))
    return next(filter(None, found), [])


def _system(record: Mapping[str, Any], first: Sequence[Message]) -> list[Message]:
    """Return the system prompt beside the turns; `first` holds their own system turn, if there is one."""
    given = {key: text_of(value, key) for key, value in present(record, SYSTEM_KEYS).items()}
    texts = {text.strip() for text in given.values()}
    if len(texts | {turn.message["content"].strip() for turn in first}) > 1 and texts:
        names = [*given, *("a first turn of the system" for _ in first)]
        raise unusable(f"the record has different {' and '.join(names)}", fix="delete all but one of them")
    return [
        Message(message={"role": "system", "content": text}) for text in list(given.values())[:1] if not first
    ]


def _template_kwargs(record: Mapping[str, Any]) -> dict[str, Any]:
    given = present(record, (TEMPLATE_DICT,)).get(TEMPLATE_DICT, {})
    fix = f'write {TEMPLATE_DICT} as {{"enable_thinking": false}}, or delete the key'
    nested = parsed(given, TEMPLATE_DICT, fix=fix)
    if not isinstance(nested, dict):
        raise unusable(f"{TEMPLATE_DICT}={shown(given)}, which is not an object", fix=fix)
    found = present(record, TEMPLATE_KEYS) | nested
    flag = found.get("enable_thinking", True)
    if not isinstance(flag, bool):
        raise unusable(
            f"enable_thinking={shown(flag)}, which is not true or false", fix="write true or false"
        )
    return found


@functools.cache
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))
