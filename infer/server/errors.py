"""Errors of the HTTP interface, in the shape that OpenAI's clients read: message, type, param, code."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.server.messages import FAULT

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
RETRY_SECONDS = 1
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
OPENAI_CODES = {
    "IDLM-0412": "context_length_exceeded",
    "IDLM-0413": "context_length_exceeded",
    "queue_full": "rate_limit_exceeded",
}
"""Our codes for what OpenAI has a code for, by which its clients shorten, wait or fall back."""
UNION_TAGS = re.compile(
    r"str|int|float|bool|dict|(list|constrained|dict|nullable|tagged)\b.*|.*\[.*|[A-Z]\w*"
)
"""Parts of pydantic's locations that name an alternative of a union, not a field."""
FIELD_NAME = re.compile(r"(?<![\w.'\"])[a-z]+(?:_[a-z]+)+(?:\.[a-z_]+)*(?![\w'\"])")
"""Names of fields in a text that are no words of English, nor what a client has sent."""
REQUEST_ID = re.compile(r"^request '[\d-]+':? ")
"""How the engine's messages begin; clients have another id."""


class ApiError(Exception):
    param: str | None = None

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer; `code` is OpenAI's, if it has one, and then ours is `idlm_code`."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        if self.code in OPENAI_CODES:
            error |= {"code": OPENAI_CODES[self.code], "idlm_code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The HTTP response; with Retry-After if the same request may succeed later."""
        headers = {"retry-after": str(RETRY_SECONDS)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body(), status=self.status, headers=headers)


class FieldError(ApiError):
    """A request is refused because `param`, one of its fields, breaks the `rule`."""

    param: str

    def __init__(self, param: str, rule: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(status, f"{param}: {rule}", code=code)
        self.param, self.rule = param, rule

    def renamed(self, name_of: Callable[[str], str]) -> FieldError:
        """The same under other names of fields, also in the rule."""
        rule = FIELD_NAME.sub(lambda found: name_of(found[0]), self.rule)
        return FieldError(name_of(self.param), rule, status=self.status, code=self.code)


def dump(content: Any) -> bytes:
    """JSON as bytes; text that is not valid Unicode is escaped, and what Python's `splitlines` and httpx's
    `iter_lines` take for the end of a line."""
    text = ENCODER.encode(content)
    for char, escaped in (("\x85", r"\u0085"), ("\u2028", r"\u2028"), ("\u2029", r"\u2029")):
        text = text.replace(char, escaped)
    return text.encode("utf-8", "backslashreplace")


def json_response(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(content), status_code=status, headers=headers, media_type="application/json")


def engine_unavailable(why: str) -> ApiError:
    return ApiError(503, f"{why}; try again later", code="engine_unavailable")


def internal_error() -> ApiError:
    """A mistake of ours. Details may be confidential and go to the log only."""
    return ApiError(500, "the server failed; its log has the reason", code=FAULT)


def from_user_error(error: UserError, *, prompt_field: str) -> ApiError:
    """An error of the engine's checks: about the sampling setting that its message names, else the prompt."""
    message = REQUEST_ID.sub("", error.message)
    words = re.findall(r"\w+", message)
    param = next((word for word in words if word in SamplingParams.__dataclass_fields__), prompt_field)
    return FieldError(param, f"{message.removeprefix(f'{param}: ')} ({error.fix})", code=error.code)


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first error that pydantic found in a body; of alternatives, that of the one which fails deepest."""
    if errors[0]["type"] == "json_invalid":
        return FieldError("body", f"not valid JSON ({errors[0]['ctx']['error']})")
    paths = [[str(part) for part in error["loc"] if part not in ("body", "query")] for error in errors]
    fields = [[part for part in path if not UNION_TAGS.fullmatch(part)] for path in paths]
    same = [number for number, field in enumerate(fields) if field[:1] == fields[0][:1]]
    kinds = [error["type"] for error in errors]
    # An alternative of another type fails as deep as one whose rule is broken. A wrong name is the clearest.
    chosen = max(
        same, key=lambda at: (len(fields[at]), kinds[at] == "literal_error", not kinds[at].endswith("_type"))
    )
    param = ".".join(fields[chosen]) or "body"
    message = errors[chosen]["msg"] if fields[0] else "give a JSON object, with content-type application/json"
    if kinds[chosen] == "literal_error":
        message += f", not {reprlib.repr(errors[chosen]['input'])}"
    return FieldError(param, message)
