"""What of a conversation its rendering lacks: chat templates silently leave out roles and fields that they do
not support."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from idlm.errors import UserError
from idlm.text.thoughts import CLOSE, OPEN, REASONING_KEYS, TAGS, Rendering, reasoning, thought_of

Message = Mapping[str, Any]
Replace = Callable[["TurnText"], str]
Redraw = Callable[[Sequence[Message], Sequence[Message]], tuple[str, Mapping[int, str]]]
MAX_KNOWN = 4096
SURE_LENGTH = 24
"""Characters of a text that does not occur by chance in other turns and the template."""


@dataclass(frozen=True, slots=True)
class TurnText:
    """A text of turn `turn` (-1: the tools); `is_thought` for an assistant's reasoning."""

    turn: int
    role: str
    field: str
    text: str
    is_thought: bool = False

    @property
    def kind(self) -> str:
        """What such pieces are, for counts."""
        return "tools" if self.turn < 0 else f"{self.field} of {self.role} turns"

    @property
    def name(self) -> str:
        """What it is, for messages."""
        of_turn = f"{self.field} of the {self.role} turn at message {self.turn}"
        return "the tools" if self.turn < 0 else of_turn


def left_out(
    messages: Sequence[Message],
    tools: Sequence[Message],
    whole: str,
    answers: Mapping[int, str],
    *,
    redraw: Redraw,
    known: dict[Any, frozenset[int]],
) -> list[TurnText]:
    """Return the pieces of a conversation that its rendering lacks: `whole`, and `answers` by turn, where the
    pieces of those turns must be.

    A short piece occurs anywhere by chance, and one of two equal ones hides the other. For these, `redraw`
    renders the same roles and fields with words that do neither; `known` stores the numbers of the pieces
    that vanish from each such form."""
    pieces = _pieces(messages, tools)
    renderings, everywhere = {turn: Rendering(text) for turn, text in answers.items()}, Rendering(whole)
    lost = [not renderings.get(piece.turn, everywhere).has(piece.text) for piece in pieces]
    times = Counter(piece.text for piece in pieces)
    doubtful = [
        number
        for number, piece in enumerate(pieces)
        if not lost[number] and (piece.turn < 0 or len(piece.text) < SURE_LENGTH or times[piece.text] > 1)
    ]
    if doubtful:
        form = (
            tuple(answers),
            *((piece.turn, piece.role, piece.field, piece.is_thought) for piece in pieces),
        )
        if form not in known:
            if len(known) >= MAX_KNOWN:
                known.clear()
            known[form] = _vanishing(messages, tools, pieces, redraw)
        for number in doubtful:
            lost[number] = number in known[form]
    return [piece for piece, is_lost in zip(pieces, lost, strict=True) if is_lost]


def kinds_left_out(
    messages: Sequence[Message],
    tools: Sequence[Message],
    *,
    redraw: Callable[[Sequence[Message], Sequence[Message]], str],
    known: dict[int, list[str]],
) -> list[str]:
    """Return the kinds of texts that the template leaves out whatever they say, but for thoughts, of which
    most templates write the last one alone. `known` stores them by the hash of roles and fields."""
    pieces = _pieces(messages, tools)
    form = hash(tuple((piece.turn, piece.role, piece.field, piece.is_thought) for piece in pieces))
    kinds = known.get(form)
    if kinds is None:
        lost = _vanishing(messages, tools, pieces, lambda *changed: (redraw(*changed), {}))
        kinds = sorted({pieces[number].kind for number in lost if not pieces[number].is_thought})
        if len(known) >= MAX_KNOWN:
            known.clear()
        known[form] = kinds
    return kinds


