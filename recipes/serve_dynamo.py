"""A worker of NVIDIA Dynamo: Dynamo's front end speaks HTTP, renders chats, parses tools and reasoning, and
routes; this file answers token ids with our engine. Dynamo's interface for such backends is beta; tested with
ai-dynamo 1.6.1.

    python recipes/serve_dynamo.py model=PATH served_model_name=mine        (one for each GPU)
    python -m dynamo.frontend --discovery-backend file --request-plane tcp --event-plane zmq --http-port 8000

With `discovery=file` workers and front end discover each other in the folder DYN_FILE_KV of one machine,
without etcd or NATS. Options are those of the engine, `sampling.*` (the defaults of requests) and those of
`DynamoConfig`. A request has one answer (n=1): Dynamo ends a stream at its first finish reason."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from idlm.cli import command
from idlm.config.schema import option
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments, read_arguments
from idlm.infer.server.engine_client import EngineClient, Generation
from idlm.infer.server.errors import ApiError, FieldError, from_user_error, from_validation
from idlm.infer.server.messages import AnswerEvent, EngineInfo
from idlm.infer.server.metrics import Metrics
from idlm.infer.server.protocol.requests import CompletionRequest
from idlm.infer.settings import EngineSettings

POLL_SECONDS = 0.05
Request = dict[str, Any]
Chunk = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DynamoConfig(EngineSettings):
    """Options of a worker."""

    model: str | None = option("checkpoint directory; the front end reads its tokenizer there", None)
    served_model_name: str | None = option("the model's name for clients; null is the directory's", None)
    namespace: str = option("Dynamo's namespace", "dynamo")
    discovery: str = option("how workers are found: file, etcd, kubernetes or mem", "file")
    tool_call_parser: str | None = option("Dynamo's parser of tool calls, for example hermes", None)
    reasoning_parser: str | None = option("Dynamo's parser of reasoning, for example qwen3", None)
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @property
    def name(self) -> str:
        return self.served_model_name or Path(str(self.model)).resolve().name


class Backend:
    """The engine process that serves Dynamo's calls; nothing here needs Dynamo."""

    def __init__(self, config: DynamoConfig, arguments: EngineArguments) -> None:
        self.config = config
        self.client = EngineClient(arguments, Metrics(config.name))
        self._running: asyncio.Task[None] | None = None
        self._open: dict[str, Generation] = {}

    async def ready(self) -> EngineInfo:
        """Start the engine process and wait for it. Raises UserError if it cannot be built."""
        self._running = asyncio.create_task(self.client.run())
        while self.client.info is None:
            if self._running.done():
                await self._running
            await asyncio.sleep(POLL_SECONDS)
        return self.client.info

    async def chunks(self, request: Request, request_id: str) -> AsyncIterator[Chunk]:
        """The answer, in a chunk for each pass that emits tokens. Raises ApiError."""
        prompt_ids = request["token_ids"]
        try:
            params = params_of(request, self.config.sampling)
            generation = await self.client.generate([prompt_ids], params)
        except UserError as error:
            raise from_user_error(error, prompt_field="prompt") from error
        self._open[request_id] = generation
        try:
            async for _, event in generation:
                yield chunk_of(event, len(prompt_ids))
        finally:
            self._open.pop(request_id, None)
            generation.close()

    def cancel(self, request_id: str) -> None:
        """Free what a request has in the engine, and end its `chunks` with an ApiError."""
        generation = self._open.pop(request_id, None)
        if generation is not None:
            generation.close()
            generation.fail(ApiError(499, "the request was cancelled"))

    async def cleanup(self) -> None:
        await self.client.close()
        if self._running is not None:
            with contextlib.suppress(UserError):
                await self._running


