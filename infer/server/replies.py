"""Answers in the shape of OpenAI's interface: whole ones, and chunks of a stream.

Extensions: `usage` also has forward passes, tested and accepted drafts, acceptance and tokens per forward
pass; an answer has its `exactness`, and token ids if the request asks for them.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from idlm import __version__
from idlm.infer.server.engine_client import Generation
from idlm.infer.server.errors import ApiError, dump
from idlm.infer.server.messages import Event, Figures, joined
from idlm.infer.server.protocol import ChatRequest, CompletionRequest
from idlm.text.tokenizer import plain_text, special_token_ids

FLOOR = -9999.0
"""Stands for the logarithm of zero, which JSON cannot hold."""


class TokenTexts:
    """The texts of single tokens; of a checkpoint without a tokenizer, their ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset() if tokenizer is None else special_token_ids(tokenizer)
        self.text = functools.lru_cache(maxsize=1 << 16)(self._text)

    def whole(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt; empty without a tokenizer."""
        return "" if self._tokenizer is None else plain_text(self._tokenizer, token_ids)

    def length(self, token_id: int) -> int:
        """Characters that a token adds to an answer's text, which has no special tokens."""
        if self._tokenizer is None or token_id in self._special:
            return 0
        return len(self.text(token_id))

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else plain_text(self._tokenizer, [token_id])


class Reply:
    """The answer to one request: its id, its choices so far, and its usage."""

    prefix, whole, chunk = "", "", ""

    def __init__(
        self,
        body: ChatRequest | CompletionRequest,
        generation: Generation,
        model_name: str,
        texts: TokenTexts,
    ) -> None:
        self._body, self._generation, self._texts = body, generation, texts
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": f"idlm-{__version__}",
        }
        self._num_tokens: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._figures: dict[int, Figures] = {}

    async def collect(self) -> dict[str, Any]:
        """The whole answer. Raises ApiError if one of its samples fails."""
        done: dict[int, Event] = {}
        async for index, event in self._generation:
            self._count(index, event)
            done[index] = joined(done[index], event) if index in done else event
        choices = [self.choice(index, done[index]) for index in sorted(done)]
        own = {"object": self.whole, "choices": choices, "usage": self.usage()}
        return {**self._head, **own, "exactness": self._figures[0].exactness}

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events: a chunk for each emission, then usage if it is asked for. An error ends it."""
        has_usage = self._body.has_continuous_usage
        try:
            async for index, event in self._generation:
                is_first = index not in self._num_tokens
                self._count(index, event)
                if is_first or event.text or event.logprobs or event.figures:
                    choice = self.delta(index, event, is_first=is_first)
                    yield self._chunk([choice], usage=self.usage() if has_usage else None)
        except ApiError as error:
            yield b"data: " + dump(error.body()) + b"\n\n"
            return
        if self._body.has_final_usage:
            yield self._chunk([], usage=self.usage())
        yield b"data: [DONE]\n\n"

    def usage(self) -> dict[str, Any]:
        """Tokens of all samples so far; passes and drafts of those that are finished."""
        figures, num_tokens = self._figures.values(), sum(self._num_tokens.values())
        prompts, num_samples = self._generation.prompts, self._generation.num_samples
        num_prompt_tokens = sum(map(len, prompts))
        firsts = [self._figures.get(place * num_samples) for place in range(len(prompts))]
        num_forwards = sum(one.num_forwards for one in figures)
        num_tested = sum(sum(one.tested) for one in figures)
        num_accepted = sum(sum(one.accepted) for one in figures)
        num_finished = sum(one.num_tokens for one in figures)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(one.num_cached_tokens for one in firsts if one is not None)
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_tested - num_accepted,
            },
            "num_forwards": num_forwards,
            "tokens_per_forward": num_finished / num_forwards if num_forwards else None,
            "acceptance_rate": num_accepted / num_tested if num_tested else None,
        }

    def choice(self, index: int, event: Event) -> dict[str, Any]:
        """One sample of a whole answer; `event` has all of it."""
        return {"index": index, **self._text(event.text), **self._rest(index, event)}

    def delta(self, index: int, event: Event, *, is_first: bool) -> dict[str, Any]:
        """One sample's part of a chunk."""
        return {"index": index, **self._new_text(event.text, index, is_first), **self._rest(index, event)}

    def _count(self, index: int, event: Event) -> None:
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(event.token_ids)
        if event.figures is not None:
            self._figures[index] = event.figures

    def _chunk(self, choices: list[dict[str, Any]], *, usage: dict[str, Any] | None) -> bytes:
        content = {**self._head, "object": self.chunk, "choices": choices}
        if usage is not None:
            content |= {"usage": usage}
        return b"data: " + dump(content) + b"\n\n"

    def _rest(self, index: int, event: Event) -> dict[str, Any]:
        figures = event.figures
        rest: dict[str, Any] = {
            "logprobs": self._logprobs(index, event) if event.logprobs else None,
            "finish_reason": None if figures is None else figures.finish_reason,
        }
        if figures is not None:
            rest["exactness"] = figures.exactness
        return rest | ({"token_ids": event.token_ids} if self._body.return_token_ids else {})

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _new_text(self, text: str, index: int, is_first: bool) -> dict[str, Any]:
        return self._text(text)

    def _logprobs(self, index: int, event: Event) -> dict[str, Any]:
        """OpenAI's older shape, of completions; offsets go on where the sample's last chunk ended."""
        token_ids = [token_id for token_id, _, _ in event.logprobs]
        lengths = map(self._texts.length, token_ids)
        *offsets, self._offsets[index] = itertools.accumulate(lengths, initial=self._offsets.get(index, 0))
        return {
            "tokens": [self._texts.text(token_id) for token_id in token_ids],
            "token_logprobs": [max(logprob, FLOOR) for _, logprob, _ in event.logprobs],
            "top_logprobs": [
                {self._texts.text(token_id): max(logprob, FLOOR) for token_id, logprob in top}
                for _, _, top in event.logprobs
            ],
            "text_offset": offsets,
        }


class ChatReply(Reply):
    """The answer to a conversation."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _new_text(self, text: str, index: int, is_first: bool) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}

    def _logprobs(self, index: int, event: Event) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(token_id, logprob),
                    "top_logprobs": [self._token(other, value) for other, value in top],
                }
                for token_id, logprob, top in event.logprobs
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._texts.text(token_id)
        return {"token": text, "logprob": max(logprob, FLOOR), "bytes": list(text.encode())}


class CompletionReply(Reply):
    """The answer to one or more prompts; with `echo` their texts precede it."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, event: Event) -> dict[str, Any]:
        """See `Reply`."""
        return super().choice(index, event._replace(text=self._echo(index) + event.text))

    def _new_text(self, text: str, index: int, is_first: bool) -> dict[str, Any]:
        return {"text": self._echo(index) + text if is_first else text}

    def _echo(self, index: int) -> str:
        if not (isinstance(self._body, CompletionRequest) and self._body.echo):
            return ""
        prompt = self._body.prompts[index // self._generation.num_samples]
        return prompt if isinstance(prompt, str) else self._texts.whole(prompt)