def _vanishing(
    messages: Sequence[Message], tools: Sequence[Message], pieces: Sequence[TurnText], redraw: Redraw
) -> frozenset[int]:
    """Return the numbers of the pieces that the template leaves out whatever their text."""
    words = [f"zq{number}qz" for number in range(len(pieces))]
    rest = iter(words)
    changed = [_changed(message, turn, lambda _: next(rest)) for turn, message in enumerate(messages)]
    changed_tools = [_changed_tool(tool, lambda _: next(rest)) for tool in tools]
    try:
        whole, answers = redraw(changed, changed_tools)
    except UserError:
        # The template checks what it is given: only the texts themselves show what it leaves out.
        return frozenset()
    return frozenset(
        number
        for number, (piece, word) in enumerate(zip(pieces, words, strict=True))
        if word not in answers.get(piece.turn, whole)
    )


def _pieces(messages: Sequence[Message], tools: Sequence[Message]) -> list[TurnText]:
    found: list[TurnText] = []

    def noted(piece: TurnText) -> str:
        found.append(piece)
        return piece.text

    for turn, message in enumerate(messages):
        _changed(message, turn, noted)
    for tool in tools:
        _changed_tool(tool, noted)
    return found


def _changed(message: Message, turn: int, replace: Replace) -> dict[str, Any]:
    """Return the message with each of its texts replaced, in a fixed order."""
    role = str(message["role"])
    changed = dict(message)
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        changed["content"] = _changed_content(message, content, turn, replace)
    if role == "assistant" and reasoning(message):
        word = replace(TurnText(turn, role, REASONING_KEYS[0], reasoning(message), is_thought=True))
        changed |= {key: word for key in REASONING_KEYS if message.get(key)}
    calls = message.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        changed["tool_calls"] = [_changed_call(call, turn, replace) for call in calls]
    return changed


def _changed_content(message: Message, content: str, turn: int, replace: Replace) -> str:
    role = str(message["role"])
    if role != "assistant" or CLOSE not in content:
        return replace(TurnText(turn, role, "content", content))
    thought = thought_of({"content": content})
    parts = TAGS.split(content)
    for index, part in enumerate(parts):
        if part.strip() and part not in (OPEN, CLOSE):
            is_thought = thought is not None and part == thought.text
            word = replace(TurnText(turn, role, "content", part, is_thought=is_thought))
            parts[index] = part.replace(part.strip(), word)
    return "".join(parts)


def _changed_call(call: Any, turn: int, replace: Replace) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = {key: function[key] for key in ("name", "arguments") if key in function}
    changed = {**function, **_changed_leaves(given, turn, replace)}
    return {**call, "function": changed} if "function" in call else changed


def _changed_leaves(value: Any, turn: int, replace: Replace) -> Any:
    if isinstance(value, Mapping):
        return {key: _changed_leaves(inner, turn, replace) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_changed_leaves(inner, turn, replace) for inner in value]
    if value is None or value == "":
        return value
    # A template may write numbers and truth values in other ways, and still has to write them.
    return replace(TurnText(turn, "assistant", "tool_calls", value if isinstance(value, str) else ""))


def _changed_tool(tool: Message, replace: Replace) -> dict[str, Any]:
    """The same for the names and descriptions of a tool and its parameters."""
    function = tool.get("function", tool)
    changed: dict[str, Any] = _changed_schema(function if isinstance(function, Mapping) else {}, replace)
    return {**tool, "function": changed} if "function" in tool else changed


def _changed_schema(value: Any, replace: Replace) -> Any:
    if isinstance(value, (list, tuple)):
        return [_changed_schema(inner, replace) for inner in value]
    if not isinstance(value, Mapping):
        return value
    changed: dict[str, Any] = {}
    for key, inner in value.items():
        if key in ("name", "description") and isinstance(inner, str) and inner.strip():
            changed[key] = replace(TurnText(-1, "", "tools", inner))
        elif key == "properties" and isinstance(inner, Mapping):
            changed[key] = {
                replace(TurnText(-1, "", "tools", name)): _changed_schema(schema, replace)
                for name, schema in inner.items()
            }
        else:
            changed[key] = _changed_schema(inner, replace)
    return changed