def params_of(request: Request, defaults: SamplingParams) -> SamplingParams:
    """The sampling settings of Dynamo's request. Raises ApiError, or UserError IDLM-0401, for what the engine
    cannot honour."""
    given = {**(request.get("sampling_options") or {}), **(request.get("stop_conditions") or {})}
    hidden = given.pop("stop_token_ids_hidden", None) or []
    guided = given.pop("guided_decoding", None) or {}
    # Whatever compiles grammars there, it is llguidance here.
    given |= {f"guided_{name}": value for name, value in guided.items() if value and name != "backend"}
    given["stop_token_ids"] = [*(given.pop("stop_token_ids", None) or []), *hidden]
    given["logprobs"] = (request.get("output_options") or {}).get("logprobs")
    try:
        body = CompletionRequest.model_validate({"prompt": request["token_ids"], **given})
    except ValidationError as error:
        raise from_validation(error.errors()) from error
    body.check()
    if body.n not in (None, 1):
        raise FieldError("n", f"{body.n} of them, one is allowed")
    return body.params(defaults)


def chunk_of(event: AnswerEvent, num_prompt_tokens: int) -> Chunk:
    chunk: Chunk = {"token_ids": event.token_ids, "index": 0}
    if event.logprobs:
        chunk["log_probs"] = [logprob for _, logprob, _ in event.logprobs]
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "logprob": value}
                for rank, (token, value) in enumerate(top, 1)
            ]
            for _, _, top in event.logprobs
        ]
    if event.figures is not None:
        num_tokens = event.figures.num_tokens
        chunk["finish_reason"] = event.figures.finish_reason
        chunk["completion_usage"] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }
    return chunk


def engine_class() -> Any:
    """The class that Dynamo runs. UserError IDLM-0491 without Dynamo."""
    try:
        from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
        from dynamo.llm.exceptions import InvalidArgument, Unknown
    except ModuleNotFoundError as error:
        fix = "pip install ai-dynamo==1.6.1 (docs/deploy.md)"
        raise UserError("IDLM-0491", f"the recipe needs the package {error.name}", fix=fix) from error

    class IdlmEngine(Backend, LLMEngine):
        @classmethod
        async def from_args(cls, argv: list[str] | None = None) -> tuple[Any, Any]:
            words = sys.argv[1:] if argv is None else argv
            found, arguments = read_arguments("serve", cast(Any, DynamoConfig), words)
            config = cast(DynamoConfig, found)
            worker = WorkerConfig(
                namespace=config.namespace,
                model_name=str(config.model),
                served_model_name=config.name,
                discovery_backend=config.discovery,
                request_plane="tcp",
                event_plane="zmq",
                tool_call_parser=config.tool_call_parser,
                reasoning_parser=config.reasoning_parser,
                enable_kv_routing=False,
            )
            return cls(config, arguments), worker

        async def start(self, worker_id: int) -> Any:
            info = await self.ready()
            sizes = LlmRegistration(
                context_length=info.max_length,
                kv_cache_block_size=info.page_size,
                total_kv_blocks=info.num_pages,
                max_num_seqs=info.settings["max_num_seqs"],
                max_num_batched_tokens=info.settings["max_num_batched_tokens"],
            )
            return EngineConfig(model=str(self.config.model), served_model_name=self.config.name, llm=sizes)

        async def generate(self, request: Request, context: Any) -> AsyncIterator[Chunk]:
            try:
                async for chunk in self.chunks(request, context.id()):
                    yield chunk
            except ApiError as error:
                raise (InvalidArgument if error.status < 500 else Unknown)(error.message) from error

        async def abort(self, context: Any) -> None:
            self.cancel(context.id())

    return IdlmEngine


def main() -> int:
    def serve(arguments: list[str]) -> int:
        if command.has_help_flag(arguments):
            from idlm.cli.help import describe

            print(f"{__doc__}\n{describe(DynamoConfig)}")
            return 0
        backend = engine_class()
        from dynamo.common.backend.run import run

        # Dynamo drains at SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run(backend)
        return 0

    return command.run(serve)


if __name__ == "__main__":
    sys.exit(main())
