"""The routes of `idlm-serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from idlm import __version__
from idlm.infer.server.engine_client import Generation
from idlm.infer.server.errors import ApiError, FieldError, from_validation, internal_error, json_response
from idlm.infer.server.guard import Guard, TimedProtocol
from idlm.infer.server.messages import AnswerEvent
from idlm.infer.server.page import add_page
from idlm.infer.server.protocol.requests import ChatRequest, CompletionRequest
from idlm.infer.server.protocol.responses import ResponseRequest
from idlm.infer.server.replies.choices import ChatReply, CompletionReply, Reply
from idlm.infer.server.replies.responses import ResponseReply
from idlm.infer.server.service import Service
from idlm.infer.server.tokens import add_tokenizer

LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""Origins of pages that this machine serves."""
MAX_WARNING = 1000
"""Most characters of the header that lists what is not enforced."""


def create_app(service: Service, *, api_key: str | None) -> ASGIApp:
    """The whole application: the routes and the guard, for pages of allowed origins too."""
    config = service.config
    guarded = Guard(routes(service), config, api_key=api_key, observe=service.metrics.responded)
    # Outside of the guard: a browser's preflight request has no key, and refusals are readable.
    return CORSMiddleware(
        guarded,
        allow_origins=config.allowed_origins or (),
        allow_origin_regex=LOCAL_ORIGIN if config.allowed_origins is None else None,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("retry-after", "warning"),
    )


