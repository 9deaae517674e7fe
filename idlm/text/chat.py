"""Prompts and conversations to token ids, through the chat template of a tokenizer."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from idlm.errors import UserError
from idlm.text.tokenizer import plain_text, special_token_ids

Message = Mapping[str, str]

MAX_CHARS_PER_TOKEN = 256
"""Largest average number of characters per token of a prompt, unless the vocabulary has longer tokens."""
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_prompt(
    tokenizer: Any,
    prompt: str,
    *,
    template: Literal["auto", "none"] = "auto",
    enable_thinking: bool | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Return the ids of `prompt`.

    `template`: "auto" renders it as one user message of the chat template, if the tokenizer has one; "none"
    encodes the bare text with the special tokens that the tokenizer itself adds. The template gets
    `enable_thinking` unless it is None. Raises UserError IDLM-0218 for an empty prompt and IDLM-0412 for one
    that cannot fit into `max_tokens`.
    """
    if not prompt:
        raise UserError("IDLM-0218", "the prompt is empty", fix="give at least one character")
    if template == "auto" and tokenizer.chat_template:
        return encode_messages(
            tokenizer,
            [{"role": "user", "content": prompt}],
            enable_thinking=enable_thinking,
            max_tokens=max_tokens,
        )
    check_size(tokenizer, prompt, max_tokens)
    return _plain_ids(tokenizer, prompt, add_special_tokens=True)


