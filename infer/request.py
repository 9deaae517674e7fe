"""One sample of one request: its prompt, its tokens so far, when it is finished, and the queue of samples
that wait for a lane."""

from __future__ import annotations

import operator
import reprlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from idlm.contracts import Completion, SamplingParams, TokenLogprob
from idlm.errors import UserError

if TYPE_CHECKING:
    from idlm.infer.structured.grammar import Grammar
    from idlm.text.detokenizer import AnswerText

MAX_RECENT_DRAFTS = 256


class PassCounts(NamedTuple):
    """What one pass did for a sample: tokens emitted, drafts accepted and tested. Drafts after the last token
    of the answer do not count."""

    num_emitted: int
    num_accepted: int
    num_tested: int


class QueueOrder(NamedTuple):
    """The client of a request, and its order there: lowest `priority` first. `call`: one call of the client,
    which may have several prompts with several answers each."""

    client: str = ""
    priority: int = 0
    user: str = ""
    call: str = ""


ANONYMOUS = QueueOrder()
PRIORITY_LEVEL = QueueOrder._fields.index("priority")


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A sequence in the engine. `lane` is its row in the device tables, None while it waits.

    The host counts `num_computed` tokens whose KV is stored and `num_steps` steps that emitted tokens (the
    position of the random stream), as far as results have been read; `num_inflight` more steps are launched.
    `num_passes` decoding steps have emitted nothing since it last emitted tokens or lost its KV. The last
    `num_again` of its tokens are unknown for now and will be decoded again (`Accelerator.decodes_again`);
    `num_known` are known, those of the prompt counted. `max_length` bounds prompt and answer together. Once
    it decodes token by token, its lane has pages for the next pass while the request has at most
    `num_covered` known tokens (0: it does not), and if it `is_plain` only its length, a stop id or logits
    that are not finite end it. A pass feeds `num_canvases` of its tokens (full diffusion), each in slots of
    its own. `page_keys` are the prefix-cache keys of its first whole pages, as far as they were looked up;
    `num_cached_tokens` of the prompt were found there. `passes_by_drafts`: how many passes accepted and
    tested so many drafts. Of late, `recent_accepted` of `recent_tested` drafts were accepted: after
    `MAX_RECENT_DRAFTS` tests the older ones count half. `has_other_drafts`: its drafts are not from masks,
    but from rows that verified rejected ones. `prompt_logprobs` are those of the prompt's tokens from the
    second one on, as far as they are known. `grammar` follows the tokens of the answer, and `answer` is their
    text; None: it is made at the end. `turn`: whose it is, which decides when it is admitted. `is_read`: it
    has events before the last one too, and those so far have `num_reported` tokens of the answer. `passes`
    since the last event, unless None."""

    request_id: str
    index: int
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_length: int
    num_canvases: int = 1
    lane: int | None = None
    num_computed: int = 0
    num_inflight: int = 0
    num_passes: int = 0
    num_again: int = 0
    num_covered: int = 0
    is_plain: bool = False
    num_cached_tokens: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_forwards: int = 0
    num_steps: int = 0
    passes_by_drafts: defaultdict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    recent_accepted: float = 0.0
    recent_tested: float = 0.0
    has_other_drafts: bool = False
    finish_reason: str | None = None
    grammar: Grammar | None = None
    turn: QueueOrder = ANONYMOUS
    is_read: bool = True
    num_reported: int = 0
    passes: list[PassCounts] | None = None
    answer: AnswerText | None = None
    num_known: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_known = len(self.prompt_ids) + len(self.token_ids) - self.num_again

    @property
    def all_known_ids(self) -> list[int]:
        """Token ids of prompt and answer as far as they are known."""
        return self.known_ids(0, self.num_known)

    def known_ids(self, start: int, end: int) -> list[int]:
        """Token ids of prompt and answer in [start, end)."""
        num_prompt = len(self.prompt_ids)
        if start >= num_prompt:
            return self.token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_ids[start:end] + self.token_ids[: max(end - num_prompt, 0)]

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose log-probabilities are requested, of the first sample alone, and not known
        yet."""
        if self.params.prompt_logprobs is None or self.index > 0:
            return 0
        return len(self.prompt_ids) - 1 - len(self.prompt_logprobs)

    def add_prompt_logprobs(self, start: int, logprobs: list[TokenLogprob]) -> None:
        """Note those of the tokens from `start` on, some of which may be known: they were computed again."""
        num_known = 1 + len(self.prompt_logprobs)
        assert start <= num_known, f"{start=} {num_known=}"
        self.prompt_logprobs += logprobs[num_known - start :]

    def all_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        if self.params.prompt_logprobs is None or self.index > 0:
            return None
        return (None, *self.prompt_logprobs)

    def contradicts(self, token_ids: Sequence[int]) -> bool:
        """Whether emitted tokens, as far as they are decoded again, differ from those emitted before."""
        if not self.num_again:
            return False
        before = self.token_ids[-self.num_again :][: len(token_ids)]
        return [*token_ids[: len(before)]] != before

    def extend(self, token_ids: list[int]) -> list[int]:
        """Append emitted tokens, up to one that its grammar refuses or that ends the answer, which sets
        `finish_reason`. Returns the new ones, without those that were decoded again."""
        if self.num_again:
            token_ids = self._new(token_ids)
        is_near_end = self.num_known + len(token_ids) >= self.max_length
        if is_near_end or self.grammar is not None or not self.stop_ids.isdisjoint(token_ids):
            token_ids = self._up_to_end(token_ids)
        self.token_ids += token_ids
        self.num_known += len(token_ids)
        return token_ids

    def _new(self, token_ids: list[int]) -> list[int]:
        """Emitted tokens without those that were emitted before, which are known again."""
        num_again = min(self.num_again, len(token_ids))
        self.num_again -= num_again
        self.num_known += num_again
        return token_ids[num_again:]

    def _up_to_end(self, token_ids: list[int]) -> list[int]:
        """Those of the new tokens that belong to the answer; sets `finish_reason` if they end it."""
        kept, grammar = list[int](), self.grammar
        if self.params.max_tokens == 0:
            self.finish_reason = "length"
            return kept
        for token_id in token_ids:
            if grammar is not None and not grammar.push([token_id]):
                break
            kept.append(token_id)
            if token_id in self.stop_ids or (grammar is not None and grammar.is_finished):
                self.finish_reason = "stop"
            elif self.num_known + len(kept) >= self.max_length:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return kept

    def count_drafts(self, num_accepted: int, num_tested: int, num_emitted: int) -> None:
        """Count the drafts of a step that emitted. Those after the tokens of the answer do not count."""
        if num_accepted >= num_emitted:
            num_accepted = num_tested = num_emitted
        if self.passes is not None:
            self.passes.append(PassCounts(num_emitted, num_accepted, num_tested))
        self.passes_by_drafts[num_accepted, num_tested] += 1

    def remember_drafts(self, num_accepted: int, num_tested: int) -> None:
        """Count drafts of late, from which the stride is chosen."""
        if self.recent_tested >= MAX_RECENT_DRAFTS:
            self.recent_tested /= 2
            self.recent_accepted /= 2
        self.recent_tested += num_tested
        self.recent_accepted += num_accepted

    @property
    def accepted(self) -> tuple[int, ...]:
        return self._by_position(0)

    @property
    def tested(self) -> tuple[int, ...]:
        return self._by_position(1)

    def _by_position(self, column: int) -> tuple[int, ...]:
        """From the numbers of drafts of passes, the number of drafts at each position."""
        counts = self.passes_by_drafts.items()
        longest = max((num_tested for _, num_tested in self.passes_by_drafts), default=0)
        return tuple(sum(num for pair, num in counts if pair[column] > j) for j in range(longest))

    def complete(self, text: str, exactness: str, *, error: UserError | None = None) -> Completion:
        """The completion of a finished request; with `error` it holds the tokens emitted so far."""
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
            accepted_by_position=self.accepted,
            tested_by_position=self.tested,
            seed=self.params.seed,
            exactness=exactness,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self.all_prompt_logprobs(),
            error=None if error is None else f"{error.code}: {error.message}",
        )


