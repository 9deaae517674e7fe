"""Runs the front end: a listening socket, the HTTP server, and its end. The first SIGTERM or Ctrl-C drains
(new requests are refused, those under way finish); the second one ends them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import time
from types import FrameType

import uvicorn

from idlm.errors import UserError
from idlm.infer.cli.config import KEY_VARIABLE, EngineArguments
from idlm.infer.server.app import create_app
from idlm.infer.server.config import ServeConfig
from idlm.infer.server.engine_client import EngineClient
from idlm.infer.server.guard import TimedProtocol, keys_of
from idlm.infer.server.metrics import Metrics
from idlm.infer.server.service import Service
from idlm.log import get_logger

BACKLOG = 2048
KEEP_ALIVE_SECONDS, CLOSE_SECONDS = 15, 2
READY_POLL_SECONDS = 0.1
LOG = get_logger(__name__)


def run_server(config: ServeConfig, arguments: EngineArguments) -> None:
    """Serve until a signal ends it. Raises UserError if the address or the model cannot be used."""
    api_key = config.api_key or os.environ.get(KEY_VARIABLE) or None
    check_address(config.host, api_key)
    with listen(config.host, config.port) as listener:
        asyncio.run(FrontEnd(config, arguments, api_key=api_key).run_on(listener))


class FrontEnd(uvicorn.Server):
    """The HTTP server of one model. It finishes requests before it stops listening."""

    def __init__(
        self, config: ServeConfig, arguments: EngineArguments, *, api_key: str | None = None
    ) -> None:
        assert config.model is not None
        metrics = Metrics(config.model_name)
        client = EngineClient(arguments, metrics, timeout=config.engine_timeout)
        self.service = Service(config, client, metrics, config.model_name)
        self.service.num_keys = len(keys_of(api_key))
        super().__init__(
            uvicorn.Config(
                create_app(self.service, api_key=api_key),
                http=TimedProtocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                h11_max_incomplete_event_size=config.max_header,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )

    async def run_on(self, listener: socket.socket) -> None:
        """Serve on a bound socket. Raises UserError if the model cannot be loaded."""
        self.loop = asyncio.get_running_loop()
        form = "http://[{}]:{}" if listener.family == socket.AF_INET6 else "http://{}:{}"
        address = form.format(*listener.getsockname())
        LOG.info("%s is served at %s when its engine is ready", self.service.model_name, address)
        engine, ready = asyncio.create_task(self.service.run()), asyncio.create_task(self._announce(address))
        # An engine that cannot be built ends the server.
        engine.add_done_callback(lambda _: self.stop())
        try:
            await self.serve(sockets=[listener])
        finally:
            ready.cancel()
            await self.service.close()
            try:
                await engine
            except ExceptionGroup as group:
                raise group.exceptions[0] from None

    async def _announce(self, address: str) -> None:
        start = time.monotonic()
        while self.service.status != "ready":
            await asyncio.sleep(READY_POLL_SECONDS)
        info, seconds = self.service.info, time.monotonic() - start
        what = f"decoder {info.decoder}, stride {info.stride}, context {info.max_length}"
        LOG.info("ready after %.0f s: %s, %s", seconds, what, address)

    def stop(self) -> None:
        self.should_exit = self.force_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second one."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def main_loop(self) -> None:
        await super().main_loop()
        if not self.force_exit:
            LOG.info("draining: requests under way finish, new ones are refused")
            await self.service.drain(is_hurried=lambda: self.force_exit)
        # Requests that are left fail, which ends their connections.
        await self.service.close()


def check_address(host: str, api_key: str | None) -> None:
    """Raise UserError IDLM-0702 for an address that other machines reach without an API key."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost" and not keys_of(api_key):
        raise UserError(
            "IDLM-0702",
            f"host={host} can be reached from other machines, and there is no API key",
            fix=f"set the environment variable {KEY_VARIABLE}, or leave host= out to serve this machine only",
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound; port 0 takes a free one. Raises UserError IDLM-0703."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise UserError(
            "IDLM-0703", f"cannot listen on {host}:{port}: {error}", fix="choose another host= or port="
        ) from error
    return listener
