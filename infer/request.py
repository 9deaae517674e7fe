"""One sample of one request: its prompt, what it has emitted, and when it is finished. Knows no decoder."""

from __future__ import annotations

import itertools
import operator
import reprlib
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from idlm.contracts import Completion, SamplingParams, TokenLogprob
from idlm.errors import UserError


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A sequence on its way through the engine. `lane` is None while it waits.

    On the host, `num_computed` mirrors the lane's KV pointer as far as results are back, and `num_steps` its
    random stream: the passes that emitted something. `num_inflight` such passes are on their way.
    `max_length`: prompt and answer together. `page_keys`: keys of its first whole pages in the prefix cache,
    as far as they were asked for; `num_cached_tokens` of the prompt were found there.
    """

    request_id: str
    index: int
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_length: int
    lane: int | None = None
    num_computed: int = 0
    num_inflight: int = 0
    num_cached_tokens: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_forwards: int = 0
    num_steps: int = 0
    accepted: list[int] = field(default_factory=list)
    tested: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def num_known(self) -> int:
        """Prompt and emitted tokens."""
        return len(self.prompt_ids) + len(self.token_ids)

    def known_ids(self, start: int, end: int) -> list[int]:
        """Tokens of prompt and answer in [start, end)."""
        behind = len(self.prompt_ids)
        if end <= behind:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:] + self.token_ids[max(start - behind, 0) : end - behind]

    def push(self, token_id: int) -> None:
        """Append one emitted token and note a stop id or a length limit."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.params.max_tokens or self.num_known >= self.max_length:
            self.finish_reason = "length"

    def count_drafts(self, num_accepted: int, num_tested: int) -> None:
        """Book one pass's drafts by position."""
        missing = num_tested - len(self.tested)
        if missing > 0:
            self.tested.extend([0] * missing)
            self.accepted.extend([0] * missing)
        for position in range(num_tested):
            self.tested[position] += 1
            self.accepted[position] += position < num_accepted

    def complete(self, text: str, exactness: str, *, error: UserError | None = None) -> Completion:
        """The finished answer; with `error`, what there is of it."""
        assert self.finish_reason is not None, f"{self.request_id=}"
        return Completion(
            request_id=self.request_id,
            index=self.index,
            text=text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            num_prompt_tokens=len(self.prompt_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_forwards=self.num_forwards,
            accepted_by_position=tuple(self.accepted),
            tested_by_position=tuple(self.tested),
            seed=self.params.seed,
            exactness=exactness,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            error=None if error is None else f"{error.code}: {error.message}",
        )


def strip_stop_id(token_ids: Sequence[int], stop_ids: frozenset[int]) -> Sequence[int]:
    """The tokens that become text: all but a final stop id."""
    return token_ids[:-1] if token_ids and token_ids[-1] in stop_ids else token_ids


def token_list(request_id: str, prompt: Any, num_rows: int) -> list[int]:
    """A prompt's token ids as Python integers; any sequence of whole numbers will do, numpy's too. UserError
    IDLM-0421 for what is none, IDLM-0411 and IDLM-0410 for one that the model cannot be fed.
    """
    tokens = _items(prompt)
    if tokens is None:
        raise UserError(
            "IDLM-0421",
            f"request {request_id!r}: a prompt is text or a list of token ids, not {reprlib.repr(prompt)}",
            fix=_fix_of([prompt]),
        )
    known = [(token, _index_of(token)) for token in tokens]
    strangers = [token for token, index in known if index is None]
    if strangers:
        raise UserError(
            "IDLM-0421",
            f"request {request_id!r}: {reprlib.repr(strangers[:5])} in the prompt are no token ids",
            fix=_fix_of(strangers),
        )
    bad = [index for _, index in known if index is not None and not 0 <= index < num_rows]
    if bad:
        raise UserError(
            "IDLM-0411",
            f"request {request_id!r}: token ids {bad[:5]} are outside the vocabulary [0, {num_rows})",
            fix="encode the prompt with the checkpoint's own tokenizer",
        )
    if not tokens:
        raise UserError(
            "IDLM-0410", f"request {request_id!r}: the prompt is empty", fix="give at least one token"
        )
    return [index for _, index in known if index is not None]


def _items(prompt: Any) -> list[Any] | None:
    """What stands in a prompt of token ids; None where it is no sequence, or one of bytes."""
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping | Set):
        return None
    try:
        # Not by the look of it: a tensor without dimensions has __iter__ too.
        return list(prompt)
    except TypeError:
        return None


def _fix_of(strangers: Sequence[Any]) -> str:
    """What to give in place of something that is no prompt."""
    if any(isinstance(value, Mapping) and "role" in value for value in strangers):
        return "render a conversation first: idlm.text.chat.encode_messages(engine.tokenizer, messages)"
    return "give a string, or whole numbers from the checkpoint's tokenizer"


def _index_of(value: Any) -> int | None:
    """A whole number as Python's; None for whatever is not one. Arrays and tensors may tell when asked."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def fresh_ids(first: int, count: int, taken: Collection[str]) -> list[str]:
    """Names for requests that were given none, none of them `taken`."""
    names = (f"r{number}" for number in itertools.count(first))
    return list(itertools.islice((name for name in names if name not in taken), count))