def strip_stop_id(token_ids: Sequence[int], stop_ids: frozenset[int]) -> Sequence[int]:
    """The tokens without a final stop id, which is not part of the text."""
    return token_ids[:-1] if token_ids and token_ids[-1] in stop_ids else token_ids


def token_list(request_id: str, prompt: Any, num_rows: int) -> list[int]:
    """Token ids of a prompt, a sequence of integers. Raises UserError IDLM-0421 for anything else, IDLM-0410
    for an empty prompt, and IDLM-0411 for ids outside [0, num_rows)."""
    try:
        token_ids = None if isinstance(prompt, bytes) else [operator.index(token) for token in prompt]
    except TypeError:
        token_ids = None
    if token_ids and all(0 <= token_id < num_rows for token_id in token_ids):
        return token_ids
    raise _no_prompt(request_id, prompt, token_ids, num_rows)


def _no_prompt(request_id: str, prompt: Any, token_ids: list[int] | None, num_rows: int) -> UserError:
    if token_ids is None:
        return UserError(
            "IDLM-0421",
            f"request {request_id!r}: a prompt is text or a list of token ids, not {reprlib.repr(prompt)}",
            fix="give a string, or ids from the checkpoint's tokenizer; render a conversation with "
            "idlm.text.tokenizer.encode_messages(engine.tokenizer, messages)",
        )
    if not token_ids:
        return UserError(
            "IDLM-0410", f"request {request_id!r}: the prompt is empty", fix="give at least one token"
        )
    outside = [token_id for token_id in token_ids if not 0 <= token_id < num_rows]
    return UserError(
        "IDLM-0411",
        f"request {request_id!r}: token ids {outside[:5]} are outside the vocabulary [0, {num_rows})",
        fix="encode the prompt with the checkpoint's own tokenizer",
    )


