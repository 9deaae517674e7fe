"""Bodies of requests, as OpenAI's clients send them, and the engine's requests for them. The fields after
`stop` are extensions, with vLLM's names where it has them. A field that the engine cannot honour is refused,
unless its value changes nothing."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from idlm.config.suggest import did_you_mean
from idlm.contracts import MAX_BIAS, Constraint, ConstraintKind, SamplingParams
from idlm.infer.request import QueueOrder
from idlm.infer.server.errors import FieldError
from idlm.infer.server.messages import MAX_INTEGER
from idlm.infer.server.parsers import calls_grammar
from idlm.infer.server.protocol.body import (
    MAX_NESTED,
    NOT_JSON,
    Body,
    ConstraintFields,
    Text,
    TextPart,
    Unicode,
    is_json,
    joined_text,
)
from idlm.infer.structured.schemas import ANY_OBJECT, answer_rules
from idlm.text.calls import FORMATS, CallFormat

MAX_STOPS, MAX_STOP_IDS, MAX_STOP_LENGTH = 64, 1024, 1024
MAX_LOGPROBS, MAX_TOOLS, MAX_MESSAGES, MAX_USER = 20, 128, 4096, 256
WHOLE = BeforeValidator(lambda one: int(one) if isinstance(one, float) and one.is_integer() else one)
"""Takes 2.0 for 2, as languages without integers write it; texts and truth values are no numbers."""
Integer = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
TokenIds = list[Annotated[int, Field(ge=0, le=MAX_INTEGER)]]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, WHOLE, Field(ge=1, le=MAX_INTEGER)]
NumLogprobs = Annotated[int, WHOLE, Field(ge=0, le=MAX_LOGPROBS)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Biases = dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], Bias]
DecoderOptions = Annotated[dict[Unicode, bool | Integer | Number | Unicode | None], Field(max_length=32)]


class CalledFunction(BaseModel):
    """A call of an earlier answer; `arguments` is a JSON object, or empty. Servers may have added fields."""

    model_config = ConfigDict(strict=True)
    name: Text
    arguments: Unicode | dict[str, Any] | None = None


class ToolCall(BaseModel):
    """The same, with the id that its result names."""

    model_config = ConfigDict(strict=True)
    id: Unicode | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self, location: str) -> dict[str, Any]:
        """The call for a chat template, which writes arguments as JSON; `location`: of its function."""
        called, arguments = self.function, self.function.arguments or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = ""
        if not isinstance(arguments, dict) or not is_json(arguments):
            raise FieldError(f"{location}.arguments", f"not a JSON object of at most {MAX_NESTED} levels")
        function = {"name": called.name, "arguments": arguments}
        return {"type": "function", "function": function} | ({} if self.id is None else {"id": self.id})


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Text
    description: Unicode | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)

    def check(self, location: str = "") -> None:
        """Also text that cannot be encoded, and arguments that are none."""
        super().check(location)
        if not is_json(self.plain()):
            raise FieldError(location.removesuffix("."), NOT_JSON)
        kind = (self.function.parameters or {}).get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            raise FieldError(f"{location}function.parameters", f"they are an object, not of type {kind!r}")

    def arguments_schema(self, *, is_free: bool) -> dict[str, Any]:
        """The schema that arguments are forced to follow; `is_free`: any object, unless they are strict."""
        if is_free and not self.function.strict:
            return ANY_OBJECT
        # No parameters are an empty list of them.
        empty = {"properties": {}, "additionalProperties": False}
        given = empty if self.function.parameters is None else self.function.parameters
        return {**given, "type": "object"}


class NamedFunction(Body):
    """The function that the answer must call."""

    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Body):
    """Where a stream reports usage: in a last chunk, or in every chunk. `include_passes`: chunks have the
    passes that emitted their tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_passes: bool | None = None


