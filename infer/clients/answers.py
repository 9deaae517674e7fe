"""Where `idlm-chat` gets its answers from: an engine of this process, or a server.

Both yield a `Chunk` for each forward pass that emits tokens."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import engine_name, require_tokenizer
from idlm.infer.cli.prompts import check_system
from idlm.text.tokenizer import encode_messages

if TYPE_CHECKING:
    from idlm.infer.clients.http import Server
    from idlm.infer.engine import Engine

Messages = list[dict[str, str]]


class Chunk(NamedTuple):
    """What one pass emitted, and the answer so far: its forward passes, and its drafts. A server says the
    last three at the end of an answer only, and counts tokens per piece if it is one that does; None is
    unknown."""

    text: str
    num_tokens: int | None = None
    num_forwards: int | None = None
    num_accepted: int | None = None
    num_tested: int | None = None


class EngineAnswerer:
    """An engine of this process. Raises UserError IDLM-0215 without a chat template."""

    def __init__(self, engine: Engine) -> None:
        require_tokenizer(engine.tokenizer, "a chat")
        if not engine.tokenizer.chat_template:
            raise UserError(
                "IDLM-0215",
                "a chat needs a chat template, and the checkpoint's tokenizer has none",
                fix="add chat_template to tokenizer_config.json, or complete text with idlm-generate -p",
            )
        self._engine, self.name = engine, f"{engine_name(engine)}, {engine.exactness}"

    def check_system(self, system: str | None) -> None:
        """Raise UserError IDLM-0458 for a system prompt that the chat template cannot honour."""
        check_system(self._engine.tokenizer, system)

    def answer(self, messages: Messages, params: SamplingParams, always: Collection[str]) -> Generator[Chunk]:
        """Stream the next turn. `always`: settings that hold even if they are the defaults. Raises UserError;
        KeyboardInterrupt after Ctrl-C, when the request has ended: it waits for the end of a pass, and the
        engine goes on afterwards. Closing it aborts."""
        engine = self._engine
        prompt = encode_messages(engine.tokenizer, messages, max_tokens=engine.settings.max_length)
        with closing(engine.stream(prompt, params)) as events:
            for event in events:
                accepted, tested = engine.draft_counts(event.request_id)
                done, num_forwards = event.completion, None
                if done is not None:
                    accepted, tested = sum(done.accepted_by_position), sum(done.tested_by_position)
                    num_forwards = done.num_forwards
                yield Chunk(event.text, len(event.token_ids), num_forwards, accepted, tested)
                if event.error is not None:
                    raise event.error


class ServerAnswerer:
    def __init__(self, server: Server) -> None:
        self._server, self.name = server, f"{server.model} at {server.address}"

    def check_system(self, system: str | None) -> None:
        """Do nothing: the server refuses it with the turn."""

    def answer(self, messages: Messages, params: SamplingParams, always: Collection[str]) -> Generator[Chunk]:
        """See `EngineAnswerer`. Raises UserError IDLM-0709 for what the server refuses."""
        import httpx

        from idlm.infer.clients.http import RequestFailure, deltas, draft_counts, no_answer

        body, num_tokens, is_empty = self._server.chat_body(messages, params, always), 0, True
        try:
            with closing(self._server.stream("/chat/completions", body)) as chunks:
                for chunk in chunks:
                    usage = chunk.get("usage") or {}
                    text = "".join(delta.get("content") or "" for delta in deltas(chunk))
                    total = usage.get("completion_tokens")
                    is_empty = is_empty and not text
                    if text or total is not None:
                        yield Chunk(text, None if total is None else total - num_tokens, *draft_counts(usage))
                        num_tokens = num_tokens if total is None else total
        except (RequestFailure, httpx.HTTPError, LookupError, TypeError) as error:
            raise no_answer(error) from error
        if is_empty and num_tokens > 1:
            raise no_answer(LookupError("the answer is reasoning alone: raise max_tokens"))


Answerer = EngineAnswerer | ServerAnswerer
