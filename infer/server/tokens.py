"""Routes of the tokenizer as vLLM has them, which lm-eval's remote tokenizer reads: text to ids and back."""

from __future__ import annotations

import functools
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from idlm.infer.server.errors import FieldError, engine_unavailable, json_response
from idlm.infer.server.protocol.body import Body, Unicode
from idlm.infer.server.protocol.requests import TokenIds
from idlm.infer.server.service import Service
from idlm.text.tokenizer import encode_bare, encode_text, plain_text


class TokenizeRequest(Body):
    """POST /tokenize: a text of any length; its ids begin with bos, unless `add_special_tokens` is false."""

    model: str | None = None
    prompt: Unicode
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


def add_tokenizer(app: FastAPI, service: Service) -> None:
    async def result(body: Any, request: Request, work: Any, *given: Any) -> Any:
        """What `work` makes of the tokenizer and a value, in a thread of the tokenizer."""
        body.check()
        service.check_model(body.model)
        if service.status != "ready":
            raise engine_unavailable(f"the engine is {service.status}")
        call = functools.partial(lambda tokenizer, value, max_tokens: work(tokenizer, value))
        return (await service.encode(call, given, 1, request.state.client))[0]

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        if body.add_special_tokens is False:
            token_ids = await result(body, request, encode_text, body.prompt)
        else:
            [token_ids] = await result(body, request, encode_bare, [body.prompt])
        texts = [service.token_texts.text(one) for one in token_ids] if body.return_token_strs else None
        about = {"count": len(token_ids), "max_model_len": service.info.max_length}
        return json_response({**about, "tokens": token_ids, "token_strs": texts})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        if max(body.tokens, default=0) >= service.info.vocab_size:
            raise FieldError("tokens", f"the model has {service.info.vocab_size} ids")
        return json_response({"prompt": await result(body, request, plain_text, body.tokens)})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Special tokens and chat template; null without a tokenizer."""
        one = service.tokenizer
        return json_response(one and {**one.special_tokens_map, "chat_template": one.chat_template})
