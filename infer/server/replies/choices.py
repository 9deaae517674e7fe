"""Answers in the shape of OpenAI's interface: whole ones, and chunks of a stream. Extensions: forward passes,
drafts, acceptance and tokens per forward pass in `usage`, `exactness`, and token ids if they are
requested."""

from __future__ import annotations

import functools
import itertools
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from idlm import __version__
from idlm.infer.server.engine_client import Generation
from idlm.infer.server.errors import ApiError, dump
from idlm.infer.server.messages import AnswerEvent, SampleCounts, TokenEntry, joined
from idlm.infer.server.parsers import AnswerParser, ParsedPart
from idlm.infer.server.protocol.requests import ChatRequest, CompletionRequest, StreamOptions
from idlm.text.detokenizer import answer_text
from idlm.text.token_bytes import TokenBytes, TokenOffsets, prompt_offsets, space_between
from idlm.text.tokenizer import plain_text

PASS_FIELDS = ("tokens", "accepted", "tested")
FLOOR = -9999.0
"""Stands for the logarithm of zero, which JSON cannot hold."""


def _finite(logprob: float | None) -> float | None:
    """A log-probability as JSON can hold it; the first token of a prompt has none."""
    return None if logprob is None else max(logprob, FLOOR)


class TokenTexts:
    """The texts of single tokens; of a checkpoint without a tokenizer, their ids."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._bytes = None if tokenizer is None else TokenBytes(tokenizer)
        self.text_and_bytes = functools.lru_cache(maxsize=1 << 16)(self._text_and_bytes)

    def whole(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt; empty without a tokenizer."""
        return "" if self.tokenizer is None else plain_text(self.tokenizer, token_ids)

    def text(self, token_id: int) -> str:
        return self.text_and_bytes(token_id)[0]

    def beginning(self, token_id: int) -> tuple[str, list[int]]:
        """Text and bytes of a token that begins a text, where decoders may drop its space."""
        text, encoded = self.text_and_bytes(token_id)
        is_dropped = self.tokenizer is not None and f" {answer_text(self.tokenizer, [token_id])}" == text
        return (text[1:], encoded[1:]) if is_dropped else (text, encoded)

    def by_text(self, logprobs: Mapping[int, float]) -> dict[str, float | None]:
        """Log-probabilities by the texts of tokens; of equal texts, the later ones are named by their ids."""
        named: dict[str, float | None] = {}
        for token_id, logprob in logprobs.items():
            text = self.text(token_id)
            named[f"token_id:{token_id}" if text in named else text] = _finite(logprob)
        return named

    def _text_and_bytes(self, token_id: int) -> tuple[str, list[int]]:
        """The text of a token; of one that is no whole characters, its bytes as OpenAI writes them."""
        encoded = f"token_id:{token_id}".encode() if self._bytes is None else self._bytes(token_id)
        try:
            return encoded.decode(), list(encoded)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded), list(encoded)


class Shown(NamedTuple):
    """What an answer has besides its events; `new_parser` makes the parser of one sample of a chat."""

    model_name: str
    texts: TokenTexts
    new_parser: Callable[[], AnswerParser] = AnswerParser


