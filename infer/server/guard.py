"""What every request passes before it reaches a route: the API key, and limits on its headers and body, which
is read whole. The HTTP parser limits only headers that are incomplete (`run.py`)."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import sys
import time
import weakref
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import CLOSE_HEADER, STATUS_PHRASES, H11Protocol

from idlm.infer.server.config import ServeConfig
from idlm.infer.server.errors import ApiError, FieldError
from idlm.infer.server.page import FILES
from idlm.log import get_logger

LOG = get_logger(__name__)
SLASHES = re.compile("/+")
OPEN_PATHS = frozenset(("/health", "/ready"))
HEADER_SECONDS, BODY_SECONDS, READ_SECONDS = 30.0, 30.0, 60.0
"""How long a client may take to send its headers and its body, and to read anything of an answer."""


def keys_of(api_key: str | None) -> list[str]:
    """The keys in a list with commas; none: every request is taken."""
    return [key for one in (api_key or "").split(",") if (key := one.strip())]


def is_safe_host(host: str, allowed: Collection[str]) -> bool:
    """Whether a Host header is an address, a name of this machine, or allowed. Any other name may be that of
    a web page whose owner lets it resolve to this machine: browsers call that the page's own origin."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        return name == "localhost" or name in allowed or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class Guard:
    """ASGI middleware. `observe` gets the status of every response."""

    def __init__(
        self, app: ASGIApp, config: ServeConfig, *, api_key: str | None, observe: Callable[[int], None]
    ) -> None:
        self._app, self._observe, self._logs = app, observe, config.log_requests
        self._max_body, self._max_header = config.max_body, config.max_header
        self.public = OPEN_PATHS.union(FILES if config.page else ())
        self._keys = [f"Bearer {key}".encode() for key in keys_of(api_key)]
        given = config.allowed_hosts
        hosts = (["*"] if self._keys else []) if given is None else given
        self._hosts = None if "*" in hosts else frozenset(map(str.lower, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            start, statuses = time.perf_counter(), list[int]()

            async def observed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                    self._observe(message["status"])
                await send(message)

            try:
                await self._guard(scope, receive, observed)
            finally:
                if self._logs:
                    host, path = (scope["client"] or ("?",))[0], scope["raw_path"].decode("ascii", "replace")
                    outcome = (*statuses, "no answer")[0]
                    seconds = time.perf_counter() - start
                    LOG.info("%s %s %s: %s in %.2f s", host, scope["method"], path, outcome, seconds)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_headers(scope)
            scope.setdefault("state", {})["client"] = self._client(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return
        is_read = False

        async def replay() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        # Clients join an address that ends in a slash and a path that begins with one. A HEAD is a GET whose
        # body stays here: uvicorn sends none.
        path, method = SLASHES.sub("/", scope["path"]).rstrip("/") or "/", scope["method"]
        changed = {"path": path, "method": "GET" if method == "HEAD" else method}
        await self._app({**scope, **changed}, replay, send)

    def _check_headers(self, scope: Scope) -> None:
        line = len(scope["raw_path"]) + len(scope["query_string"])
        if line + sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_header:
            rule = f"line and headers are larger than {self._max_header} bytes, the most allowed"
            raise FieldError("header", rule, status=431)
        host = next((value for name, value in scope["headers"] if name == b"host"), None)
        if self._hosts is None or host is None or scope["path"] in OPEN_PATHS:
            return
        if not is_safe_host(text := host.decode("latin-1"), self._hosts):
            rule = f"the server is not known as {text[:80]!r}; call it by its address or by "
            rule += "localhost, or start it with allowed_hosts=[NAME] or with an API key"
            raise FieldError("host", rule, status=403, code="host_not_allowed")

    def _client(self, scope: Scope) -> str:
        """Who sends a request: its key, by number, or its address. Raises ApiError 401 without a key."""
        if not self._keys or scope["path"] in self.public:
            return f"address {scope['client'][0]}" if scope["client"] else ""
        # The name of the scheme has no case.
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        given = [value[:7].title() + value[7:] for value in headers]
        # In constant time: the time of a refusal is independent of the keys. A router that has a key
        # sends its own header besides the client's.
        found = [[hmac.compare_digest(value, key) for key in self._keys] for value in given]
        if not given or not all(map(any, found)):
            rule = "a header 'Authorization: Bearer KEY' with the server's key is required"
            raise FieldError("authorization", rule, status=401, code="invalid_api_key")
        return f"key {found[0].index(True)}"

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client is gone. Raises ApiError 413 or 408."""
        for name, value in scope["headers"]:
            if name == b"content-encoding" and value.lower() != b"identity":
                raise FieldError("content-encoding", "send the body as it is, uncompressed", status=415)
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._max_body:
                raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._max_body:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            rule = f"it did not arrive within {BODY_SECONDS:.0f} s"
            raise FieldError("body", rule, status=408) from error

    def _too_large(self) -> ApiError:
        return FieldError("body", f"larger than {self._max_body} bytes, the most allowed", status=413)


class TimedProtocol(H11Protocol):
    """Closes a connection whose request line and headers take longer than `HEADER_SECONDS`, or whose client
    reads nothing for `READ_SECONDS`, and refuses what is no HTTP in the shape of other errors."""

    on_lost: Callable[[], object] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Every request's scope gets a copy of it. A strong reference would hold the connection, with its last
        # request, until the next garbage collection.
        self.app_state = {**self.app_state, "protocol": weakref.proxy(self)}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()
        for timer in ("header", "reading"):
            self._stop(timer)

    def write(self, data: bytes) -> None:
        """Send a part of a begun body of unknown length as h11 would, which takes longer to do so."""
        is_chunked = self.scope["http_version"] >= "1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    def pause_writing(self) -> None:
        """More is to be sent than the client reads."""
        super().pause_writing()
        # Not `close`, which waits until all is sent.
        self._timers["reading"] = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("reading")

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 cannot read, whose exception has the rule; then close the connection."""
        error, param = sys.exception(), "header" if self._is_waiting() else "body"
        status = 431 if getattr(error, "error_status_hint", None) == 431 else 400
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = FieldError(param, str(error), status=status).response()
            headers, reason = [*answer.raw_headers, CLOSE_HEADER], STATUS_PHRASES[status]
            start = h11.Response(status_code=status, headers=headers, reason=reason)
            for event in (start, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        if not self._is_waiting():
            self._stop("header")
        elif "header" not in self._timers:
            self._timers["header"] = self.loop.call_later(HEADER_SECONDS, self._expire)

    def _is_waiting(self) -> bool:
        """Whether no request has come whole that is not answered yet."""
        return self.cycle is None or self.cycle.response_complete

    def _expire(self) -> None:
        del self._timers["header"]
        if self._is_waiting():
            self.transport.close()

    def _stop(self, timer: str) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()
