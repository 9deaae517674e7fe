"""The answer of /v1/responses, which is that of a chat in another form: an object whose output is a list of
items (reasoning, text, calls), or the typed events of a stream."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from idlm.infer.server.engine_client import Generation
from idlm.infer.server.errors import ApiError, dump
from idlm.infer.server.messages import AnswerEvent
from idlm.infer.server.protocol.requests import ChatRequest
from idlm.infer.server.protocol.responses import KINDS, ResponseRequest, new_id
from idlm.infer.server.replies.choices import ChatReply, Shown
from idlm.infer.server.replies.stored import ResponseStore

Event = tuple[str, dict[str, Any]]
"""Type and fields. They are those of the moment, so that an event is sent before the next one is made."""
PARTS = {"reasoning_content": "reasoning_text", "content": "output_text"}
"""Types of the parts that hold what a delta of a chat has under these names."""
ARGUMENTS = {"function_call": "arguments", "custom_tool_call": "input"}
"""The field of a call's arguments, by its type."""


class ResponseReply(ChatReply):
    """The response to `body`, which is `chat` as a chat; `store` gets it when it is whole, if it should."""

    def __init__(
        self,
        body: ResponseRequest,
        chat: ChatRequest,
        generation: Generation,
        shown: Shown,
        store: ResponseStore,
    ) -> None:
        super().__init__(chat, generation, shown)
        self._body, self._store, self._numbers = body, store, itertools.count()
        self._items: list[dict[str, Any]] = []
        about = {"id": new_id("resp"), "object": "response", "created_at": int(time.time())}
        empty = {"error": None, "incomplete_details": None, "usage": None, "output": self._items}
        self._response = {**about, "model": shown.model_name, **body.described(generation.params), **empty}
        self._response["store"] = body.store is not False and store.max_size > 0
        # Of the open text: its name in deltas, its pieces, and its log-probabilities, which are those of all
        # tokens so far, as in a chat; no event has `_new_scores` yet.
        self._open, self._pieces = "", list[str]()
        self._scores, self._new_scores = list[dict[str, Any]](), list[dict[str, Any]]()

    def answer(self, done: Mapping[int, AnswerEvent]) -> dict[str, Any]:
        for _ in self._events(done[0]):
            pass
        return self._finished()

    def chunks(self, index: int, event: AnswerEvent) -> bytes:
        self._count(index, event)
        return self._lines(self._events(event))

    def head(self) -> bytes:
        begun = {"response": self._response | {"status": "in_progress"}}
        return self._lines([("created", begun), ("in_progress", begun)])

    def tail(self) -> bytes:
        response = self._finished()
        return self._lines([(response["status"], {"response": response})])

    def failure(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        about = error.body()["error"] | {"code": code, "idlm_code": error.code}
        return self._lines([("failed", {"response": self._response | {"status": "failed", "error": about}})])

    def usage(self) -> dict[str, Any]:
        """That of a chat under the names of this interface."""
        usage = super().usage()
        for name, tokens in (("input", "prompt_tokens"), ("output", "completion_tokens")):
            usage[f"{name}_tokens"] = usage.pop(tokens)
            usage[f"{name}_tokens_details"] = usage.pop(f"{tokens}_details")
        usage["input_tokens_details"]["cache_write_tokens"] = 0
        return usage

    def _finished(self) -> dict[str, Any]:
        status, figures = self._status(), self._figures[0]
        response = {**self._response, "status": status, "usage": self.usage(), "exactness": figures.exactness}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        if response["store"]:
            response["store"] = self._store.put(response, [item.listed() for item in self._body.items()])
        return response

    def _status(self) -> str:
        return "incomplete" if self._figures[0].finish_reason == "length" else "completed"

    def _events(self, event: AnswerEvent) -> Iterator[Event]:
        """What an emission adds to the output."""
        self._new_scores += self._logprobs(0, event)["content"]
        for choice in self.deltas(0, event._replace(logprobs=[]), is_first=False):
            for name in PARTS:
                if text := choice["delta"].get(name):
                    yield from self._text(name, text)
            for call in choice["delta"].get("tool_calls", ()):
                yield from self._called(call)
        if event.figures is not None:
            if not self._items or (self._open == "content" and self._new_scores):
                yield from self._text("content", "")
            yield from self._close(self._status())

    def _text(self, name: str, text: str) -> Iterator[Event]:
        """A piece of reasoning or content."""
        if name != self._open:
            yield from self._close()
            self._open, self._pieces, self._scores = name, [], []
            part: dict[str, Any] = {"type": PARTS[name], "text": ""}
            item: dict[str, Any] = {"type": "reasoning", "summary": []}
            if name == "content":
                part |= {"annotations": [], "logprobs": []}
                item = {"type": "message", "role": "assistant"}
            yield self._added(item | {"content": []})
            self._items[-1]["content"].append(part)
            yield "content_part.added", {**self._where, "content_index": 0, "part": part}
        self._pieces.append(text)
        delta: dict[str, Any] = {**self._where, "content_index": 0, "delta": text}
        if name == "content":
            delta["logprobs"], self._new_scores = self._new_scores, []
            self._scores += delta["logprobs"]
        yield f"{PARTS[name]}.delta", delta

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """The end of the open text, if there is one."""
        if not self._open:
            return
        [part] = self._items[-1]["content"]
        where = {**self._where, "content_index": 0}
        part["text"] = "".join(self._pieces)
        scores = {"logprobs": self._scores} if self._open == "content" else {}
        part |= scores
        yield f"{part['type']}.done", {**where, "text": part["text"], **scores}
        yield "content_part.done", {**where, "part": part}
        self._open = ""
        yield self._item("done", status)

    def _called(self, call: dict[str, Any]) -> Iterator[Event]:
        """A part of a call: its name, or its arguments, which come whole."""
        if "id" in call:
            yield from self._close()
            about = {"type": "function_call", "call_id": call["id"]}
            about |= self._body.origin(call["function"]["name"])
            yield self._added(about | {ARGUMENTS[about["type"]]: ""})
            return
        item, text = self._items[-1], call["function"]["arguments"]
        field = ARGUMENTS[item["type"]]
        if field == "input":
            given = json.loads(text).get(field)
            text = given if isinstance(given, str) else text
        kind = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        yield f"{kind}.delta", {**self._where, "delta": text}
        item[field] = text
        yield f"{kind}.done", {**self._where, "name": item["name"], field: text}
        yield self._item("done", "completed")

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _added(self, item: dict[str, Any]) -> Event:
        """Another item of the output, whose id has that of the response in it."""
        prefix, key = KINDS[item["type"]][0], self._response["id"].removeprefix("resp_")
        self._items.append({"id": f"{prefix}_{key}_{len(self._items)}", **item})
        return self._item("added", "in_progress")

    def _item(self, what: str, status: str) -> Event:
        self._items[-1]["status"] = status
        return f"output_item.{what}", {"output_index": len(self._items) - 1, "item": self._items[-1]}

    def _lines(self, events: Iterable[Event]) -> bytes:
        """Events as they are sent, with their numbers."""
        lines = []
        for name, fields in events:
            kind = f"response.{name}"
            data = dump({"type": kind, "sequence_number": next(self._numbers), **fields})
            lines.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
        return b"".join(lines)
