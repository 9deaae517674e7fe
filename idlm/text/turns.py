"""The text of an assistant's turn in two parts: the prompt as inference renders it, and what the assistant
has to produce behind it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from idlm.errors import UserError
from idlm.text.templates import Message, known_roles, render, template_names, template_text, thinking_switch
from idlm.text.thoughts import CLOSE, OPEN, after_prefill, is_closed, split_prefill, thought_of
from idlm.text.tokenizer import special_token_ids

_WORD = "zqcontentqz"
REFUSED = "IDLM-0217"
MAX_HEADER = 80
CLOSES_BLOCK = "answers without a thought close the <think> block that the prompt opens"
WRITES_BLOCK = "the chat template does not know reasoning_content, which is written as a <think> block"
THINKS = "answers with a thought follow the prompt of enable_thinking=true"


class Turn(NamedTuple):
    """`note`: what is unusual about the two, a sentence."""

    prompt: str
    answer: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Template:
    """Renders messages by the template that a tokenizer has for `tools`; `names` is what it sees besides.
    `second_end`: the eos that it writes behind a conversation whose last turn has ended, which is left out.
    """

    tokenizer: Any
    tools: Sequence[Mapping[str, Any]] = ()
    names: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    second_end: str = ""

    @classmethod
    def of(cls, tokenizer: Any, tools: Sequence[Mapping[str, Any]], **names: Any) -> Template:
        """UserError IDLM-0215 without a template."""
        text = template_text(tokenizer, tools)
        return cls(tokenizer, tools, template_names(text, (), **names), text, _second_end(tokenizer, text))

    def draw(self, messages: Sequence[Message], *, is_open: bool = False) -> str:
        """Return the text of messages; UserErrors are those of `render`."""
        text = render(
            self.tokenizer,
            messages,
            open_turn=is_open,
            tools=self.tools,
            template_kwargs=self.names,
        )
        return text if is_open else text.removesuffix(self.second_end)

    def tokens(self, messages: Sequence[Message]) -> Any:
        """Return `input_ids` and `assistant_masks` of messages by the marks of the template."""
        return self.tokenizer.apply_chat_template(
            known_roles(self.text, messages),
            return_dict=True,
            return_assistant_tokens_mask=True,
            **template_names(self.text, self.tools, enable_thinking=None, template_kwargs=self.names),
        )

    def around(self, history: Sequence[Message]) -> tuple[str, str]:
        """Return what is written before and after the content of an assistant's turn that follows `history`;
        ("", "") where the content is left out."""
        before, found, after = self.draw([*history, {"role": "assistant", "content": _WORD}]).partition(_WORD)
        return (before, after) if found else ("", "")

    def opener(self) -> str:
        """Return what opens an assistant's turn; empty where nothing does."""
        question = [{"role": "user", "content": "a"}]
        closed, opened = self.draw(question), self.draw(question, is_open=True)
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
        where the model has to produce it. Raises UserError IDLM-0214 where the parts cannot be told apart."""
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

    def _body(self, head: str, closed: str, history: Sequence[Message]) -> str:
        """Return what follows `head` in `closed`, where a template may render the turns before otherwise."""
        if closed.startswith(head):
            return closed[len(head) :]
        before, _ = self.around(history)
        for num in range(min(len(head), MAX_HEADER), 0, -1):
            start, found, rest = before.rpartition(head[-num:])
            if found and not rest.strip():
                before = start + found
                break
        if not before or not closed.startswith(before):
            raise UserError(
                "IDLM-0214",
                f"assistant turn at message {len(history)}: the chat template renders {head[-40:]!r} "
                "differently once it is answered, so its tokens cannot be told apart",
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


@functools.lru_cache(maxsize=64)
def _second_end(tokenizer: Any, text: str) -> str:
    """Return the eos that a template, such as that of Phi-3, writes behind the end of the last turn, unless
    an answer is to follow; empty for one that does not."""
    eos = tokenizer.eos_token
    if not eos or ("eos_token" not in text and eos not in text):
        return ""
    ends = tuple(tokenizer.convert_ids_to_tokens(sorted(special_token_ids(tokenizer))))
    try:
        drawn = [
            Template(tokenizer, text=text).draw([{"role": "user", "content": "a"}], is_open=is_open)
            for is_open in (False, True)
        ]
    except UserError:
        return ""
    rest = drawn[0].removesuffix(eos)
    has_two = rest != drawn[0] and rest.rstrip().endswith(ends) and not drawn[1].startswith(drawn[0])
    return eos if has_two else ""
