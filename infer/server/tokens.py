"""Routes of the tokenizer as vLLM has them, which lm-eval's remote tokenizer reads: text to ids and back."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from idlm.infer.server.errors import ENCODER, FieldError, json_response
from idlm.infer.server.protocol.body import OF_REQUESTS, Body, Unicode
from idlm.infer.server.protocol.requests import ChatRequest, Messages, TokenIds
from idlm.infer.server.service import Service
from idlm.text.detokenizer import Detokenizer
from idlm.text.tokenizer import encode_bare, encode_text


class TokenizeRequest(ChatRequest):
    """POST /tokenize: a text of any length, whose ids begin with bos unless `add_special_tokens` is false; or
    a conversation as of a chat."""

    messages: Messages | None = None  # type: ignore[assignment]
    prompt: Unicode | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    def check(self, location: str = "") -> None:
        """Also fields that exclude each other."""
        super().check(location)
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        wrong = "tools" if self.messages is None else "add_special_tokens"
        if getattr(self, wrong):
            raise FieldError(wrong, "not with prompt" if wrong == "tools" else "not with messages")


class DetokenizeRequest(Body):
    IGNORED = OF_REQUESTS
    model: str | None = None
    tokens: TokenIds


def _text_of(tokenizer: Any, token_ids: TokenIds) -> str:
    """The text of ids, token by token: `decode` holds the interpreter's lock until it has all of them."""
    detokenizer = Detokenizer(tokenizer, shows_hidden=True)
    return detokenizer.push(token_ids) + detokenizer.flush()


def add_tokenizer(app: FastAPI, service: Service) -> None:
    async def result(work: Callable[[Any, Any], Any], given: Any, request: Request) -> Any:
        """What `work` makes of the tokenizer and a value, in a thread of the tokenizer."""
        call = functools.partial(lambda tokenizer, value, max_tokens: work(tokenizer, value))
        return (await service.encode(call, [given], 1, request.state.client))[0]

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        with service.checked(body, "messages"):
            service.check_ready()
            if body.prompt is None:
                opens = body.add_generation_prompt is not False
                token_ids, _ = await service.encode_chat(body, 1, request.state.client, open_turn=opens)
            elif body.add_special_tokens is False:
                token_ids = await result(encode_text, body.prompt, request)
            else:
                [token_ids] = await result(encode_bare, [body.prompt], request)

        def written() -> str:
            texts = [*map(service.token_texts.text, token_ids)] if body.return_token_strs else None
            about = {"count": len(token_ids), "max_model_len": service.info.max_length}
            # Not `encode`, which holds the interpreter's lock until all is written.
            return "".join(ENCODER.iterencode({**about, "tokens": token_ids, "token_strs": texts}))

        return Response(await asyncio.to_thread(written), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        body.check()
        service.check_model(body.model)
        service.check_ready()
        if max(body.tokens, default=0) >= service.info.vocab_size:
            raise FieldError("tokens", f"the model has {service.info.vocab_size} ids")
        return json_response({"prompt": await result(_text_of, body.tokens, request)})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Special tokens and chat template; null without a tokenizer."""
        one = service.tokenizer
        return json_response(one and {**one.special_tokens_map, "chat_template": one.chat_template})