def routes(service: Service) -> FastAPI:
    """All routes. The pages of documentation are left out: they load scripts from elsewhere."""
    app = FastAPI(title="idlm", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    for kind in (ApiError, RequestValidationError, HTTPException, ClientGoneError, Exception):
        app.add_exception_handler(kind, _answer_error)
    if service.config.page:
        add_page(app)
    _add_generation(app, service)
    _add_responses(app, service)
    _add_descriptions(app, service)
    add_tokenizer(app, service)
    app.add_api_route("/version", lambda: json_response({"version": __version__}))
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        async with connected(request):
            generation = await service.chat(body, request.state.client)
        reply = ChatReply(body, generation, service.shown(body, generation))
        return await _respond(request, reply, generation, streams=bool(body.stream))

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        async with connected(request):
            generation = await service.complete(body, request.state.client)
        reply = CompletionReply(body, generation, service.shown(None, generation))
        return await _respond(request, reply, generation, streams=bool(body.stream))


def _add_responses(app: FastAPI, service: Service) -> None:
    @app.post("/v1/responses")
    async def respond(body: ResponseRequest, request: Request) -> Response:
        store = service.stored(request.state.client)
        body.recall(store)
        chat = body.chat()
        async with connected(request):
            generation = await service.chat(chat, request.state.client)
        generation.notes += body.notes
        reply = ResponseReply(body, chat, generation, service.shown(chat, generation), store)
        return await _respond(request, reply, generation, streams=bool(body.stream))

    @app.get("/v1/responses/{response_id}")
    async def response(response_id: str, request: Request, stream: bool = False) -> Response:
        """A stored response."""
        if stream:
            raise FieldError("stream", "a stored response comes whole; leave out stream")
        stored = service.stored(request.state.client).get(response_id)
        return Response(stored.response, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def forget(response_id: str, request: Request) -> Response:
        """Forget a stored response."""
        service.stored(request.state.client).delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """The conversation that a stored response answers, without instructions."""
        stored = service.stored(request.state.client).get(response_id)
        return json_response(stored.page(after=after, limit=limit, is_reversed=order == "desc"))


def _add_descriptions(app: FastAPI, service: Service) -> None:
    # The page has the first of these paths, if there is one.
    @app.get("/", include_in_schema=False)
    @app.get("/docs")
    async def root() -> Response:
        """The name of the server, and links."""
        paths = [path for path in app.openapi()["paths"] if path != "/docs"]
        about = {"name": "idlm", "version": __version__, "model": service.model_name}
        return json_response({**about, "status": service.status, "routes": paths, "schema": app.openapi_url})

    @app.get("/health")
    async def health() -> Response:
        """Whether the server lives; it lives while it starts an engine again."""
        return json_response({"status": service.status})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether a request would be taken now."""
        status = service.status
        return json_response({"status": status}, status=200 if status == "ready" else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(service, name) for name in service.models]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(_model(service, name))

    # The second name is SGLang's older one, which its router still hands on.
    @app.get("/model_info")
    @app.get("/get_model_info", include_in_schema=False)
    async def model_info() -> Response:
        info = service.info
        return json_response(
            {
                "model_path": service.config.model,
                "tokenizer_path": None if service.tokenizer is None else service.tokenizer.name_or_path,
                "served_model_name": service.model_name,
                "is_generation": True,
                "exactness": info.exactness,
                "decoder": info.decoder,
                "decoder_options": info.decoder_options,
                "accelerators": info.settings["accelerators"],
                "max_model_len": info.max_length,
                "vocab_size": info.vocab_size,
            }
        )

    @app.get("/server_info")
    async def server_info() -> Response:
        return json_response(service.describe())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


def _model(service: Service, name: str) -> dict[str, Any]:
    about = {"id": name, "object": "model", "created": service.start_time, "owned_by": "idlm"}
    size = {"root": service.models[name], "max_model_len": service.info.max_length}
    return {**about, **size, "exactness": service.info.exactness}


async def _respond(request: Request, reply: Reply, generation: Generation, *, streams: bool) -> Response:
    if streams:
        return EventStream(reply, generation, request)
    try:
        async with connected(request):
            return json_response(await reply.collect(), headers=warning_headers(generation))
    finally:
        generation.close()


def warning_headers(generation: Generation) -> dict[str, str]:
    """A header that lists what of the request is not enforced, if anything."""
    notes = "; ".join(generation.notes)[:MAX_WARNING]
    # JSON has no line breaks and only ASCII.
    return {"warning": f"299 idlm {json.dumps(notes)}"} if notes else {}


class EventStream(StreamingResponse):
    """Server-sent events of a generation, which is aborted when the client is gone."""

    def __init__(self, reply: Reply, generation: Generation, request: Request) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **warning_headers(generation)}
        super().__init__(reply.stream(), headers=headers, media_type="text/event-stream")
        self._reply, self._generation, self._request = reply, generation, request
        self._protocol: TimedProtocol = request.state.protocol
        generation.sink = self._write

    def _write(self, index: int, event: AnswerEvent) -> bool:
        """Send an event without a turn of the event loop; False if the client cannot take it now."""
        if self._protocol.flow.write_paused or self._protocol.transport.is_closing():
            return False
        if chunks := self._reply.chunks(index, event):
            self._protocol.write(chunks)
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGoneError):
                async with connected(self._request):
                    await self.stream_response(send)
        finally:
            self._generation.close()


class ClientGoneError(Exception):
    """The client has closed its connection: nothing reads the answer."""


@contextlib.asynccontextmanager
async def connected(request: Request) -> AsyncIterator[None]:
    """What is inside is cancelled when the client is gone; then ClientGoneError is raised."""
    protocol: TimedProtocol = request.state.protocol
    task, is_gone = asyncio.current_task(), False
    assert task is not None

    def end() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    # A large body has paused reading, without which the end of the connection is not seen.
    protocol.flow.resume_reading()
    # Not whether the transport is closing: `on_lost` is called for that connection yet.
    if protocol.cycle.disconnected:
        raise ClientGoneError
    protocol.on_lost = end
    try:
        yield
    except asyncio.CancelledError as error:
        # Another cancellation, that of a server which ends, is raised.
        if not is_gone or task.uncancel():
            raise
        raise ClientGoneError from error
    finally:
        protocol.on_lost = None


async def _answer_error(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            return error.response()
        case RequestValidationError():
            return from_validation(error.errors()).response()
        case HTTPException(status_code=404 | 405 as status):
            what = f"{request.method} {request.url.path[:80]} is not served here; GET /docs lists the routes"
            response = FieldError("path" if status == 404 else "method", what, status=status).response()
            response.headers.update(error.headers or {})
            return response
        case HTTPException():
            return FieldError("body", error.detail, status=error.status_code).response()
        case ClientGoneError():
            return Response(status_code=499)
    return internal_error().response()
