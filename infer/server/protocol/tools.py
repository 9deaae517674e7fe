"""Tools of a chat's body: those that the model may call, the one that it must call, and earlier calls."""

from __future__ import annotations

import json
from typing import Any, Literal

from idlm.infer.server.errors import FieldError
from idlm.infer.server.protocol.body import Body, Text, Unicode, is_json
from idlm.infer.structured.schemas import ANY_OBJECT


class CalledFunction(Body):
    """A call of an earlier answer; `arguments` is a JSON object, or empty."""

    name: Text
    arguments: Unicode


class ToolCall(Body):
    """The same, with the id that its result names."""

    id: Unicode | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self, place: str) -> dict[str, Any]:
        """The call for a chat template, which writes arguments as JSON itself."""
        called = self.function
        try:
            arguments = json.loads(called.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict) or not is_json(arguments):
            raise FieldError(f"{place}.function.arguments", "not a JSON object")
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

    def check(self, place: str) -> None:
        """Raise ApiError for unknown fields, text that cannot be encoded, and arguments that are none."""
        self.check_extra(f"{place}.")
        self.function.check_extra(f"{place}.function.")
        if not is_json(self.plain()):
            raise FieldError(place, "text that is not valid Unicode, or an infinite number")
        kind = (self.function.parameters or {}).get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            rule = f"arguments are an object, not of type {kind!r}"
            raise FieldError(f"{place}.function.parameters", rule)

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
    """OpenAI's `tool_choice` of one tool."""

    type: Literal["function"]
    function: NamedFunction
