"""Conversations as training samples: their token ids, and which of them the assistant has to produce.

The text of an assistant's turn has two parts: the prompt as inference renders it, and what the assistant has
to produce after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from idlm.errors import UserError
from idlm.text.left_out import TurnText, left_out
from idlm.text.templates import (
    Message,
    applied,
    marks_answers,
    render,
    template_names,
    template_text,
    thinking_switch,
)
from idlm.text.thoughts import CLOSE, OPEN, after_prefill, is_closed, split_prefill, thought_of
from idlm.text.tokenizer import encode_text, plain_text, special_token_ids, special_tokens, without_ends
from idlm.text.turn_ends import QUESTION, WORD, after_end, next_tags

TRAILING = "turns after the last trained answer are left out"
NO_END = "answers before a turn that begins as no answer ends are trained without an end"


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
    The end-of-turn token is supervised, the white space that the template puts after it is not. The text
    before a supervised turn must be rendered and tokenised exactly as `encode_messages` does it at inference;
    the ids then differ from those of the whole text only where a token would cross that border. What
    `{% generation %}` blocks leave out of an answer is context. `known` is that of `left_out`; None: not
    checked.

    Raises UserError IDLM-0214 if the template renders a shorter conversation differently from the start of a
    longer one, IDLM-0217 if it refuses the messages."""
    special = special_token_ids(template.tokenizer)
    messages = _ended_once(template, messages)
    targets = [
        turn
        for turn, message in enumerate(messages)
        if message["role"] == "assistant" and turn not in untrained
    ]
    if turns == "last":
        targets = targets[-1:]
    done = _cut(template, messages, targets, special)
    if marks_answers(template.text):
        done = _within_marks(template, messages, done, special)
    if known is None:
        return done

    def redraw(changed: Sequence[Message], tools: Sequence[Message]) -> tuple[str, Mapping[int, str]]:
        drawn = conversation(replace(template, tools=tools), changed, turns=turns, untrained=untrained)
        return drawn.text, drawn.answers

    shown = messages[: done.num_turns]
    lost = left_out(shown, template.tools, done.text, done.answers, redraw=redraw, known=known)
    return replace(done, left_out=lost)


def _ended_once(template: Template, messages: Sequence[Message]) -> list[Message]:
    """Return the messages, whose answers do not end in the token that the template appends."""
    eos, ends = template.tokenizer.eos_token, special_tokens(template.tokenizer)
    trimmed: list[Message] = []
    for message in messages:
        content = message.get("content") if message["role"] == "assistant" else ""
        if isinstance(content, str) and content.rstrip().endswith(ends):
            after = template.around([QUESTION])[1].lstrip()
            appended = [end for end in ends if after.startswith(end)]
            closing = (*appended, eos) if appended and eos else (*appended,)
            message = {**message, "content": without_ends(content, closing)}
        trimmed.append(message)
    return trimmed


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
        if turn == targets[-1] and not whole.startswith(after):
            # The rest of the conversation teaches nothing, and the template would rewrite this turn for it.
            whole, num_turns = after, turn + 1
        elif not whole.startswith(after):
            before, answer, note = template.ended(Turn(before, answer, note), whole)
            after = before + answer
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
                    turn, "tokenises the turns before it differently when the conversation continues"
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


def _within_marks(
    template: Template, messages: Sequence[Message], done: Conversation, special: frozenset[int]
) -> Conversation:
    """Return the conversation, of whose targets those remain that the template marks, with the special token
    right after them: without an end the model would never stop. Unchanged where the template alone writes
    other tokens, as without a thought that it does not know."""
    names = template_names(
        template.text, template.tools, enable_thinking=None, template_kwargs=template.names
    )
    asked: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": True, **names}
    marked = applied(template.tokenizer, template.text, messages[: done.num_turns], **asked)
    ids, num = list(marked["input_ids"]), len(done.token_ids)
    if ids[:num] != done.token_ids[: len(ids)]:
        return done
    flags = [False, *map(bool, marked["assistant_masks"]), *[False] * num]
    supervised = [
        is_target and (is_marked or (follows and token_id in special))
        for is_target, is_marked, follows, token_id in zip(done.supervised, flags[1:], flags, done.token_ids)
    ]
    return replace(done, supervised=supervised)


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
        f"assistant turn at message {turn}: the chat template {what}, so its tokens cannot be identified",
        fix="make one sample per assistant turn (data.turns=each), or supervise only the last one "
        "(data.turns=last)",
    )


REFUSED = "IDLM-0217"
MAX_HEADER = 80
CLOSES_BLOCK = "answers without a thought close the <think> block that the prompt opens"
WRITES_BLOCK = "the chat template does not support reasoning_content, which is written as a <think> block"
THINKS = "answers with a thought follow the prompt of enable_thinking=true"


