"""Bodies of requests for responses (OpenAI's Responses API), which are translated to chats. Items of `input`
are messages, or parts of one: reasoning, text and calls of an answer are items of their own. Chats have
functions alone: those of a namespace have its name in theirs, a custom tool is a function of one text, and
tools that the server would have to run are left out, since a model need not call any."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from idlm.contracts import SamplingParams
from idlm.infer.server.errors import FieldError
from idlm.infer.server.protocol.body import (
    FIELDS,
    HOSTED,
    NOT_JSON,
    Body,
    NamedSchema,
    ResponseFormat,
    Text,
    TextPart,
    Unicode,
    is_json,
    joined_text,
)
from idlm.infer.server.protocol.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    Count,
    Function,
    NamedFunction,
    NamedTool,
    NumLogprobs,
    ReasoningOptions,
    SamplingFields,
    TemplateOptions,
    Tool,
    ToolCall,
)
from idlm.infer.server.replies.stored import ResponseStore

Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""What OpenAI leaves out unless it is wanted. Reasoning is not encrypted here, so the second adds nothing."""
LOGPROBS = get_args(Include)[0]
NAMES: Mapping[str, str] = FIELDS["names_in_responses"]
"""Fields of a chat that have another name here."""
FUNCTIONS = "functions"
"""The namespace of functions without one."""
TEXT_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Arguments of a custom tool as a function."""
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


class ItemPart(TextPart):
    """A part of an item; `logprobs` come with answers that a client sends back."""

    TYPES = (*TextPart.TYPES, "reasoning_text", "summary_text")
    logprobs: Any = None


class Item(Body):
    """A part of a conversation; messages need no type. `id` and `status` come with answers."""

    type: (
        Literal["message", "reasoning", "function_call", "function_call_output", "item_reference"]
        | Literal["custom_tool_call", "custom_tool_call_output"]
        | None
    ) = None
    id: Unicode | None = None
    status: Unicode | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Unicode | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    call_id: Text | None = None
    name: Text | None = None
    namespace: Text | None = None
    arguments: Unicode | None = None
    input: Unicode | None = None
    output: Unicode | list[ItemPart] | None = None

    def check(self, location: str = "") -> None:
        """Also what an item of its type must have, or has not."""
        super().check(location)
        kind = self.type or "message"
        for name in sorted({name for _, *names in KINDS.values() for name in names}):
            is_given, is_known = getattr(self, name) is not None, name in KINDS[kind]
            if is_given and not is_known:
                raise FieldError(f"{location}{name}", f"an item of type {kind} has none")
            if is_known and not is_given and kind != "reasoning":
                raise FieldError(f"{location}{name}", "Field required")
        if kind == "function_call":
            self.call.plain(location.removesuffix("."))

    @property
    def call(self) -> ToolCall:
        name = flat_name(self.namespace, self.name or "")
        arguments = self.arguments if self.input is None else json.dumps({"input": self.input})
        called = CalledFunction.model_construct(name=name, arguments=arguments)
        return ToolCall.model_construct(id=self.call_id, function=called)

    def message(self) -> ChatMessage:
        """The message of a chat, or a part of one."""
        fields: dict[str, Any] = {"role": self.role or "assistant", "content": joined_text(self.content)}
        if self.type == "reasoning":
            thought = fields["content"] or joined_text(self.summary)
            fields |= {"content": "", "reasoning_content": thought}
        elif self.type in CALLS:
            fields["tool_calls"] = [self.call]
        elif self.type in RESULTS:
            fields |= {"role": "tool", "content": joined_text(self.output), "tool_call_id": self.call_id}
        return ChatMessage.model_construct(**fields)

    def listed(self) -> dict[str, Any]:
        """The item as it is stored and listed: with an id, text of messages in parts, and nothing else that a
        client has sent, which may be no JSON."""
        kind, is_answer = self.type or "message", self.role == "assistant"
        prefix, *names = KINDS[kind]
        fields = {name: getattr(self, name) for name in (*names, "namespace")}
        if isinstance(self.content, str):
            of_message = "output_text" if is_answer else "input_text"
            text_type = "reasoning_text" if kind == "reasoning" else of_message
            fields["content"] = [ItemPart(type=text_type, text=self.content)]
        more: dict[str, Any] = {"annotations": []} if is_answer else {}
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = [{"type": part.type, "text": part.text, **more} for part in value]
        if kind == "reasoning":
            fields["summary"] = fields["summary"] or []
        about = {"id": self.id or new_id(prefix), "type": kind, "status": self.status or "completed"}
        return about | {name: value for name, value in fields.items() if value is not None}


KINDS: Mapping[str, Sequence[str]] = FIELDS["items"]
"""How ids of an item begin, and which fields it has, by its type; of reasoning one is enough."""
CALLS, RESULTS = ("function_call", "custom_tool_call"), ("function_call_output", "custom_tool_call_output")
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]


class FlatTool(Function):
    """A tool as here; that of a chat has an object for its function."""

    type: Literal["function"]


def _has_tools(item: Any) -> bool:
    is_more = isinstance(item, dict) and item.get("type") == "additional_tools"
    return is_more and isinstance(item.get("tools"), list)


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a function of a namespace among all functions."""
    return name if namespace in (None, FUNCTIONS) else f"{namespace}__{name}"


