"""What all bodies of requests have in common: which fields they may have, and those that define what an
answer must match (`ConstraintFields`)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from idlm.config.suggest import did_you_mean
from idlm.contracts import Constraint, ConstraintKind
from idlm.infer.server.errors import ApiError, FieldError

Text = Annotated[str, Field(min_length=1)]
Unicode = Annotated[str, Field(min_length=0)]
"""Any text that can be encoded: pydantic lets lone surrogates pass in a `str` without a constraint."""
FIELDS = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))
OF_REQUESTS, OF_MESSAGES = frozenset(FIELDS["of_requests"]), frozenset(FIELDS["of_messages"])
"""Fields that do not affect the answer."""
NEUTRAL: Mapping[str, Sequence[Any]] = FIELDS["neutral"]
"""Fields that are not supported, and their values that have no effect, but for empty ones."""
OTHER_PARTS: Mapping[str, str] = FIELDS["other_parts"]
"""Types of parts of messages, and what they hold."""
HOSTED: Sequence[str] = FIELDS["hosted_tools"]
"""Types of tools that nothing runs here."""
MAX_NESTED = 100
"""Levels of JSON within a request."""
NOT_JSON = f"text that is not valid Unicode, an infinite number, or more than {MAX_NESTED} levels"
"""Why `is_json` does not hold."""
Choices = Annotated[list[Text], Field(min_length=1)]
Schema = dict[str, Any] | Text
GUIDES: Mapping[str, ConstraintKind]
GUIDES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


class Body(BaseModel):
    """A JSON object; fields without a declaration stay in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow")
    IGNORED: ClassVar[frozenset[str]] = OF_MESSAGES

    def check(self, location: str = "") -> None:
        """Raise ApiError for a field, here or in an object within, that is unknown or not supported; an empty
        one is absent. `location` begins the names of fields: `messages.0.`."""
        for name, value in (self.model_extra or {}).items():
            param = f"{location}{name}"
            if value in (None, "", [], {}) or name in self.IGNORED or value in NEUTRAL.get(name, ()):
                continue
            if name in NEUTRAL:
                allowed = " or ".join(map(repr, NEUTRAL[name]))
                rule = f"leave it out{f', or give {allowed}' if allowed else ''}"
                raise FieldError(param, f"is not supported; {rule}", code="unsupported_parameter")
            near = did_you_mean(name, type(self).model_fields)
            raise FieldError(param, f"unknown field{near}", code="unknown_parameter")
        for name, value in self:
            if isinstance(value, Body):
                value.check(f"{location}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                for number, part in enumerate(value):
                    part.check(f"{location}{name}.{number}.")


class TextPart(Body):
    """A part of a message. Models here read text alone, and the server fetches nothing."""

    TYPES: ClassVar[tuple[str, ...]] = ("text", "input_text", "output_text")
    type: Unicode
    text: Unicode | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        """A text alone is a part, and so is what a model has refused with."""
        if isinstance(value, dict) and value.get("type") == "refusal":
            return {"type": "output_text", "text": value.get("refusal")}
        return {"type": "text", "text": value} if isinstance(value, str) else value

    def check(self, location: str = "") -> None:
        """Also a part that is no text, whose fields are unknown here."""
        if self.type not in self.TYPES:
            what = OTHER_PARTS.get(self.type, f"parts of type {self.type!r}")
            rule = f"{what} are not supported; the model reads text"
            raise FieldError(f"{location}type", rule, code="unsupported_parameter")
        if self.text is None:
            raise FieldError(f"{location}text", "Field required")
        super().check(location)


def joined_text(content: str | Sequence[TextPart] | None) -> str:
    """The text of a message; nothing separates its parts."""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


def is_json(value: Any) -> bool:
    """Whether JSON has no lone surrogates or infinite numbers, and at most `MAX_NESTED` levels, since what
    reads it is recursive."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    level = [value]
    for _ in range(MAX_NESTED):
        level = [part for one in level for part in _parts(one)]
    return not level


def _parts(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class NamedSchema(Part):
    """OpenAI's wrapper of a schema, which always applies, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _wrapped(cls, value: Any) -> Any:
        """llama.cpp and Together have the schema without its wrapper."""
        if not (isinstance(value, dict) and value.keys() == {"type", "schema"}) or value["type"] == "text":
            return value
        return {"type": "json_schema", "json_schema": {"schema": value["schema"]}}


class StructuredOutputs(Part):
    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class ConstraintFields(Body):
    """OpenAI's `response_format`, vLLM's `structured_outputs`, or its former names; one of them at most."""

    IGNORED = OF_REQUESTS
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    _renaming: Callable[[str], str] = PrivateAttr(default=str)
    """Gives the client's name of a field, where the client sent another kind of body."""

    def constraint(self) -> Constraint | None:
        """What the answer must match, if anything. Raises ApiError for several constraints, UserError
        IDLM-0474."""
        found = self._composed()
        if len(found) > 1:
            names = " and ".join(name for name, _, _ in found)
            raise FieldError(found[1][0], f"an answer has one constraint, not {names}")
        return Constraint(kind=found[0][1], text=found[0][2]) if found else None

    @property
    def has_grammar(self) -> bool:
        """Whether the client has written the grammar of the answer."""
        return any(kind == "grammar" for _, kind, _ in self._given())

    def client_name(self, field: str) -> str:
        """The name of a field, or of a sampling setting, in the body that the client sent."""
        if field == "constraint":
            field = [*(given for given, _, _ in self._given()), field][0]
        return self._renaming(field)

    def named(self, error: ApiError) -> ApiError:
        """An error with the client's names of fields."""
        return error.renamed(self.client_name) if isinstance(error, FieldError) else error

    def _composed(self) -> list[tuple[str, ConstraintKind, Any]]:
        """The constraints that act: of those given, and of calls. Raises UserError IDLM-0474."""
        return self._given()

    def _given(self) -> list[tuple[str, ConstraintKind, Any]]:
        """Field, kind and text of every constraint in a field, unchecked."""
        outputs = (self.structured_outputs or StructuredOutputs()).model_dump(by_alias=True)
        given: list[tuple[str, ConstraintKind, Any]] = [
            *((f"structured_outputs.{name}", kind, outputs[name]) for name, kind in GUIDES.items()),
            ("structured_outputs.json_object", "json_object", "" if outputs["json_object"] else None),
            *((f"guided_{name}", kind, getattr(self, f"guided_{name}")) for name, kind in GUIDES.items()),
        ]
        answer = self.response_format or ResponseFormat(type="text")
        if answer.json_schema is not None and answer.type != "json_schema":
            rule = f"type {answer.type!r} has none; give type 'json_schema'"
            raise FieldError("response_format.json_schema", rule)
        if answer.type == "json_object":
            given.append(("response_format", "json_object", ""))
        elif answer.type == "json_schema":
            if answer.json_schema is None:
                raise FieldError("response_format.json_schema", "Field required")
            given.append(("response_format", "json_schema", answer.json_schema.schema_))
        return [one for one in given if one[2] is not None]
