"""Messages between the HTTP front end and the engine process: msgpack maps over a pair of local sockets.

Nothing is pickled, and no message names code. The front end sends

    {"type": "start", "model", "decoder", "settings", "options"}     once, before anything else
    {"type": "add", "id", "prompt_ids", "params", "turn", "passes"}  one request; `passes`: events have them
    {"type": "abort", "id"}

and the engine process answers

    {"type": "ready", ...}                                           what `EngineInfo` holds
    {"type": "failed", "code", "message", "fix"}                     it cannot be built, and the process ends
    {"type": "added", "id", "notes"}                                 `notes`: what of a constraint is left out
    {"type": "refused", "id", "code", "message", "fix"}
    {"type": "step", "events", "stats"}                              after a pass or abort; a request waits"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from idlm.contracts import SamplingParams, TokenLogprob
from idlm.errors import UserError

if TYPE_CHECKING:
    from idlm.infer.engine import Engine, StreamEvent

Message = dict[str, Any]
TokenEntry = tuple[int, float | None, list[tuple[int, float]]]
"""Token id, log-probability, and (id, log-probability) of alternatives."""
MAX_MESSAGE = 1 << 28
RECEIVE_BYTES = 1 << 18
FAULT = "internal_error"
"""Code of a refusal that the request did not cause."""
MAX_INTEGER = 2**63 - 1
"""Largest integer that a request may hold; msgpack has 64 bits."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine that is ready. `directory` is the model's, not an adapter's; `stride`: most tokens of a
    pass."""

    directory: str
    decoder: str
    stride: int
    decoder_options: dict[str, Any]
    settings: dict[str, Any]
    exactness: str
    max_length: int
    vocab_size: int
    num_pages: int
    page_size: int
    pid: int


class SampleCounts(NamedTuple):
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int
    num_cached_tokens: int
    num_forwards: int
    accepted: list[int]
    tested: list[int]
    exactness: str


class AnswerEvent(NamedTuple):
    """A `StreamEvent` as plain data; `prompt_logprobs` begin with the prompt's second token, and each of
    `passes` is a `PassCounts`."""

    request_id: str
    sample: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenEntry] = []  # noqa: RUF012
    figures: SampleCounts | None = None
    error: tuple[str, str, str] | None = None
    prompt_logprobs: list[TokenEntry] = []  # noqa: RUF012
    passes: list[Sequence[int]] = []  # noqa: RUF012


class Stats(NamedTuple):
    """The state of the engine after a step; the last three count since the engine was built."""

    num_running: int
    num_waiting: int
    kv_usage: float
    num_preemptions: int
    num_cache_queries: int
    num_cache_hits: int


IDLE = Stats(0, 0, 0.0, 0, 0, 0)


def pack(message: Message) -> bytes:
    packed: bytes = msgpack.packb(message, unicode_errors="backslashreplace")
    return packed


def unpacker() -> msgpack.Unpacker:
    """Takes bytes (`feed`), and yields whole messages."""
    return msgpack.Unpacker(max_buffer_size=MAX_MESSAGE)


def params_message(params: SamplingParams) -> Message:
    # Not `asdict`, whose copies of every field take ten times as long.
    message = {name: getattr(params, name) for name in params.__dataclass_fields__}
    biases = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    constraint = params.constraint and dataclasses.asdict(params.constraint)
    return message | {"logit_bias": biases, "constraint": constraint}


def error_message(error: UserError) -> Message:
    return {"code": error.code, "message": error.message, "fix": error.fix}


def _logprob(token: TokenLogprob) -> TokenEntry:
    return token.token_id, token.logprob, list(token.top.items())


def event_message(event: StreamEvent) -> Sequence[Any]:
    """A stream event as it is sent: the first fields of `AnswerEvent`, or all."""
    error, done = event.error, event.completion
    if not (done or error or event.logprobs or event.prompt_logprobs or event.passes):
        return event.request_id, event.index, event.token_ids, event.text
    figures = None
    if done is not None:
        figures = SampleCounts(
            finish_reason=done.finish_reason,
            num_prompt_tokens=done.num_prompt_tokens,
            num_tokens=len(done.token_ids),
            num_cached_tokens=done.num_cached_tokens,
            num_forwards=done.num_forwards,
            accepted=list(done.accepted_by_position),
            tested=list(done.tested_by_position),
            exactness=done.exactness,
        )
    return AnswerEvent(
        request_id=event.request_id,
        sample=event.index,
        token_ids=list(event.token_ids),
        text=event.text,
        logprobs=[_logprob(one) for one in event.logprobs],
        figures=figures,
        error=None if error is None else (error.code, error.message, error.fix),
        prompt_logprobs=[_logprob(one) for one in event.prompt_logprobs or () if one is not None],
        passes=list(event.passes),
    )


def read_event(fields: Sequence[Any]) -> AnswerEvent:
    event = AnswerEvent(*fields)
    return event if event.figures is None else event._replace(figures=SampleCounts(*event.figures))


def joined(first: AnswerEvent, second: AnswerEvent) -> AnswerEvent:
    """Two successive events of a sample as one."""
    return second._replace(
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        passes=first.passes + second.passes,
    )


def engine_stats(engine: Engine) -> Stats:
    scheduler, pool = engine.scheduler, engine.pool
    cache = None if pool.cache is None else pool.cache.counts
    return Stats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        kv_usage=1 - pool.num_free / pool.num_pages,
        num_preemptions=scheduler.num_preemptions,
        num_cache_queries=0 if cache is None else cache.num_tokens,
        num_cache_hits=0 if cache is None else cache.num_hit_tokens,
    )