class SamplingFields(ConstraintFields):
    """What chats and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Count | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, WHOLE, Field(ge=-1, le=MAX_INTEGER)] | None = None
    stop: Annotated[str, Field(max_length=MAX_STOP_LENGTH)] | StopTexts | None = None
    top_k: Annotated[int, WHOLE, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    tau: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    logit_bias: Biases | None = None
    no_repeat_ngram_size: Annotated[int, WHOLE, Field(ge=0, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, WHOLE, Field(ge=0, le=MAX_INTEGER)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    decoder_options: DecoderOptions | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    priority: Integer | None = None

    @property
    def has_passes(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.include_passes)

    def turn(self, client: str) -> QueueOrder:
        """Whose turn the request takes; `user` distinguishes users of one client."""
        user = (self.model_extra or {}).get("user")
        return QueueOrder(client, self.priority or 0, user[:MAX_USER] if isinstance(user, str) else "")

    def check(self, location: str = "") -> None:
        """Also fields that do not fit together."""
        super().check(location)
        if self.stream and self.prompt_logprobs is not None:
            raise FieldError("prompt_logprobs", "a stream has none; leave out stream or prompt_logprobs")

    def merged(self, defaults: SamplingParams, **given: Any) -> SamplingParams:
        """The sampling settings: those `given`, then fields, then `defaults`; seed=-1 is a random one. Raises
        UserError IDLM-0401."""
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        given = {name: getattr(self, name) for name in names} | given
        given["stop"] = None if self.stop == "" else self.stop
        given["constraint"] = self.constraint()
        given["top_k"] = 0 if self.top_k == -1 else self.top_k
        changed = {name: value for name, value in given.items() if value is not None}
        # Defaults that the request excludes yield to it.
        longest = changed.get("max_tokens", defaults.max_tokens)
        yielding = {} if longest is None else {"min_tokens": min(defaults.min_tokens, longest)}
        if "constraint" in changed:
            yielding["no_repeat_ngram_size"] = 0
        changed = yielding | changed
        return replace(defaults, **changed | ({"seed": None} if self.seed == -1 else {}))


class ChatMessage(Body):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Unicode | list[TextPart] | None = None
    refusal: Unicode | None = None
    name: Unicode | None = None
    reasoning_content: Unicode | None = None
    reasoning: Unicode | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Unicode | None = None

    @property
    def thought(self) -> str | None:
        """The reasoning under either of its names; vllm-router renames it."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def plain(self, location: str) -> dict[str, Any]:
        message = {"role": self.role, "content": joined_text(self.content) or self.refusal or ""}
        named = {"name": self.name, "reasoning_content": self.thought, "tool_call_id": self.tool_call_id}
        message |= {key: value for key, value in named.items() if value is not None}
        calls = enumerate(self.tool_calls or ())
        called = [call.plain(f"{location}.tool_calls.{number}.function") for number, call in calls]
        return message | ({"tool_calls": called} if called else {})

    def check(self, location: str = "") -> None:
        """Also what a message of its role has not, or must have."""
        super().check(location)
        for name, role in (("tool_calls", "assistant"), ("refusal", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise FieldError(f"{location}{name}", f"only messages of role {role} have it")
        if self.reasoning is not None and self.reasoning != self.thought:
            raise FieldError(f"{location}reasoning", "differs from reasoning_content; give one of them")
        # An answer may have been calls alone, or reasoning that was cut off, which not all clients send back.
        if self.content is None and self.role != "assistant":
            raise FieldError(f"{location}content", "Field required")


class ReasoningOptions(Body):
    """Responses have `effort` here, and so do chats of OpenRouter's clients."""

    effort: Unicode | None = None
    enabled: bool | None = None


class TemplateOptions(Body):
    """Variables of the chat template that a request sets; two of them switch reasoning on or off."""

    enable_thinking: bool | None = None
    thinking: bool | None = None

    def check(self, location: str = "") -> None:
        """Only whether it is JSON: which further names are known, the template decides."""
        if not is_json(self.model_extra):
            raise FieldError(location.removesuffix("."), NOT_JSON)


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Unicode | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: TemplateOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    _format: CallFormat = PrivateAttr(default=FORMATS["hermes"])
    """How calls are written."""

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The sampling settings; of OpenAI's two names of the longest answer the newer one wins."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        max_tokens = self.max_completion_tokens or self.max_tokens
        return self.merged(defaults, max_tokens=max_tokens, logprobs=logprobs)

    def client_name(self, field: str) -> str:
        if field == "max_tokens" and self.max_completion_tokens is not None:
            field = "max_completion_tokens"
        elif field == "constraint" and self._constrains_calls and not self._given():
            field = "tools"
        return super().client_name(field)

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call; a template gets all of them if one must be called."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls from its first token on."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def is_whole_constrained(self) -> bool:
        """Whether the whole answer must match something, calls or else."""
        return self.must_call or bool(self._given())

    @property
    def _constrains_calls(self) -> bool:
        """Whether calls must follow a grammar, whatever else is given."""
        tools, has_many = self.callable_tools, self.parallel_tool_calls is not False
        is_strict = any(tool.function.strict for tool in tools)
        return bool(tools) and (self.must_call or is_strict or not has_many)

    def _given(self) -> list[tuple[str, ConstraintKind, Any]]:
        """Without `response_format` where the answer is calls alone: it is about text."""
        return [one for one in super()._given() if not (self.must_call and one[0] == "response_format")]

    def _composed(self) -> list[tuple[str, ConstraintKind, Any]]:
        """Also the grammar of calls, if they are forced in any way, or if the rest is constrained."""
        given, tools, has_many = self._given(), self.callable_tools, self.parallel_tool_calls is not False
        if not tools or len(given) > 1 or not (self._constrains_calls or given):
            return given
        if isinstance(self.tool_choice, NamedTool):
            name, has_many = self.tool_choice.function.name, False
            tools = [tool for tool in tools if tool.function.name == name]
        schemas = {tool.function.name: tool.arguments_schema(is_free=not self.must_call) for tool in tools}
        grammar = partial(calls_grammar, self._format, schemas, is_forced=self.must_call, has_many=has_many)
        if not given or self.must_call:
            return [*given, ("tools", "grammar", grammar())]
        [(field, kind, value)] = given
        if kind == "grammar":
            raise FieldError(field, "not with tools; set tool_choice=none, or give a schema, regex or choice")
        return [(field, "grammar", grammar(answer=answer_rules(Constraint(kind=kind, text=value))))]

    def plain_messages(self) -> list[dict[str, Any]]:
        return [message.plain(f"messages.{number}") for number, message in enumerate(self.messages)]

    def check(self, location: str = "") -> None:
        super().check(location)
        names = [tool.function.name for tool in self.tools or ()]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise FieldError(f"tools.{number}.function.name", f"{name!r} is given twice")
        if self.must_call and not names:
            raise FieldError("tool_choice", "there are no tools to call")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            rule = f"{self.tool_choice.function.name!r} is none of the tools"
            raise FieldError("tool_choice.function.name", rule)
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs=true")

    def template_kwargs(self, variables: Collection[str]) -> dict[str, Any]:
        """What else the template gets, whose `variables` these are: the effort, if it has one for it, and
        arguments of the client. Raises ApiError for those that it has no variable for."""
        given = (self.chat_template_kwargs and self.chat_template_kwargs.model_extra) or {}
        for name in given:
            if name not in variables:
                rule = f"the model's chat template does not read it{did_you_mean(name, variables)}"
                raise FieldError(f"chat_template_kwargs.{name}", rule)
        has_effort = self._effort is not None and "reasoning_effort" in variables
        return {"reasoning_effort": self._effort} | given if has_effort else given

    @property
    def _effort(self) -> str | None:
        return self.reasoning_effort or (self.reasoning or ReasoningOptions()).effort

    def thinking(self, default: bool | None) -> bool | None:
        """`enable_thinking` for the template; None leaves it to the template."""
        options = self.chat_template_kwargs or TemplateOptions()
        values = [self.enable_thinking, options.enable_thinking, options.thinking]
        values.append((self.reasoning or ReasoningOptions()).enabled)
        values.append(False if self._effort == "none" else default)
        return next((value for value in values if value is not None), None)


class CompletionRequest(SamplingFields):
    """POST /v1/completions. A prompt is text without a template, or token ids."""

    prompt: Text | Annotated[TokenIds | list[Text] | list[TokenIds], Field(min_length=1)]
    max_tokens: Annotated[int, WHOLE, Field(ge=0, le=MAX_INTEGER)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: NumLogprobs | None = None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The sampling settings; an echo with logprobs has those of the prompt."""
        of_echo = [self.logprobs, 0 if self.max_tokens == 0 else None]
        counts = [self.prompt_logprobs, *(of_echo if self.echo else ())]
        scored = max((number for number in counts if number is not None), default=None)
        return self.merged(defaults, prompt_logprobs=scored)

    @property
    def prompts(self) -> list[Any]:
        """One or more prompts: texts, or lists of token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    def check(self, location: str = "") -> None:
        super().check(location)
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise FieldError("max_tokens", "0 needs echo=true or prompt_logprobs, else the answer is empty")
        if self.add_special_tokens is False and isinstance(self.prompts[0], str):
            raise FieldError("add_special_tokens", "a text gets them; give token ids, as of POST /tokenize")