class Turn(NamedTuple):
    """`note`: what is unusual about the two, a sentence."""

    prompt: str
    answer: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Template:
    """Renders messages by the template that a tokenizer has for `tools`; `names` are its other variables.
    `after_end`: what it writes after the end of the last turn, which is left out.
    `tags`: what ends an answer and one with calls, where the template leaves that to the next turn."""

    tokenizer: Any
    tools: Sequence[Mapping[str, Any]] = ()
    names: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    after_end: str = ""
    tags: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, tokenizer: Any, tools: Sequence[Mapping[str, Any]], **names: Any) -> Template:
        """UserError IDLM-0215 without a template."""
        text = template_text(tokenizer, tools)
        ends = after_end(tokenizer, text, bool(tools)), next_tags(tokenizer, text, bool(tools))
        return cls(tokenizer, tools, template_names(text, (), **names), text, *ends)

    def draw(self, messages: Sequence[Message], *, is_open: bool = False) -> str:
        """Return the text of messages; UserErrors are those of `render`."""
        text = render(
            self.tokenizer,
            messages,
            open_turn=is_open,
            tools=self.tools,
            template_kwargs=self.names,
        )
        if is_open:
            return text
        is_answer = bool(messages) and messages[-1]["role"] == "assistant"
        tag = self.tags[bool(messages[-1].get("tool_calls"))] if is_answer else ""
        return text.removesuffix(self.after_end) + tag

    def around(self, history: Sequence[Message]) -> tuple[str, str]:
        """Return what is written before and after the content of an assistant's turn that follows `history`;
        ("", "") where the content is left out."""
        before, found, after = self.draw([*history, {"role": "assistant", "content": WORD}]).partition(WORD)
        return (before, after) if found else ("", "")

    def opener(self) -> str:
        """Return what opens an assistant's turn; empty where nothing does."""
        closed, opened = self.draw([QUESTION]), self.draw([QUESTION], is_open=True)
        return opened[len(closed) :] if opened.startswith(closed) else ""

    def prompt(self, history: Sequence[Message]) -> str:
        """Return the text that a model continues after `history`, which may be empty or lack users."""
        has_user = any(message["role"] == "user" for message in history)
        if history:
            try:
                opened = self.draw(history, is_open=True)
            except UserError as error:
                if error.code != REFUSED or has_user:
                    raise
            else:
                if has_user or opened.endswith(self.opener()):
                    return opened
        before, _ = self.around(history)
        header, prefill = split_prefill(self.opener())
        index = before.rfind(header) if header else -1
        return before if index < 0 else before[: index + len(header)] + prefill

    def turn(self, messages: Sequence[Message], *, closed: str | None = None) -> Turn:
        """Return the two parts of the last of `messages`, which is the assistant's; `closed` is their text,
        where it is known.

        A thought that the template leaves out, or writes in another form than the prompt begins it, is put
        where the model has to produce it. Raises UserError IDLM-0214 where the parts cannot be separated."""
        history, message = messages[:-1], messages[-1]
        prompt, thought = self.prompt(history), thought_of(message)
        head, prefill = split_prefill(prompt)
        if thought is not None and is_closed(prefill):
            return self._with_thinking().turn(messages)._replace(note=THINKS)
        body = self._body(head, self.draw(messages) if closed is None else closed, history)
        is_shown = thought is not None and thought.is_in(body, str(message.get("content")))
        has_prompt, lead = body.startswith(prefill), ""
        body = body.removeprefix(prefill)
        closes_block = CLOSE in body and not body.lstrip().startswith(OPEN)
        fits = has_prompt and (not prefill or is_closed(prefill) or closes_block)
        if fits and (thought is None or is_shown):
            return Turn(prompt, body)
        if not prefill:
            # What the template writes before the content comes before the thought too.
            lead = split_prefill(self._body(head, self.around(history)[0], history))[0]
        answer = lead + after_prefill(prefill, body.removeprefix(lead), thought, is_shown=is_shown)
        note = CLOSES_BLOCK if prefill and not is_closed(prefill) and thought is None else ""
        return Turn(
            prompt, answer, note if thought is None or is_shown or CLOSE in self.text else WRITES_BLOCK
        )

    def ended(self, turn: Turn, whole: str) -> Turn:
        """Return a turn that ends by the one of `tags` that follows in `whole`, or without an end where none
        of them does."""
        for tag in filter(None, self.tags):
            start = turn.prompt + turn.answer.removesuffix(tag)
            if turn.answer.endswith(tag) and whole.startswith(start):
                end = next((other for other in self.tags if other and whole.startswith(start + other)), "")
                return Turn(turn.prompt, turn.answer.removesuffix(tag) + end, turn.note if end else NO_END)
        return turn

    def _body(self, head: str, closed: str, history: Sequence[Message]) -> str:
        """Return what follows `head` in `closed`, where a template may render the turns before otherwise."""
        if closed.startswith(head):
            return closed[len(head) :]
        before, _ = self.around(history)
        leads = ("", self.around([QUESTION])[0].removeprefix(self.draw([QUESTION], is_open=True)).strip())
        for num in range(min(len(head), MAX_HEADER), 0, -1):
            start, found, rest = before.rpartition(head[-num:])
            if found and rest.strip() in leads:
                before = start + found
                break
        if not before or not closed.startswith(before):
            raise UserError(
                "IDLM-0214",
                f"assistant turn at message {len(history)}: the chat template renders {head[-40:]!r} "
                "differently once it is answered, so its tokens cannot be identified",
                fix="correct the chat template, or train without one (data.chat_template=false)",
            )
        return closed[len(before) :]

    def _with_thinking(self) -> Template:
        """Return the template with thinking on; UserError IDLM-0214 where it has no such switch."""
        switch = thinking_switch(self.text)
        if switch is None or switch in self.names:
            raise UserError(
                "IDLM-0214",
                "an answer has a thought, and the prompt of this chat template leaves no room for one",
                fix="train without the thoughts (data.thinking=strip), or correct the template's settings",
            )
        return replace(self, names={**self.names, switch: True})
