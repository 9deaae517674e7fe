"""The shapes that a record of a file may have, and the samples that a record of each shape becomes: turns,
with what is next to them (system prompt, history, tools, weights, variables of the chat template).

A shape is known by its keys. Names that other data sets use for them are looked up only where no shape has
its own keys, so that they never compete with those."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from idlm.contracts import RECORD_KEYS
from idlm.errors import UserError
from idlm.text.templates import all_template_text
from idlm.text.thoughts import REASONING_KEYS, refuse_open
from idlm.train.data.base import Encoder
from idlm.train.data.layout import Sample
from idlm.train.data.records.parts import (
    ANSWER_KEYS,
    CONTEXT_KEYS,
    EXTRA_KEYS,
    HISTORY_KEY,
    LABEL_KEYS,
    LISTED_WEIGHTS,
    PAIR_ALIASES,
    PARTS,
    PROMPT_KEYS,
    QUESTION_PARTS,
    SYSTEM_KEYS,
    TEMPLATE_DICT,
    TEMPLATE_KEYS,
    TEXT_EXTRAS,
    parsed,
    parsed_or,
    present,
    refuse_media,
    refuse_thoughts,
    shown,
    text_of,
    thoughts_in,
    unusable,
)
from idlm.train.data.records.turns import (
    WRITE_TURNS,
    Message,
    are_turns,
    calls_of,
    history_turns,
    plain_turns,
    reasoning_of,
    tools_of,
    turns_of,
    weighted,
)

MAX_ID = 2**31
"""Caches store ids in 31 bits."""

Record = Mapping[str, Any]
Keys = tuple[str, ...]
Encoded = tuple[list[Sample], set[str]]
"""Samples, and keys of turns that nothing reads."""


CHAT_KEYS: Keys = (*EXTRA_KEYS, *LISTED_WEIGHTS)
WRITE_ANSWER = "give records as idlm-generate wrote them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """`keys`: alternative sets of keys, one of which a record must have; `aliases`: sets of other names for
    them. `also`: keys that are read where a record has them, `checked`: those that some values of make a
    record unusable. `example` is shown to users.

    `encode(record, keys, encoder, origin)` gets the set of keys that the record has."""

    keys: tuple[Keys, ...]
    example: str
    encode: Callable[[Record, Keys, Encoder, str], Encoded]
    aliases: tuple[Keys, ...] = ()
    also: Keys = CHAT_KEYS
    checked: Keys = ()


def _messages(record: Record, keys: Keys, encoder: Encoder, origin: str) -> Encoded:
    (key,) = keys
    value = record[key]
    is_texts = isinstance(value, list) and value and all(isinstance(text, str) for text in value)
    if is_texts and are_turns(found := [parsed_or(text, None) for text in value]):
        value, is_texts = found, False
    if is_texts and len(value) % 2:
        raise unusable(
            f"{key} has {len(value)} texts, so they are not those of the user and the assistant in turn",
            fix=WRITE_TURNS,
        )
    turns = plain_turns(*value) if is_texts else turns_of(value, key)
    for name, answer in present(record, ANSWER_KEYS).items():
        if turns[-1].role != "assistant":
            raise unusable(
                f"{key} has no answer at its end, and {name}={shown(answer)} next to it is not read",
                fix=f"rename {key} to prompt and {name} to response, or delete the key {name}",
            )
    return _encoded(record, turns, encoder, origin)


def _pair(record: Record, keys: Keys, encoder: Encoder, origin: str) -> Encoded:
    prompt, response = (record[key] for key in keys)
    _refuse_parts(record, keys)
    asked = [replace(turn, is_trained=False) for turn in _reply(prompt, keys[0], "user")]
    turns = [*asked, *_with_thought(_reply(response, keys[1]), record)]
    is_pair = isinstance(prompt, str) and isinstance(response, str)
    return _encoded(record, turns, encoder, origin, needs_template=not is_pair)


def _refuse_parts(record: Record, keys: Keys) -> None:
    """UserError IDLM-0202 for a part of the question next to the keys that are read."""
    for key, value in present(record, CONTEXT_KEYS if keys[0] == "prompt" else QUESTION_PARTS).items():
        if key not in keys:
            raise unusable(
                f"{key}={shown(value)} next to {' and '.join(keys)}, which is not read",
                fix=f"write it into {keys[0]} where it belongs there, and delete the key {key}",
            )


def _alpaca(record: Record, keys: Keys, encoder: Encoder, origin: str) -> Encoded:
    instruction, output = (text_of(record[key], key) for key in keys)
    given = {key: text_of(value, key) for key, value in present(record, CONTEXT_KEYS).items()}
    if len(given) > 1:
        raise unusable(f"the record has {' and '.join(given)}", fix="join them in input")
    user, *answers = plain_turns("\n\n".join((instruction, *given.values())), output)
    return _encoded(record, [user, *_with_thought(answers, record)], encoder, origin, needs_template=False)


def _calls(record: Record, keys: Keys, encoder: Encoder, origin: str) -> Encoded:
    query, answers = (record[key] for key in keys)
    message = {"role": "assistant", "content": "", "tool_calls": calls_of(answers, keys[1])}
    turns = [*plain_turns(text_of(query, keys[0])), Message(message=message)]
    return _encoded(record, turns, encoder, origin)


def _preference(record: Record, keys: Keys, encoder: Encoder, origin: str) -> Encoded:
    key, prompt = next(iter(present(record, PROMPT_KEYS).items()), ("prompt", None))
    turns = _with_thought(_reply(record["chosen"], "chosen"), record)
    if turns[0].role == "assistant":
        if prompt is None:
            raise unusable("chosen is an answer without a prompt", fix="write the prompt as prompt")
        return _pair(record, (key, "chosen"), encoder, origin)
    _refuse_parts(record, (key, "chosen"))
    if isinstance(prompt, str) and prompt not in [turn.message["content"] for turn in turns]:
        raise unusable(f"chosen is a whole conversation and lacks the {key}", fix=f"delete the key {key}")
    return _encoded(record, turns, encoder, origin)


def _text(record: Record, keys: Keys, encoder: Encoder, origin: str) -> Encoded:
    text = text_of(record["text"], "text")
    if not text.strip():
        raise UserError(
            "IDLM-0204", f"{origin} has nothing to predict (an empty text)", fix="delete the record"
        )
    return [encoder.text(text, origin=origin)], set()


def _answers(record: Record, keys: Keys, encoder: Encoder, origin: str) -> Encoded:
    prompt, token_ids = record["prompt"], record["token_ids"]
    for key in present(record, EXTRA_KEYS):
        raise unusable(
            f"{key} is next to an answer of idlm-generate, which was made without it",
            fix=f"delete the key {key}, or make the answer again with it in the prompt",
        )
    for key in ("text", "finish_reason"):
        text_of(record[key], key)
    if not _are_ids(token_ids):
        raise unusable("token_ids that are not whole numbers in [0, 2**31)", fix=WRITE_ANSWER)
    if isinstance(prompt, list) and prompt and not _are_ids(prompt):
        # The answer follows the prompt as it was given, which is checked and not changed.
        turns_of(prompt, "prompt")
    elif not isinstance(prompt, (str, list)) or not prompt:
        raise unusable("a prompt that is neither text, ids nor messages", fix=WRITE_ANSWER)
    return encoder.answer(prompt, record, origin=origin), set()


def _encoded(
    record: Record, turns: list[Message], encoder: Encoder, origin: str, *, needs_template: bool = True
) -> Encoded:
    """Encode the turns with what is next to them; UserError IDLM-0204 where no turn is a target. A prompt and
    its answer may do without a chat template, if there is nothing more."""
    template_kwargs, prompt = _template_kwargs(record), "custom_instructions"
    if prompt in template_kwargs and prompt not in _words(all_template_text(encoder.tokenizer)):
        record = {**record, prompt: template_kwargs.pop(prompt)}
    turns = _with_context(record, _with_joined_parts(turns))
    # Some templates look for the tools in a turn.
    tools = next(filter(None, map(tools_of, (record, *(turn.message for turn in turns)))), [])
    trained = {index: turn.is_trained for index, turn in enumerate(turns) if turn.role == "assistant"}
    if trained and not any(trained.values()):
        raise UserError(
            "IDLM-0204",
            f"{origin} has nothing to predict (all {len(trained)} assistant turns have the weight 0)",
            fix="delete the record, give a turn the weight 1, or set data.on_bad_record=skip",
        )
    if not needs_template:
        is_bare = [turn.role for turn in turns] == ["user", "assistant"] and not (tools or template_kwargs)
        if is_bare and all(len(turn.message) == 2 for turn in turns):
            prompt, answer = (str(turn.message["content"]) for turn in turns)
            return [encoder.pair(prompt, answer, origin=origin)], set()
        if not encoder.use_chat_template:
            others = present(record, (*CHAT_KEYS, *REASONING_KEYS))
            raise unusable(
                f"{', '.join(others)} next to a prompt and its response needs a chat template",
                fix="set data.chat_template=true with a tokenizer that has a chat template, or delete these "
                "keys",
            )
    samples = encoder.messages(
        [turn.message for turn in turns],
        origin=origin,
        tools=tools,
        template_kwargs=template_kwargs,
        untrained=frozenset(index for index, is_trained in trained.items() if not is_trained),
    )
    return samples, _ignored_keys(turns, template_kwargs, encoder, samples)


def _with_thought(turns: list[Message], record: Record) -> list[Message]:
    """Return the turns of an answer with the thought next to it, where it is the only one."""
    refuse_thoughts(record, "the record")
    thought = reasoning_of(thoughts_in(record), "the record")
    answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    if thought and (len(answers) != 1 or reasoning_of(turns[answers[0]].message, "the answer")):
        raise unusable(
            f"{' and '.join(thought)} is next to turns, and may belong to any of them",
            fix="write it into the turn that it belongs to, or delete it",
        )
    return [
        replace(turn, message=turn.message | thought) if index in answers else turn
        for index, turn in enumerate(turns)
    ]


def _with_joined_parts(turns: list[Message]) -> list[Message]:
    """Return the turns, which may be the JSON text of parts. One of the assistant is its answer, unless those
    of users and assistants are all written so, and one of a tool is its result."""
    contents = [(turn.role, turn.message["content"]) for turn in turns]
    written = [PARTS.match(text) for role, text in contents if role in ("user", "assistant") and text]
    plain = ("tool",) if all(written) else ("tool", "assistant")
    return [
        replace(turn, message=turn.message | {"content": text_of(parsed_or(text, text), "content")})
        if role not in plain and PARTS.match(text)
        else turn
        for turn, (role, text) in zip(turns, contents, strict=True)
    ]


def _reply(value: Any, key: str, role: str = "assistant") -> list[Message]:
    if not isinstance(value, (list, dict)):
        return [Message(message={"role": role, "content": text_of(value, key)})]
    return turns_of(value, key)


def _are_ids(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < MAX_ID for value in values)


SHAPES: dict[str, Format] = {
    "messages": Format(
        keys=(("messages",),),
        aliases=(("conversation",), ("dialogue",), ("dialog",), ("chat",), ("turns",)),
        example='{"messages": [{"role": str, "content": str}, ...]}',
        encode=_messages,
        checked=ANSWER_KEYS,
    ),
    "sharegpt": Format(
        keys=(("conversations",),),
        example='{"conversations": [{"from": str, "value": str}, ...]}',
        encode=_messages,
        checked=ANSWER_KEYS,
    ),
    "answers": Format(
        keys=(("prompt", "text", "token_ids", "finish_reason"),),
        example="a record of idlm-generate output=",
        encode=_answers,
        also=(*EXTRA_KEYS, *RECORD_KEYS),
    ),
    "pair": Format(
        keys=(("prompt", "response"), ("prompt", "completion")),
        aliases=PAIR_ALIASES,
        example='{"prompt": str, "response": str}',
        encode=_pair,
        also=(*CHAT_KEYS, *REASONING_KEYS),
        checked=QUESTION_PARTS,
    ),
    "alpaca": Format(
        keys=(("instruction", "output"),),
        aliases=(("instruction", "response"), ("instruction", "answer"), ("instruction", "completion")),
        example='{"instruction": str, "input": str, "output": str}',
        encode=_alpaca,
        also=(*CHAT_KEYS, *CONTEXT_KEYS, *REASONING_KEYS),
    ),
    "calls": Format(
        keys=(("query", "answers"),),
        example='{"query": str, "tools": [...], "answers": [{"name": str, "arguments": {...}}, ...]}',
        encode=_calls,
    ),
    "preference": Format(
        keys=(("chosen", "rejected"),),
        example='{"prompt": ..., "chosen": ..., "rejected": ...}, of which chosen is trained on',
        encode=_preference,
        also=(*CHAT_KEYS, *PROMPT_KEYS, *REASONING_KEYS),
        checked=QUESTION_PARTS,
    ),
    "text": Format(keys=(("text",),), example='{"text": str}', encode=_text, also=(), checked=TEXT_EXTRAS),
}


def _ignored_keys(
    turns: Sequence[Message], template_kwargs: Mapping[str, Any], encoder: Encoder, samples: Sequence[Sample]
) -> set[str]:
    """Return the keys of turns, and the variables of the template, that nothing reads: the template has no
    such word, or `samples` lack the text."""
    read = _words(all_template_text(encoder.tokenizer))
    texts = [(name, turn.message.get(name.rpartition(".")[2])) for turn in turns for name in turn.extra]
    named = [text for _, text in texts if isinstance(text, str)]
    whole = "".join(encoder.tokenizer.decode(sample.token_ids) for sample in samples if named)
    lost = {name for name, text in texts if isinstance(text, str) and text not in whole}
    variables = {key if key in TEMPLATE_KEYS else f"{TEMPLATE_DICT}.{key}" for key in template_kwargs}
    extra = variables.union(*(turn.extra for turn in turns))
    for turn in turns:
        keys = {*turn.message}.difference(read).union(REASONING_KEYS)
        refuse_thoughts({key: value for key, value in turn.message.items() if key in keys}, turn.role)
    return lost.union(name for name in extra if name.rpartition(".")[2] not in read)


def _with_context(record: Record, turns: Sequence[Message]) -> list[Message]:
    """Return the turns with their weights, after the system prompt and the history next to them."""
    refuse_media(record)
    for key, value in present(record, LABEL_KEYS).items():
        if str(value).lower() in ("false", "0", "0.0"):
            raise unusable(
                f"{key}={value}, so the answer is one that is not wanted",
                fix=f"delete the record, or set data.on_bad_record=skip; delete the key {key} if it labels "
                "something else",
            )
    found = weighted(turns, record)
    for turn in found:
        if turn.role == "assistant" and turn.is_trained:
            refuse_open(turn.message["content"], origin="an answer")
    system = found[:1] if found[0].role == "system" else []
    history = [
        turn for key, value in present(record, (HISTORY_KEY,)).items() for turn in history_turns(value, key)
    ]
    return [*(_system(record, system) or system), *history, *found[len(system) :]]


def _system(record: Mapping[str, Any], first: Sequence[Message]) -> list[Message]:
    """Return the system prompt next to the turns; `first` holds their own system turn, if there is one."""
    given = {key: text_of(value, key) for key, value in present(record, SYSTEM_KEYS).items()}
    texts = {text.strip() for text in given.values()}
    first = [turn for turn in first if turn.message["content"].strip()]
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
