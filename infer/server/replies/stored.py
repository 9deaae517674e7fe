"""Responses that clients may read again or continue (`previous_response_id`), in memory alone. They are lost
when the server ends, and the oldest ones go when they are more than `max_stored` bytes."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from idlm.infer.server.errors import FieldError, dump


class Stored(NamedTuple):
    """A response and the items that are its input, both as JSON."""

    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)

    @property
    def output(self) -> Any:
        """The items of the answer."""
        return json.loads(self.response)["output"]

    def conversation(self) -> list[dict[str, Any]]:
        """The items of input and output."""
        return [*json.loads(self.items), *self.output]

    def page(self, *, after: str | None, limit: int, is_reversed: bool) -> dict[str, Any]:
        """A list of input items, from the one after the item with the id `after` on."""
        items = json.loads(self.items)[:: -1 if is_reversed else 1]
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise FieldError("after", f"no item has the id {after[:80]!r}")
            items = items[ids.index(after) + 1 :]
        first, last = (items[0]["id"], items[:limit][-1]["id"]) if items else (None, None)
        about = {"object": "list", "data": items[:limit], "has_more": len(items) > limit}
        return {**about, "first_id": first, "last_id": last}


class ResponseStore:
    """The responses of one client, by id; together at most `max_size` bytes, 0 stores none."""

    def __init__(self, max_size: int) -> None:
        self.max_size, self._size = max_size, 0
        self._stored = OrderedDict[str, Stored]()

    def put(self, response: dict[str, Any], items: Iterable[dict[str, Any]]) -> bool:
        """Store a response, and drop those that were not read for longest. False if it is too large."""
        added = Stored(dump(response), dump(list(items)))
        if added.size > self.max_size:
            return False
        self._stored[response["id"]] = added
        self._size += added.size
        while self._size > self.max_size:
            self._size -= self._stored.popitem(last=False)[1].size
        return True

    def items(self, names: Iterable[str]) -> dict[str, Any]:
        """Items of stored answers by id, at least those of `names` that are stored."""
        owners = {f"resp_{''.join(name.split('_')[1:2])}" for name in names} & self._stored.keys()
        return {item["id"]: item for owner in owners for item in self._stored[owner].output}

    def get(self, name: str) -> Stored:
        """A stored response. Raises ApiError 404 for an id that is unknown."""
        return self._found(name, "response_id", 404, "keep what POST /v1/responses answers")

    def previous(self, name: str) -> Stored:
        """A stored response to continue. Raises ApiError 400, as OpenAI's, for an unknown id."""
        fix = "give all items of the conversation as input, without previous_response_id"
        return self._found(name, "previous_response_id", 400, fix)

    def _found(self, name: str, param: str, status: int, fix: str) -> Stored:
        if name not in self._stored:
            lost = "it was deleted, had store=false, was dropped for others, or is older than this server"
            why = lost if self.max_size else "max_stored=0 stores none"
            rule = f"no response {name[:80]!r} is stored ({why}); {fix}"
            raise FieldError(param, rule, status=status, code=f"{param.removesuffix('_id')}_not_found")
        self._stored.move_to_end(name)
        return self._stored[name]

    def delete(self, name: str) -> None:
        """Forget a response. Raises ApiError 404 for an id that is unknown."""
        self._size -= self.get(name).size
        del self._stored[name]
