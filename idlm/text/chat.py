"""Conversations as training samples: their token ids, and which of them the assistant has to produce."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Literal

from idlm.errors import UserError
from idlm.text.left_out import TurnText, left_out
from idlm.text.templates import Message, marks_answers
from idlm.text.thoughts import split_prefill, thought_of
from idlm.text.tokenizer import encode_text, plain_text, special_token_ids
from idlm.text.turns import Template

TRAILING = "turns behind the last trained answer are left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Token ids, and for each whether the assistant has to produce it; `text` of the first `num_turns` turns,
    and of each answer by its turn. `left_out`: what the template does not write. `notes`: sentences for the
    user."""

    token_ids: list[int]
    supervised: list[bool]
    text: str
    answers: Mapping[int, str]
    num_turns: int
    left_out: Sequence[TurnText] = ()
    notes: tuple[str, ...] = ()


def conversation(
    template: Template,
    messages: Sequence[Message],
    *,
    turns: Literal["all", "last"] = "all",
    untrained: AbstractSet[int] = frozenset(),
    known: dict[Any, frozenset[int]] | None = None,
) -> Conversation:
    """Return a whole conversation, and which of its tokens the assistant has to produce.

    `turns` supervises all assistant turns or only the last one, of those whose index is not in `untrained`.
    The end-of-turn token is supervised, the white space that the template puts after it is not. A template
    with `{% generation %}` blocks marks the assistant's tokens. For any other template, the text before a
    supervised turn must be rendered and tokenised exactly as `encode_messages` does it at inference; the ids
    then differ from those of the whole text only where a token would cross that border. `known` is that of
    `left_out`; None: not checked.

    Raises UserError IDLM-0214 if the template renders a shorter conversation differently from the start of a
    longer one, IDLM-0217 if it refuses the messages."""
    special = special_token_ids(template.tokenizer)
    messages = _ended_once(template, messages, special)
    targets = [
        turn
        for turn, message in enumerate(messages)
        if message["role"] == "assistant" and turn not in untrained
    ]
    if turns == "last":
        targets = targets[-1:]
    done = _marked(template, messages, targets, special) if marks_answers(template.text) else None
    done = _cut(template, messages, targets, special) if done is None else done
    if known is None:
        return done

    def redraw(changed: Sequence[Message], tools: Sequence[Message]) -> tuple[str, Mapping[int, str]]:
        drawn = conversation(replace(template, tools=tools), changed, turns=turns, untrained=untrained)
        return drawn.text, drawn.answers

    shown = messages[: done.num_turns]
    lost = left_out(shown, template.tools, done.text, done.answers, redraw=redraw, known=known)
    return replace(done, left_out=lost)


def _ended_once(template: Template, messages: Sequence[Message], special: frozenset[int]) -> list[Message]:
    """Return the messages, whose answers do not end in the token that the template puts behind them."""
    tokenizer = template.tokenizer
    ends = tuple(tokenizer.convert_ids_to_tokens(sorted(special)))
    kept: list[Message] = list(messages)
    for turn, message in enumerate(messages):
        content = (message.get("content") or "") if message["role"] == "assistant" else ""
        if isinstance(content, str) and content.rstrip().endswith(ends):
            question = [{"role": "user", "content": "a"}]
            after = template.around(question)[1].lstrip()
            while found := next((end for end in ends if content.rstrip().endswith(end)), None):
                is_eos = found == tokenizer.eos_token and after.startswith(ends)
                if not (after.startswith(found) or is_eos):
                    break
                content = content.rstrip().removesuffix(found)
            kept[turn] = {**message, "content": content}
    return kept