def flat_tools(tools: Sequence[Any], namespace: str | None = None) -> Iterator[tuple[Any, dict[str, str]]]:
    """Tools as functions, each with what its calls have besides: their own name, the type of custom ones, and
    the namespace. Other values as they are."""
    for tool in tools:
        given = tool if isinstance(tool, dict) else {}
        kind, name, others = given.get("type"), given.get("name"), given.get("tools")
        if not isinstance(name, str):
            yield tool, {}
        elif kind == "namespace" and namespace is None and isinstance(others, list):
            yield from flat_tools(others, name)
        else:
            origin = {"name": name} | ({} if namespace in (None, FUNCTIONS) else {"namespace": namespace})
            if kind == "custom":
                tool = {"type": "function", "parameters": TEXT_INPUT, "description": given.get("description")}
                origin["type"] = "custom_tool_call"
            yield {**tool, "name": flat_name(namespace, name)}, origin


class FlatChoice(NamedFunction):
    type: Literal["function"]


class TextFormat(NamedSchema):
    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # type: ignore[assignment]


class TextOptions(Body):
    format: TextFormat | None = None


class ResponseRequest(SamplingFields):
    """POST /v1/responses."""

    n: Literal[1] | None = None
    max_tokens: Any = None
    response_format: Any = None
    prompt_logprobs: None = None
    return_token_ids: None = None
    input: Unicode | Items
    instructions: Unicode | None = None
    previous_response_id: Unicode | None = None
    store: bool | None = None
    metadata: Annotated[Metadata, Field(max_length=16)] | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Include] | None = None
    top_logprobs: NumLogprobs | None = None
    stream_options: Body | None = None  # type: ignore[assignment]
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    _context: Sequence[Item] = PrivateAttr(default=())
    _origins: dict[str, dict[str, str]] = PrivateAttr(default_factory=dict)
    _left_out: Sequence[str] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _of_functions(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """With functions in place of other tools, also of those that come in items of the type
        `additional_tools`."""
        given = value if isinstance(value, dict) else {}
        items, tools = given.get("input"), given.get("tools") or []
        if isinstance(items, list) and isinstance(tools, list):
            more = [one for one in items if _has_tools(one)]
            tools = [*tools, *(tool for one in more for tool in one["tools"])]
            value = {**given, "input": [one for one in items if not _has_tools(one)]} if more else value
        flat = [*flat_tools(tools)] if isinstance(tools, list) else []
        kinds = [tool.get("type") if isinstance(tool, dict) else None for tool, _ in flat]
        kept = [each for each, kind in zip(flat, kinds, strict=True) if kind not in HOSTED]
        body = handler({**value, "tools": [tool for tool, _ in kept]} if flat else value)
        body._origins = {tool["name"]: origin for tool, origin in kept}
        body._left_out = [kind for kind in HOSTED if kind in kinds]
        return body

    @property
    def notes(self) -> list[str]:
        """What of the request does not hold."""
        return [f"tools of type {kind} are left out: nothing runs them here" for kind in self._left_out]

    def origin(self, name: str) -> dict[str, str]:
        """What a call of the function `name` has: its own name, and its type and namespace, if any."""
        return self._origins.get(name) or {"name": name}

    def check(self, location: str = "") -> None:
        """Also fields that have another name here."""
        for name in ("max_tokens", "response_format"):
            if getattr(self, name) is not None:
                raise FieldError(name, f"give {NAMES[name]}", code="unknown_parameter")
        super().check(location)

    def recall(self, store: ResponseStore) -> None:
        """Let the items of the previous response precede those of `input`, and put items of stored answers in
        place of references, each once, for its text may be long. Raises ApiError for what is not stored."""
        if self.previous_response_id is not None:
            before = store.previous(self.previous_response_id).conversation()
            self._context = [Item.model_validate(item) for item in before]
        if isinstance(self.input, str):
            return
        referred = {at: one.id or "" for at, one in enumerate(self.input) if one.type == "item_reference"}
        found = store.items(referred.values())
        for at, name in referred.items():
            if name not in found:
                rule = f"no item {name[:80]!r} of an answer is stored, or it was named before; give it itself"
                raise FieldError(f"input.{at}.id", rule, code="item_not_found")
            self.input[at] = Item.model_validate(found.pop(name))

    def items(self) -> list[Item]:
        """All items of the conversation, without instructions."""
        own = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return [*self._context, *own]

    def chat(self) -> ChatRequest:
        """The chat that has the same answer, and names fields as here. Raises ApiError as `check` does."""
        self.check()
        has_logprobs = LOGPROBS in (self.include or ())
        form, choice = self.text.format if self.text else None, cast(Any, self.tool_choice)
        schema = None if form is None or form.schema_ is None else form
        if not is_json(form and form.model_dump()):
            raise FieldError("text.format", NOT_JSON)
        if self.top_logprobs and not has_logprobs:
            raise FieldError("top_logprobs", f"needs include=[{LOGPROBS!r}]")
        if isinstance(choice, FlatChoice):
            choice = NamedTool(type="function", function=choice)
        fields: dict[str, Any] = {
            **{name: getattr(self, name) for name in SHARED},
            **(self.model_extra or {}),
            "messages": self._messages(),
            "n": 1,
            "max_tokens": self.max_output_tokens,
            "response_format": form and ResponseFormat.model_construct(type=form.type, json_schema=schema),
            "stream_options": None,
            "logprobs": has_logprobs,
            "tools": [Tool.model_construct(type="function", function=tool) for tool in self.tools or ()],
            "tool_choice": choice,
        }
        # What is valid here is valid there.
        chat = ChatRequest.model_construct(**fields)
        chat._renaming = client_name
        return chat

    def _messages(self) -> list[ChatMessage]:
        """Reasoning, text and calls that follow each other are one message of the assistant."""
        given = [] if self.instructions is None else [Item(role="system", content=self.instructions)]
        first, *others = [item.message() for item in (*given, *self.items())]
        messages = [first]
        for part in others:
            last = messages[-1]
            follows = part.tool_calls or not (last.content or last.tool_calls)
            if last.role == part.role == "assistant" and follows:
                last.content = joined_text(last.content) + joined_text(part.content)
                last.reasoning_content = (last.thought or "") + (part.thought or "") or None
                last.tool_calls = [*(last.tool_calls or ()), *(part.tool_calls or ())] or None
            else:
                messages.append(part)
        return messages

    def described(self, params: SamplingParams) -> dict[str, Any]:
        """What a response repeats of its request, and the settings that acted."""
        given = self.model_dump(by_alias=True, exclude_none=True, include={"text", "tools"})
        choice: Any = self.tool_choice or "auto"
        if isinstance(choice, FlatChoice):
            choice = {"type": "function", "name": choice.name}
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": params.max_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "temperature": params.temperature,
            "text": {"format": given.get("text", {}).get("format", {"type": "text"})},
            "tool_choice": choice,
            "tools": given.get("tools", []),
            "top_logprobs": params.logprobs,
            "top_p": params.top_p,
            "truncation": "disabled",
        }


SHARED = ResponseRequest.model_fields.keys() & ChatRequest.model_fields.keys()
"""Fields that have the same meaning in a chat, or that `chat` sets."""


def client_name(field: str) -> str:
    """The name here of a field of a chat."""
    return NAMES.get(field, field.replace(".function", ""))
