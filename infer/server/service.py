"""From a request's body to the events of its answer: limits, prompts as token ids, and the engine."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from idlm import __version__
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.request import QueueOrder
from idlm.infer.server.config import ServeConfig
from idlm.infer.server.engine_client import EngineClient, Generation
from idlm.infer.server.errors import ApiError, FieldError, engine_unavailable, from_user_error
from idlm.infer.server.messages import EngineInfo
from idlm.infer.server.metrics import Metrics
from idlm.infer.server.parsers import AnswerParser, call_format, parses_reasoning
from idlm.infer.server.protocol.requests import ChatRequest, CompletionRequest, SamplingFields
from idlm.infer.server.replies.choices import Shown, TokenTexts
from idlm.infer.server.replies.stored import ResponseStore
from idlm.infer.server.templates import TemplateProcess
from idlm.infer.structured.schemas import after_thought
from idlm.text.calls import CallFormat
from idlm.text.left_out import kinds_left_out
from idlm.text.split_tokens import texts_of
from idlm.text.templates import all_template_text, render
from idlm.text.thoughts import CLOSE, is_opened
from idlm.text.tokenizer import encode_messages, encode_prompt, load_tokenizer

QUEUE_FACTOR = 16
LIMITS = (
    *("max_n", "max_prompts", "max_waiting", "max_body", "max_header", "max_stored"),
    *("drain_seconds", "engine_timeout"),
)
DRAIN_POLL_SECONDS = 0.05
SLOW_SECONDS = 60.0
"""How long a client whose conversation took the template too long shares the thread of long prompts."""
LONG_CHARS = 1 << 14
"""Characters of a prompt from which it is long: it takes some 10 ms to encode."""


class Service:
    """One model, served over HTTP. `tokenizer` is None until it is ready, and where there is none."""

    def __init__(self, config: ServeConfig, client: EngineClient, metrics: Metrics, model_name: str) -> None:
        self.config, self.client, self.metrics, self.model_name = config, client, metrics, model_name
        self.tokenizer: Any = None
        self.token_texts, self.num_keys = TokenTexts(None), 0
        self.start_time, self.is_draining, self._has_tokenizer = int(time.time()), False, False
        self._encoding, self._slow = Counter[str](), dict[str, float]()
        self._known_losses, self._stores = dict[int, list[str]](), dict[str, ResponseStore]()
        # Of one client, one short text and one long text at a time are encoded.
        self._locks = weakref.WeakValueDictionary[tuple[str, bool], asyncio.Lock]()
        self._templates: list[TemplateProcess] = []
        self.template_variables = frozenset[str]()
        self._call_format: CallFormat | None = None
        """How the model calls tools; None if nothing reads its calls."""
        # Each with a tokenizer of its own, which are not made for several threads. Long texts have the second
        # one, so that short ones do not wait for them.
        self._encoders = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("encode", "long")]
        self._tokenizers: tuple[Any, ...] = ()

    @property
    def models(self) -> dict[str, str | None]:
        """Folders by the names that requests give: of the checkpoint itself, then of its further adapters."""
        return {self.model_name: self.config.model, **self.config.adapters}

    @property
    def status(self) -> str:
        """`ready`, or why no request can be taken."""
        if self.is_draining:
            return "draining"
        return self.client.state if self._has_tokenizer or self.client.state != "ready" else "loading"

    def check_ready(self) -> None:
        """Raise ApiError 503 if no request can be taken."""
        if self.status != "ready":
            raise engine_unavailable(f"the engine is {self.status}")

    @property
    def info(self) -> EngineInfo:
        """The engine. Raises ApiError 503 before the first one is ready."""
        if self.client.info is None:
            raise engine_unavailable(f"the engine is {self.client.state}")
        return self.client.info

    @property
    def num_open(self) -> int:
        return self.client.num_open + self._encoding.total()

    def describe(self) -> dict[str, Any]:
        """The answer of /server_info, also before the engine is ready; no key."""
        info, config = self.client.info, self.config
        return {
            "version": __version__,
            "model_path": config.model,
            "served_model_name": self.model_name,
            "status": self.status,
            "start_time": self.start_time,
            "num_restarts": self.client.num_restarts,
            "num_open": self.num_open,
            "limits": {name: getattr(config, name) for name in LIMITS},
            "engine": None if info is None else dataclasses.asdict(info),
        }

    async def run(self) -> None:
        """Run the engine, and load the tokenizer meanwhile. Raises UserError if either cannot be loaded."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._load_tokenizer())
            tasks.create_task(self.client.run())

    async def drain(self, *, is_hurried: Callable[[], bool]) -> None:
        """Refuse new requests, and wait for those under way, at most `drain_seconds`."""
        self.is_draining = True
        deadline = time.monotonic() + self.config.drain_seconds
        while self.num_open and time.monotonic() < deadline and not is_hurried():
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def close(self) -> None:
        await self.client.close()
        for encoder in self._encoders:
            encoder.shutdown(wait=False, cancel_futures=True)
        for process in self._templates:
            process.close()

    def stored(self, client: str) -> ResponseStore:
        """The responses of a client's key; without keys all clients have the same ones."""
        owner, share = client if self.num_keys else "", self.config.max_stored // max(1, self.num_keys)
        return self._stores.setdefault(owner, ResponseStore(share))

    async def chat(self, body: ChatRequest, client: str = "") -> Generation:
        body._format = self._call_format or body._format
        with self.checked(body, "messages"):
            params, turn = self._admit(body, client, num_prompts=1), body.turn(client)
            token_ids, notes = await self.encode_chat(body, params.n, client)
            thinks = self._thinks(body, token_ids)
            if thinks and params.constraint and body.is_whole_constrained:
                params = dataclasses.replace(params, constraint=after_thought(params.constraint, CLOSE))
            if params.stop and params.stop_in_reasoning is None:
                params = dataclasses.replace(params, stop_in_reasoning=not thinks)
            generation = await self._generate(body, [token_ids], params, turn)
            generation.notes = [*generation.notes, *notes]
            return generation

    async def encode_chat(
        self, body: ChatRequest, num_samples: int, client: str, *, open_turn: bool = True
    ) -> tuple[list[int], list[str]]:
        """The ids of a conversation, and what its template silently leaves out. Raises ApiError for tools
        that are not in the model's prompt, or whose calls nothing reads."""
        tools = [tool.plain() for tool in body.callable_tools]
        if tools and "tools" not in self.template_variables:
            raise FieldError("tools", "the model's chat template does not support tools")
        if tools and self._call_format is None:
            rule = "no parser for the calls of this model; the server's option is tool_parser"
            raise FieldError("tools", rule)
        encode = functools.partial(
            self._encode_chat,
            open_turn=open_turn,
            enable_thinking=body.thinking(self.config.enable_thinking),
            tools=tools,
            template_kwargs=body.template_kwargs(self.template_variables),
        )
        return (await self.encode(encode, [body.plain_messages()], num_samples, client))[0]

    def _encode_chat(
        self, tokenizer: Any, messages: Any, *, max_tokens: int, tools: Any, **options: Any
    ) -> tuple[list[int], list[str]]:
        split = self.config.split_special_tokens
        token_ids = encode_messages(
            tokenizer, messages, max_tokens=max_tokens, tools=tools, split_special_tokens=split, **options
        )

        def redraw(messages: Any, tools: Any) -> str:
            return render(tokenizer, messages, tools=tools, **options)

        kinds = kinds_left_out(messages, tools, redraw=redraw, known=self._known_losses)
        return token_ids, [f"the chat template leaves out {kind}" for kind in kinds]

    async def complete(self, body: CompletionRequest, client: str = "") -> Generation:
        with self.checked(body, "prompt"):
            prompts, turn = body.prompts, body.turn(client)
            params = self._admit(body, client, num_prompts=len(prompts))
            if isinstance(prompts[0], str):
                encode = functools.partial(encode_prompt, template="none")
                prompts = await self.encode(encode, prompts, params.n, client)
            return await self._generate(body, prompts, params, turn)

    async def _generate(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        turn: QueueOrder,
    ) -> Generation:
        """Queue prompts. An answer that can be shorter than `max_tokens` has a warning."""
        generation = await self.client.generate(prompts, params, turn, has_passes=body.has_passes)
        context = self.info.max_length
        limit = context - max(map(len, prompts))
        if params.max_tokens is not None and params.max_tokens > limit:
            given = f"{body.client_name('max_tokens')}={params.max_tokens}"
            note = f"{given}, but the context of {context} tokens leaves {limit}"
            generation.notes = [*generation.notes, note]
        return generation

    def shown(self, body: ChatRequest | None, generation: Generation) -> Shown:
        """What the answer to a chat, or to a completion (None), has besides its events."""
        thinks = body is not None and self._thinks(body, generation.prompts[0])
        names = [] if body is None else [tool.function.name for tool in body.callable_tools]
        parser = functools.partial(
            AnswerParser,
            thinks=thinks,
            is_open=thinks and is_opened(self.tokenizer, generation.prompts[0]),
            calls=self._call_format if names else None,
            names=names,
            text_of=self.token_texts.text,
        )
        return Shown(generation.params.adapter or self.model_name, self.token_texts, parser)

    def _thinks(self, body: ChatRequest, prompt_ids: Sequence[int]) -> bool:
        """Whether an answer may begin with reasoning. One whose first token is constrained does so only where
        the prompt has opened it, and not under a grammar of the client."""
        template = all_template_text(self.tokenizer)
        if body.has_grammar or not parses_reasoning(self.config.reasoning_parser, template):
            return False
        return not body.is_whole_constrained or is_opened(self.tokenizer, prompt_ids)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for another model than those that are served."""
        if name is not None and name not in self.models:
            *others, last = map(repr, self.models)
            known = f"models are {', '.join(others)} and {last}" if others else f"model is {last}"
            rule = f"{name!r} is not served here; the {known}"
            raise FieldError("model", rule, status=404, code="model_not_found")

    @contextlib.contextmanager
    def checked(self, body: SamplingFields, prompt_field: str) -> Iterator[None]:
        """Check the body itself; errors, also those of the engine's checks, name the client's field."""
        try:
            body.check()
            self.check_model(body.model)
            yield
        except ApiError as error:
            raise body.named(error) from error
        except UserError as error:
            raise body.named(from_user_error(error, prompt_field=prompt_field)) from error

    def _admit(
        self, body: ChatRequest | CompletionRequest, client: str, *, num_prompts: int
    ) -> SamplingParams:
        """The sampling settings of a request. Raises ApiError 400, 429 or 503 if it cannot be taken."""
        config, params = self.config, body.params(self.config.sampling)
        if body.model is not None:
            name = body.model if body.model in config.adapters else None
            params = dataclasses.replace(params, adapter=name)
        limits = ("n", params.n, config.max_n), ("prompt", num_prompts, config.max_prompts)
        for field, num, maximum in limits:
            if num > maximum:
                raise FieldError(field, f"{num} of them, at most {maximum} are allowed")
        self.check_ready()
        num_lanes: int = self.info.settings["max_num_seqs"]
        maximum = num_lanes + (QUEUE_FACTOR * num_lanes if config.max_waiting is None else config.max_waiting)
        share = max(1, maximum // max(1, self.num_keys))
        num_answers = params.n * num_prompts
        if num_answers > share:
            rule = f"the request has {num_answers} answers, at most {share} may be under way"
            raise FieldError("n" if params.n > 1 else "prompt", rule)
        num_own = self.client.num_open_of(client) + self._encoding[client]
        if self.num_open + num_answers > maximum or num_own + num_answers > share:
            message = f"{share} answers may be under way, and this one would be more; try again later"
            raise ApiError(429, message, code="queue_full")
        return params

    async def encode(
        self, encode: functools.partial[Any], prompts: Sequence[Any], num_samples: int, client: str
    ) -> list[Any]:
        """The results of `encode` for each prompt, which are counted meanwhile."""
        if self.tokenizer is None:
            rule = "it has no tokenizer files; POST token ids to /v1/completions"
            raise FieldError("model", rule, code="IDLM-0414")
        loop, num_encoded, encoded = asyncio.get_running_loop(), num_samples * len(prompts), []
        self._encoding[client] += num_encoded
        try:
            for prompt in prompts:
                # Arguments of `encode`, such as tools, make a prompt longer.
                is_long = sum(map(len, texts_of([prompt, encode.keywords]))) > LONG_CHARS
                async with self._locks.setdefault((client, is_long), asyncio.Lock()):
                    group = is_long or time.monotonic() < self._slow.get(client, 0.0)
                    call = functools.partial(encode, self._tokenizers[group], max_tokens=self.info.max_length)
                    encoded.append(await loop.run_in_executor(self._encoders[group], call, prompt))
            return encoded
        except UserError as error:
            if isinstance(error.__cause__, TimeoutError):
                # Further conversations of this client wait for each other, and others do not wait for them.
                now = time.monotonic()
                self._slow = {name: end for name, end in self._slow.items() if end > now}
                self._slow[client] = now + SLOW_SECONDS
            raise
        finally:
            self._encoding[client] -= num_encoded
            self._encoding += Counter()

    async def _load_tokenizer(self) -> None:
        """Load the tokenizer of the checkpoint (an adapter may bring its own), else that of its base."""
        path = self.config.model
        assert path is not None
        loop, encoder = asyncio.get_running_loop(), self._encoders[0]
        self.tokenizer = await loop.run_in_executor(encoder, load_tokenizer, path)
        while self.client.info is None and self.client.state == "loading":
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        if self.tokenizer is None and self.client.info is not None and not self.client.is_closing:
            directory = self.client.info.directory
            self.tokenizer = await loop.run_in_executor(encoder, load_tokenizer, directory)
        if self.tokenizer is not None and not self.client.is_closing:
            copied = await loop.run_in_executor(encoder, copy.deepcopy, self.tokenizer)
            self._tokenizers = self.tokenizer, copied
            # A template of the checkpoint must not stop this process.
            for tokenizer in self._tokenizers:
                self._templates.append(TemplateProcess(tokenizer))
                tokenizer.apply_chat_template = self._templates[-1].apply
            # A template that cannot be read has no variables; it refuses each conversation, with the reason.
            with contextlib.suppress(ValueError, TimeoutError):
                variables = await loop.run_in_executor(encoder, self._templates[0].variables)
                self.template_variables = variables
        self.token_texts = TokenTexts(self.tokenizer)
        self._call_format = call_format(self.config.tool_parser, all_template_text(self.tokenizer))
        # As in the engine process: looking at all libraries would stop every stream for a tenth of a second.
        gc.collect()
        gc.freeze()
        self._has_tokenizer = True