def encode_messages(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    enable_thinking: bool | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Return the ids of a conversation that the assistant is to continue.

    Errors are those of `render_conversation`; `max_tokens` as in `encode_prompt`.
    """
    text = _render(tokenizer, messages, open_turn=True, enable_thinking=enable_thinking)
    check_size(tokenizer, text, max_tokens)
    return _plain_ids(tokenizer, text, add_special_tokens=False)


def check_size(tokenizer: Any, text: str, max_tokens: int | None) -> None:
    """Raise UserError IDLM-0412, before encoding, for a text that `max_tokens` tokens cannot hold; None
    allows any.

    Encoding a text of 100 MB takes minutes and gigabytes. No token holds more characters than the longest of
    the vocabulary, except that a tokenizer may merge a run of unknown characters or of spaces into one token:
    such tokens may hold `MAX_CHARS_PER_TOKEN` on average.
    """
    if max_tokens is None or len(text) <= max_tokens * MAX_CHARS_PER_TOKEN:
        return
    longest = max(MAX_CHARS_PER_TOKEN, *map(len, tokenizer.get_vocab()))
    if len(text) > max_tokens * longest:
        raise UserError(
            "IDLM-0412",
            f"the prompt has {len(text)} characters, more than {max_tokens} tokens can hold",
            fix="shorten the prompt so that a token can follow, or raise max_length if the model allows",
        )


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    enable_thinking: bool | None = None,
    turns: Literal["all", "last"] = "all",
) -> tuple[list[int], list[bool]]:
    """Return (ids, supervised): a whole conversation, and for each token whether the assistant has to produce
    it.

    `turns` supervises all assistant turns or only the last one. The end-of-turn token is supervised, the
    whitespace that the template puts after it is not. A template with `{% generation %}` blocks marks the
    assistant's tokens. For any other template, the text before a supervised turn must be rendered and
    tokenised exactly as `encode_messages` does it at inference; the ids then differ from those of the whole
    text only where a token would cross that border.

    Raises UserError IDLM-0214 if the template renders a shorter conversation differently from the start of a
    longer one, IDLM-0215 without a chat template, IDLM-0217 if the template refuses the messages.
    """
    if tokenizer.chat_template and _GENERATION_BLOCK.search(tokenizer.chat_template):
        return _marked_conversation(tokenizer, messages, enable_thinking=enable_thinking, turns=turns)
    whole = _render(tokenizer, messages, open_turn=False, enable_thinking=enable_thinking)
    targets = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    ids: list[int] = []
    supervised: list[bool] = []
    prompts: list[tuple[int, str, int]] = []
    done = ""
    for turn in targets[-1:] if turns == "last" else targets:
        before = _render(tokenizer, messages[:turn], open_turn=True, enable_thinking=enable_thinking)
        after = _render(tokenizer, messages[: turn + 1], open_turn=False, enable_thinking=enable_thinking)
        _require_prefix(done, before, turn)
        _require_prefix(before, after, turn)
        _require_prefix(after, whole, turn)
        context = _plain_ids(tokenizer, before[len(done) :], add_special_tokens=False)
        if done:
            prompts.append((turn, before, len(ids) + len(context)))
        answer = _plain_ids(tokenizer, after[len(before) :], add_special_tokens=False)
        num_tail = _num_tail_tokens(tokenizer, answer)
        ids += context + answer
        supervised += [False] * len(context) + [True] * (len(answer) - num_tail) + [False] * num_tail
        done = after
    rest = _plain_ids(tokenizer, whole[len(done) :], add_special_tokens=False)
    ids, supervised = ids + rest, supervised + [False] * len(rest)
    # If the parts give the ids of the whole, so do all prefixes; encoding each of them would be quadratic.
    if prompts and ids != _plain_ids(tokenizer, whole, add_special_tokens=False):
        for turn, before, num_ids in prompts:
            if ids[:num_ids] != _plain_ids(tokenizer, before, add_special_tokens=False):
                raise _disagreement(
                    turn, "tokenises the turns before it differently when the conversation goes on"
                )
    return ids, supervised


def _marked_conversation(
    tokenizer: Any, messages: Sequence[Message], *, enable_thinking: bool | None, turns: str
) -> tuple[list[int], list[bool]]:
    """Return the conversation as a template with `{% generation %}` blocks marks it.

    An end-of-turn token right after a block belongs to it: without it the model would never stop.
    """
    whole = _render(tokenizer, messages, open_turn=False, enable_thinking=enable_thinking)
    opened = _render(tokenizer, messages, open_turn=True, enable_thinking=enable_thinking)
    opener = _plain_ids(tokenizer, opened[len(whole) :], add_special_tokens=False)[:1]
    extra = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    marked = tokenizer.apply_chat_template(
        [dict(message) for message in messages], return_dict=True, return_assistant_tokens_mask=True, **extra
    )
    ids, flags = list(marked["input_ids"]), [bool(flag) for flag in marked["assistant_masks"]]
    special = special_token_ids(tokenizer)
    supervised = [False] * len(ids)
    runs = [(key, list(group)) for key, group in itertools.groupby(range(len(ids)), key=flags.__getitem__)]
    for run in [group for key, group in runs if key][-1 if turns == "last" else 0 :]:
        end = run[-1] + 1
        following = ids[end : end + 1]
        is_closed = any(ids[idx] in special for idx in run)
        if not is_closed and following and following[0] in special and following != opener:
            end += 1
        end -= _num_tail_tokens(tokenizer, ids[run[0] : end])
        supervised[run[0] : end] = [True] * (end - run[0])
    return ids, supervised


def _num_tail_tokens(tokenizer: Any, answer: Sequence[int]) -> int:
    """Count the whitespace tokens after the special token that closes a turn; 0 if none closes it."""
    special = special_token_ids(tokenizer)
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


def _render(
    tokenizer: Any, messages: Sequence[Message], *, open_turn: bool, enable_thinking: bool | None
) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            "IDLM-0215",
            "the tokenizer has no chat template, so messages cannot be rendered",
            fix="give plain text, or add chat_template to tokenizer_config.json",
        )
    if not messages:
        return ""
    extra = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=open_turn, **extra
        )
    # Templates are user data: they raise jinja2's errors, and others for messages they do not expect.
    except Exception as error:
        raise UserError(
            "IDLM-0217",
            f"the chat template refuses {[message.get('role') for message in messages]}: {error}",
            fix="give messages with the roles and fields that this model's template knows",
        ) from error
    return text


def _plain_ids(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