def _cut(
    template: Template, messages: Sequence[Message], targets: Sequence[int], special: frozenset[int]
) -> Conversation:
    """Return the conversation cut where the text that inference feeds ends and where an answer ends."""
    tokenizer, whole = template.tokenizer, template.draw(messages)
    ids: list[int] = []
    supervised: list[bool] = []
    prompts: list[tuple[int, str, int]] = []
    answers: dict[int, str] = {}
    notes: set[str] = set()
    done, num_turns = "", len(messages)
    for turn in targets:
        is_last = turn + 1 == len(messages)
        before, answer, note = template.turn(messages[: turn + 1], closed=whole if is_last else None)
        after = before + answer
        if turn == targets[0] == targets[-1] and not whole.startswith(after):
            # The rest of the conversation teaches nothing, and the template would rewrite this turn for it.
            whole, num_turns = after, turn + 1
        _require_prefix(done, before, turn)
        _require_prefix(after, whole, turn)
        context = encode_text(tokenizer, before[len(done) :], after=done)
        produced = encode_text(tokenizer, answer, after=before)
        if done:
            prompts.append((turn, before, len(ids) + len(context)))
        num_tail = _num_tail_tokens(tokenizer, produced, special)
        ids += context + produced
        supervised += [False] * len(context) + [True] * (len(produced) - num_tail) + [False] * num_tail
        done, answers[turn] = after, answer
        notes |= {note} if note else set()
    rest = encode_text(tokenizer, whole[len(done) :], after=done) if len(done) < len(whole) else []
    ids, supervised = ids + rest, supervised + [False] * len(rest)
    # If the parts give the ids of the whole, so do all prefixes; encoding each of them would be quadratic.
    if prompts and ids != encode_text(tokenizer, whole):
        for turn, before, num_ids in prompts:
            if ids[:num_ids] != encode_text(tokenizer, before):
                raise _disagreement(
                    turn, "tokenises the turns before it differently when the conversation goes on"
                )
    if num_turns < len(messages):
        notes.add(TRAILING)
    return Conversation(
        token_ids=ids,
        supervised=supervised,
        text=whole,
        answers=answers,
        num_turns=num_turns,
        notes=tuple(sorted(notes)),
    )


def _marked(
    template: Template, messages: Sequence[Message], targets: Sequence[int], special: frozenset[int]
) -> Conversation | None:
    """Return the conversation as a template with `{% generation %}` blocks marks it; None where the marks do
    not tell the turns apart, or where an answer is more than what they hold. An end-of-turn token right after
    a block belongs to it: without it the model would never stop."""
    tokenizer = template.tokenizer
    whole, opened = template.draw(messages), template.draw(messages, is_open=True)
    thoughts = ((thought_of(messages[turn]), messages[turn].get("content")) for turn in targets)
    if split_prefill(opened)[1] or any(each and not each.is_in(whole, str(said)) for each, said in thoughts):
        return None
    opener = encode_text(tokenizer, opened[len(whole) :])
    marked = template.tokens(messages)
    ids, flags = list(marked["input_ids"]), [bool(flag) for flag in marked["assistant_masks"]]
    for start in range(len(ids) if special.intersection(opener) else 0):
        # Some templates mark what opens a turn, with which the prompt of inference ends.
        if flags[start] and ids[start : start + len(opener)] == opener:
            flags[start : start + len(opener)] = [False] * len(opener)
    runs = [(key, list(group)) for key, group in itertools.groupby(range(len(ids)), key=flags.__getitem__)]
    said = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    blocks = [group for key, group in runs if key]
    if len(blocks) == len(said):
        blocks = [block for turn, block in zip(said, blocks, strict=True) if turn in targets]
    elif targets != said:
        return None
    supervised = [False] * len(ids)
    for run in blocks:
        start, end = run[0], run[-1] + 1
        following = ids[end : end + 1]
        is_closed = any(token_id in special for token_id in ids[start:end])
        if not is_closed and following and following[0] in special and following != opener[:1]:
            end += 1
        end -= _num_tail_tokens(tokenizer, ids[start:end], special)
        supervised[start:end] = [True] * (end - start)
    num_turns = len(messages)
    return Conversation(token_ids=ids, supervised=supervised, text=whole, answers={}, num_turns=num_turns)


def _num_tail_tokens(tokenizer: Any, answer: Sequence[int], special: frozenset[int]) -> int:
    """Count the white space tokens after the special token that closes a turn; 0 if none closes it."""
    last = max((idx for idx, token_id in enumerate(answer) if token_id in special), default=None)
    if last is None or plain_text(tokenizer, answer[last + 1 :]).strip():
        return 0
    return len(answer) - last - 1


def _require_prefix(shorter: str, longer: str, turn: int) -> None:
    if not longer.startswith(shorter):
        raise _disagreement(turn, f"renders {shorter[-40:]!r} differently in the longer conversation")


def _disagreement(turn: int, what: str) -> UserError:
    return UserError(
        "IDLM-0214",
        f"assistant turn at message {turn}: the chat template {what}, so its tokens cannot be told apart",
        fix="make one sample per assistant turn (data.turns=each), or supervise only the last one "
        "(data.turns=last)",
    )
