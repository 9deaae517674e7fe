"""Fields of requests that say what an answer must match: OpenAI's `response_format`, and vLLM's
`structured_outputs` with its former names, `guided_*`. A request has one of them at most."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from idlm.contracts import Constraint, ConstraintKind
from idlm.infer.server.errors import ApiError, FieldError
from idlm.infer.server.protocol.body import Text

Choices = Annotated[list[Text], Field(min_length=1)]
Schema = dict[str, Any] | Text


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class NamedSchema(_Part):
    """OpenAI's wrapper of a schema, which always applies, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Part):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(_Part):
    """vLLM's `structured_outputs`."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class ConstraintFields(BaseModel):
    """The fields of a request."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    def constraint(self) -> Constraint | None:
        """What the answer must match; None: nothing. Raises ApiError for more than one constraint, and
        UserError IDLM-0474."""
        found = self._composed()
        if len(found) > 1:
            names = " and ".join(name for name, _, _ in found)
            raise FieldError(found[1][0], f"an answer has one constraint, not {names}")
        return Constraint(kind=found[0][1], text=found[0][2]) if found else None

    @property
    def has_whole_constraint(self) -> bool:
        """Whether the whole answer must match something."""
        return bool(self._given())

    def named(self, error: ApiError) -> ApiError:
        """An error about the constraint with the field that has it."""
        fields = [*(field for field, _, _ in self._given()), *(["tools"] if self._constrains_calls else [])]
        if error.param != "constraint" or not fields:
            return error
        message = error.message.removeprefix("constraint: ").removeprefix("constraint: ")
        return FieldError(fields[0], message, status=error.status, code=error.code)

    @property
    def _constrains_calls(self) -> bool:
        """Whether calls must follow a grammar, whatever else is given."""
        return False

    def _composed(self) -> list[tuple[str, ConstraintKind, Any]]:
        """The constraints that act: of those given, and of calls. Raises UserError IDLM-0474."""
        return self._given()

    def _given(self) -> list[tuple[str, ConstraintKind, Any]]:
        """Field, kind and text of every constraint in a field, unchecked."""
        outputs = self.structured_outputs or StructuredOutputs()
        given: list[tuple[str, ConstraintKind, Any]] = [
            ("structured_outputs.json", "json_schema", outputs.json_),
            ("structured_outputs.regex", "regex", outputs.regex),
            ("structured_outputs.choice", "choice", outputs.choice),
            ("structured_outputs.grammar", "grammar", outputs.grammar),
            ("structured_outputs.json_object", "json_object", "" if outputs.json_object else None),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
        ]
        answer = self.response_format
        if answer is not None and answer.type == "json_object":
            given.append(("response_format", "json_object", ""))
        elif answer is not None and answer.type == "json_schema":
            schema = answer.json_schema
            if schema is None:
                raise FieldError("response_format.json_schema", "Field required")
            given.append(("response_format", "json_schema", schema.schema_))
        return [one for one in given if one[2] is not None]