class Reply(ABC):
    prefix, whole, chunk = "", "", ""

    def __init__(self, body: ChatRequest | CompletionRequest, generation: Generation, shown: Shown) -> None:
        self._generation, self._texts, self._named = generation, shown.texts, body.named
        options = body.stream_options or StreamOptions()
        self._has_usage, self._has_final_usage = options.continuous_usage_stats, options.include_usage
        self._has_token_ids, self._num_top = bool(body.return_token_ids), body.prompt_logprobs
        self._has_passes = body.has_passes
        made = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time())}
        self._head = {**made, "model": shown.model_name, "system_fingerprint": f"idlm-{__version__}"}
        # All chunks begin alike; encoding that anew would take longer than what differs.
        self._chunk_head = b"data: " + dump({**self._head, "object": self.chunk})[:-1] + b',"choices":'
        self._num_tokens: dict[int, int] = {}
        self._figures: dict[int, SampleCounts] = {}
        self._parsers = defaultdict[int, AnswerParser](shown.new_parser)
        self._begun = set[int]()
        """Samples of which a token has come."""
        self._prompt_logprobs: dict[int, list[TokenEntry]] = {}
        """By prompt; its first sample brings them."""

    async def collect(self) -> dict[str, Any]:
        """The whole answer. Raises ApiError if one of its samples fails."""
        done: dict[int, AnswerEvent] = {}
        try:
            async for index, event in self._generation:
                self._count(index, event)
                done[index] = joined(done[index], event) if index in done else event
        except ApiError as error:
            raise self._named(error) from error
        return self.answer({index: done[index] for index in sorted(done)})

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events: a chunk for each emission, then usage if it is requested. An error ends it."""
        try:
            yield self.head()
            async for index, event in self._generation:
                yield self.chunks(index, event)
        except ApiError as error:
            yield self.failure(self._named(error))
            return
        yield self.tail()

    def answer(self, done: Mapping[int, AnswerEvent]) -> dict[str, Any]:
        """The whole answer of events that have all of their sample."""
        choices = [self.choice(index, event) for index, event in done.items()]
        own = {"object": self.whole, "choices": choices, "usage": self.usage()}
        return {**self._head, **own, **self._extras(), "exactness": self._figures[0].exactness}

    def head(self) -> bytes:
        """How a stream begins."""
        return b""

    def tail(self) -> bytes:
        """How a stream ends."""
        usage = self._chunk([], usage=self.usage()) if self._has_final_usage else b""
        return usage + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """How a stream ends that fails."""
        return b"data: " + dump(error.body()) + b"\n\n"

    def chunks(self, index: int, event: AnswerEvent) -> bytes:
        """The next part of a stream; empty if the event has no part yet."""
        is_first = index not in self._num_tokens
        self._count(index, event)
        choices = self.deltas(index, event, is_first=is_first)
        usage = self.usage() if self._has_usage else None
        return b"".join([self._chunk([choice], usage=usage) for choice in choices])

    def usage(self) -> dict[str, Any]:
        """Tokens of all samples so far; passes and drafts of those that are finished."""
        figures, num_tokens = self._figures.values(), sum(self._num_tokens.values())
        num_prompt_tokens = sum(map(len, self._generation.prompts))
        is_first = [index % self._generation.num_samples == 0 for index in self._figures]
        num_cached = sum(one.num_cached_tokens for one in itertools.compress(figures, is_first))
        num_forwards = sum(one.num_forwards for one in figures)
        num_tested = sum(sum(one.tested) for one in figures)
        num_accepted = sum(sum(one.accepted) for one in figures)
        num_finished = sum(one.num_tokens for one in figures)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(one.num_reasoning_tokens for one in self._parsers.values()),
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_tested - num_accepted,
            },
            "num_forwards": num_forwards,
            "tokens_per_forward": num_finished / num_forwards if num_forwards else None,
            "acceptance_rate": num_accepted / num_tested if num_tested else None,
        }

    @abstractmethod
    def choice(self, index: int, event: AnswerEvent) -> dict[str, Any]:
        """One sample of a whole answer; `event` has all of it."""

    @abstractmethod
    def deltas(self, index: int, event: AnswerEvent, *, is_first: bool) -> list[dict[str, Any]]:
        """One sample's parts of the next chunks; none if the event has no part yet."""

    @abstractmethod
    def _logprobs(self, index: int, event: AnswerEvent) -> dict[str, Any]:
        pass

    def _extras(self) -> dict[str, Any]:
        return {}

    def _count(self, index: int, event: AnswerEvent) -> None:
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(event.token_ids)
        if event.prompt_logprobs:
            self._prompt_logprobs[index // self._generation.num_samples] = event.prompt_logprobs
        if event.figures is not None:
            self._figures[index] = event.figures

    def _chunk(self, choices: list[dict[str, Any]], *, usage: dict[str, Any] | None) -> bytes:
        end = b"}\n\n" if usage is None else b',"usage":' + dump(usage) + b"}\n\n"
        return self._chunk_head + dump(choices) + end

    def _has_news(self, event: AnswerEvent) -> bool:
        has_ids = self._has_token_ids and event.token_ids
        return bool(event.logprobs or event.figures or event.passes or has_ids)

    def _rest(self, index: int, event: AnswerEvent) -> dict[str, Any]:
        figures = event.figures
        rest: dict[str, Any] = {
            "logprobs": self._logprobs(index, event) if event.logprobs else None,
            "finish_reason": None if figures is None else figures.finish_reason,
        }
        if figures is not None:
            rest["exactness"] = figures.exactness
        if self._has_passes:
            rest["passes"] = [dict(zip(PASS_FIELDS, each, strict=True)) for each in event.passes]
        return rest | ({"token_ids": event.token_ids} if self._has_token_ids else {})

    def _by_token_id(self, index: int) -> list[dict[str, Any] | None]:
        """Log-probabilities of the tokens of a sample's prompt in vLLM's shape; the first token has none."""
        entries: list[dict[str, Any] | None] = [None]
        for token_id, logprob, top in self._prompt_logprobs.get(index // self._generation.num_samples, ()):
            ranks = {other: rank for rank, (other, _) in enumerate(top, start=1)}
            values = {token_id: logprob} | dict(top[: self._num_top])
            entry = {}
            for other, value in values.items():
                scored = {"logprob": _finite(value), "rank": ranks.get(other)}
                entry[str(other)] = {**scored, "decoded_token": self._texts.text(other)}
            entries.append(entry)
        return entries


class ChatReply(Reply):
    """The answer to a conversation."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, generation: Generation, shown: Shown) -> None:
        super().__init__(body, generation, shown)
        self._num_calls = Counter[int]()

    def choice(self, index: int, event: AnswerEvent) -> dict[str, Any]:
        parser = self._parsers[index]
        pieces = parser.read(event)
        content = "".join(piece.text for piece in pieces if piece.kind == "content")
        reasoning = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
        calls = [self._call(index, piece) for piece in pieces if piece.kind == "call"]
        text = content or (None if calls or reasoning else "")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if parser.thinks:
            message["reasoning_content"] = reasoning or None
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, **self._rest(index, event)}

    def deltas(self, index: int, event: AnswerEvent, *, is_first: bool) -> list[dict[str, Any]]:
        pieces = self._parsers[index].read(event)
        deltas = [delta for piece in pieces for delta in self._deltas_of(index, piece)]
        if not deltas and (is_first or self._has_news(event)):
            deltas = [{"content": ""}]
        if is_first:
            deltas[0] = {"role": "assistant"} | deltas[0]
        # What is more than text comes with the last part.
        text = event._replace(token_ids=[], logprobs=[], figures=None, passes=[])
        events = [*[text] * (len(deltas) - 1), event]
        return [
            {"index": index, "delta": delta, **self._rest(index, each)}
            for delta, each in zip(deltas, events, strict=False)
        ]

    def _deltas_of(self, index: int, piece: ParsedPart) -> list[dict[str, Any]]:
        """The name of a call comes before its arguments."""
        if piece.kind != "call":
            return [{"content" if piece.kind == "content" else "reasoning_content": piece.text}]
        at, call = self._num_calls[index], self._call(index, piece)
        named = {**call, "index": at, "function": {"name": piece.name, "arguments": ""}}
        arguments = {"index": at, "function": {"arguments": piece.text}}
        return [{"tool_calls": [named]}, {"tool_calls": [arguments]}]

    def _call(self, index: int, piece: ParsedPart) -> dict[str, Any]:
        self._num_calls[index] += 1
        function = {"name": piece.name, "arguments": piece.text}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}

    def _extras(self) -> dict[str, Any]:
        return {} if self._num_top is None else {"prompt_logprobs": self._by_token_id(0)}

    def _rest(self, index: int, event: AnswerEvent) -> dict[str, Any]:
        rest = super()._rest(index, event)
        calls = rest["finish_reason"] == "stop" and self._num_calls[index] > 0
        return rest | ({"finish_reason": "tool_calls"} if calls else {})

    def _logprobs(self, index: int, event: AnswerEvent) -> dict[str, Any]:
        content = []
        for token_id, logprob, top in event.logprobs:
            text_of = self._texts.text_and_bytes if index in self._begun else self._texts.beginning
            self._begun.add(index)
            scored = [(*text_of(one), _finite(value)) for one, value in [(token_id, logprob), *top]]
            drawn, *others = [dict(zip(("token", "bytes", "logprob"), each, strict=True)) for each in scored]
            content.append({**drawn, "top_logprobs": others})
        return {"content": content, "refusal": None}


class CompletionReply(Reply):
    """The answer to one or more prompts; with `echo` their texts, and log-probabilities, precede it."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, generation: Generation, shown: Shown) -> None:
        super().__init__(body, generation, shown)
        self._body = body
        self._positions, self._prompt_offsets = dict[int, TokenOffsets](), dict[int, list[int]]()
        self._num_chars = Counter[int]()

    def _last(self, index: int) -> list[int]:
        """The last token of a sample's prompt, which the answer continues."""
        return self._generation.prompts[index // self._generation.num_samples][-1:]

    def choice(self, index: int, event: AnswerEvent) -> dict[str, Any]:
        [choice] = self.deltas(index, event, is_first=True)
        return choice | ({} if self._num_top is None else {"prompt_logprobs": self._by_token_id(index)})

    def deltas(self, index: int, event: AnswerEvent, *, is_first: bool) -> list[dict[str, Any]]:
        if event.token_ids and index not in self._begun and self._texts.tokenizer is not None:
            self._begun.add(index)
            space = space_between(self._texts.tokenizer, self._last(index), event.token_ids[:1])
            event = event._replace(text=space + event.text)
        if is_first and self._body.echo:
            event = self._echoed(index, event)
        self._num_chars[index] += len(event.text)
        if not (is_first or event.text or self._has_news(event)):
            return []
        return [{"index": index, "text": event.text, **self._rest(index, event)}]

    def _echoed(self, index: int, event: AnswerEvent) -> AnswerEvent:
        """The event with the prompt before it; its first token has no log-probability."""
        at = index // self._generation.num_samples
        prompt, token_ids = self._body.prompts[at], self._generation.prompts[at]
        text, logprobs = prompt if isinstance(prompt, str) else self._texts.whole(prompt), event.logprobs
        if self._body.logprobs is not None:
            scored = self._prompt_logprobs.get(at, ())
            own = [(token_id, logprob, top[: self._body.logprobs]) for token_id, logprob, top in scored]
            logprobs = [(token_ids[0], None, []), *own, *logprobs]
            self._prompt_offsets[index] = prompt_offsets(self._texts.tokenizer, prompt, token_ids)
            self._positions[index] = self._offsets_of(index, start=len(text))
        return event._replace(text=text + event.text, logprobs=logprobs)

    def _offsets_of(self, index: int, *, start: int = 0) -> TokenOffsets:
        return TokenOffsets(self._texts.tokenizer, start=start, after=self._last(index))

    def _logprobs(self, index: int, event: AnswerEvent) -> dict[str, Any]:
        """OpenAI's older shape; the alternatives of a token include it."""
        token_ids = [token_id for token_id, _, _ in event.logprobs]
        return {
            "tokens": [self._texts.text(token_id) for token_id in token_ids],
            "token_logprobs": [_finite(logprob) for _, logprob, _ in event.logprobs],
            "top_logprobs": [
                None if logprob is None else self._texts.by_text({token_id: logprob, **dict(top)})
                for token_id, logprob, top in event.logprobs
            ],
            "text_offset": self._offsets(index, token_ids, is_last=event.figures is not None),
        }

    def _offsets(self, index: int, token_ids: Sequence[int], *, is_last: bool) -> list[int]:
        """Where the tokens of a chunk begin in the sample's text; tokens of a stop string are at its end."""
        before = self._prompt_offsets.pop(index, [])
        if index not in self._positions:
            self._positions[index] = self._offsets_of(index)
        offsets = [*before, *self._positions[index].push(token_ids[len(before) :])]
        return [min(at, self._num_chars[index]) for at in offsets] if is_last else offsets
