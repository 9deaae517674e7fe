"""Conversations as training samples: their token ids, and which of them the assistant has to produce."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

from idlm.errors import UserError
from idlm.text.tokenizer import Message, encode_text, plain_text, render, special_token_ids

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    enable_thinking: bool | None = None,
    turns: Literal["all", "last"] = "all",
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    untrained: AbstractSet[int] = frozenset(),
) -> tuple[list[int], list[bool]]:
    """Return (ids, supervised): a whole conversation, and for each token whether the assistant has to produce
    it.

    `turns` supervises all assistant turns or only the last one, of those whose index is not in `untrained`.
    `tools` and `template_kwargs` are given to the template. The end-of-turn token is supervised, the
    whitespace that the template puts after it is not. A template with `{% generation %}` blocks marks the
    assistant's tokens. For any other template, the text before a supervised turn must be rendered and
    tokenised exactly as `encode_messages` does it at inference; the ids then differ from those of the whole
    text only where a token would cross that border.

    Raises UserError IDLM-0214 if the template renders a shorter conversation differently from the start of a
    longer one, IDLM-0215 without a chat template, IDLM-0217 if the template refuses the messages.
    """
    extra = dict(template_kwargs or {})
    if enable_thinking is not None:
        extra["enable_thinking"] = enable_thinking
    targets = [
        turn
        for turn, message in enumerate(messages)
        if message["role"] == "assistant" and turn not in untrained
    ]
    if turns == "last":
        targets = targets[-1:]
    if tokenizer.chat_template and _GENERATION_BLOCK.search(tokenizer.chat_template):
        return _marked_conversation(tokenizer, messages, targets, tools=tools, extra=extra)
    draw = functools.partial(render, tokenizer, enable_thinking=None, tools=tools, template_kwargs=extra)
    whole = draw(messages, open_turn=False)
    ids: list[int] = []
    supervised: list[bool] = []
    prompts: list[tuple[int, str, int]] = []
    done = ""
    for turn in targets:
        before = draw(messages[:turn], open_turn=True)
        after = whole
        if turn + 1 < len(messages):
            after = draw(messages[: turn + 1], open_turn=False)
        _require_prefix(done, before, turn)
        _require_prefix(before, after, turn)
        _require_prefix(after, whole, turn)
        context = encode_text(tokenizer, before[len(done) :])
        if done:
            prompts.append((turn, before, len(ids) + len(context)))
        answer = encode_text(tokenizer, after[len(before) :])
        num_tail = _num_tail_tokens(tokenizer, answer)
        ids += context + answer
        supervised += [False] * len(context) + [True] * (len(answer) - num_tail) + [False] * num_tail
        done = after
    rest = encode_text(tokenizer, whole[len(done) :]) if len(done) < len(whole) else []
    ids, supervised = ids + rest, supervised + [False] * len(rest)
    # If the parts give the ids of the whole, so do all prefixes; encoding each of them would be quadratic.
    if prompts and ids != encode_text(tokenizer, whole):
        for turn, before, num_ids in prompts:
            if ids[:num_ids] != encode_text(tokenizer, before):
                raise _disagreement(
                    turn, "tokenises the turns before it differently when the conversation goes on"
                )
    return ids, supervised


def _marked_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    targets: Sequence[int],
    *,
    tools: Sequence[Mapping[str, Any]],
    extra: dict[str, Any],
) -> tuple[list[int], list[bool]]:
    """Return the conversation as a template with `{% generation %}` blocks marks it.

    An end-of-turn token right after a block belongs to it: without it the model would never stop.
    """
    draw = functools.partial(render, tokenizer, enable_thinking=None, tools=tools, template_kwargs=extra)
    whole, opened = draw(messages, open_turn=False), draw(messages, open_turn=True)
    opener = encode_text(tokenizer, opened[len(whole) :])[:1]
    marked = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **extra,
    )
    ids, flags = list(marked["input_ids"]), [bool(flag) for flag in marked["assistant_masks"]]
    special = special_token_ids(tokenizer)
    supervised = [False] * len(ids)
    runs = [(key, list(group)) for key, group in itertools.groupby(range(len(ids)), key=flags.__getitem__)]
    said = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    blocks = [group for key, group in runs if key]
    if len(blocks) != len(said):
        raise _disagreement(said[-1] if said else 0, f"marks {len(blocks)} blocks for {len(said)} turns")
    for run in [block for turn, block in zip(said, blocks, strict=True) if turn in targets]:
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