class Waiting:
    """The queue. Requests that a failed pass interrupted come first; the others come in turn over clients,
    then by priority, in turn over the users of a client, and over calls, one answer at a time. Its levels are
    dicts, by the fields of `QueueOrder`, in which whose turn it is stands first; the last level is the
    answers of a call."""

    def __init__(self) -> None:
        self._interrupted: deque[Request] = deque()
        self._clients: dict[Any, Any] = {}
        self._num = 0

    def __len__(self) -> int:
        return len(self._interrupted) + self._num

    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""
        yield from self._interrupted
        levels = [self._clients]
        while levels:
            for below in levels.pop().values():
                if isinstance(below, deque):
                    yield from below
                else:
                    levels.append(below)

    def add(self, request: Request) -> None:
        *path, last = request.turn
        level = self._clients
        for name in path:
            level = level.setdefault(name, {})
        level.setdefault(last, deque()).append(request)
        self._num += 1

    def first(self) -> Request:
        return self._interrupted[0] if self._interrupted else _first(self._clients, 0)

    def pop(self) -> Request:
        """Take the first request out; the next turn is that of others."""
        if self._interrupted:
            return self._interrupted.popleft()
        request = _first(self._clients, 0)
        self._take(request, ends_turn=True)
        return request

    def remove(self, request: Request) -> None:
        if request in self._interrupted:
            self._interrupted.remove(request)
        else:
            self._take(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Queue requests that ran before all others. One that was being admitted may still be here."""
        put = list(requests)
        queued = set(self)
        for request in put:
            if request in queued:
                self.remove(request)
        self._interrupted.extendleft(reversed(put))

    def starved(self, running: Sequence[Request]) -> Request | None:
        """The first waiting request whose client (user, call) has no lane while another has more than one."""
        counts: dict[Any, Counter[Any]] = {}
        for one in running:
            path = tuple(one.turn)
            for depth, name in enumerate(path):
                counts.setdefault(path[:depth], Counter())[name] += 1
        return None if self._interrupted else _starved(self._clients, (), counts)

    def prefer(self, request: Request) -> None:
        level = self._clients
        for name in request.turn:
            others = {key: level.pop(key) for key in list(level) if key != name}
            level.update(others)
            level = level[name]

    def _take(self, request: Request, *, ends_turn: bool = False) -> None:
        levels: list[Any] = [self._clients]
        for name in request.turn:
            levels.append(levels[-1][name])
        levels.pop().remove(request)
        for level, name in zip(reversed(levels), reversed(request.turn), strict=True):
            below = level[name]
            if not below or ends_turn:
                del level[name]
            if below and ends_turn:
                level[name] = below
        self._num -= 1


def _starved(level: Any, prefix: Any, counts: dict[Any, Counter[Any]]) -> Request | None:
    """The first request below a name that no running request has, if another name has several."""
    siblings = counts.get(prefix)
    if siblings is None or isinstance(level, deque):
        return None
    depth = len(prefix)
    if max(siblings.values()) > 1 and depth != PRIORITY_LEVEL:
        for name, below in level.items():
            if name not in siblings:
                return _first(below, depth + 1)
    names = [min(level)] if depth == PRIORITY_LEVEL else list(level)
    found = (_starved(level[name], (*prefix, name), counts) for name in names)
    return next((one for one in found if one is not None), None)


def _first(level: Any, depth: int) -> Request:
    while not isinstance(level, deque):
        level = level[min(level) if depth == PRIORITY_LEVEL else next(iter(level))]
        depth += 1
    request: Request = level[0]
    return request
