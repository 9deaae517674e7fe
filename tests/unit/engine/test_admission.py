"""Clients of a server: who they are, how much of the queue each may fill, and who is admitted next."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.request import QueueOrder, Request, Waiting
from idlm.infer.server.config import ServeConfig
from idlm.infer.server.errors import ApiError
from idlm.infer.server.guard import Guard, keys_of
from idlm.infer.server.metrics import Metrics
from idlm.infer.server.protocol.requests import ChatRequest, CompletionRequest
from idlm.infer.server.service import LONG_CHARS, Service


def client_of(api_key: str | None, *headers: str) -> tuple[int, str | None]:
    """Status of a request with these authorizations, and the client that the application sees."""
    seen: list[str] = []
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["state"]["client"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    lines = [(b"authorization", one.encode()) for one in headers]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/v1/models",
        "raw_path": b"/v1/models",
        "query_string": b"",
    }
    scope |= {"headers": lines, "client": ("10.0.0.7", 1), "state": {}}
    guard = Guard(app, ServeConfig(), api_key=api_key, observe=lambda status: None)
    asyncio.run(guard(scope, receive, send))
    return statuses[0], seen[0] if seen else None


def test_a_client_is_its_key_or_its_address() -> None:
    assert keys_of(" a, b,,") == ["a", "b"] and keys_of(None) == keys_of("") == keys_of(",") == []
    assert client_of(None) == client_of(",") == (200, "address 10.0.0.7")
    assert client_of("a,b", "Bearer a") == (200, "key 0")
    assert client_of("a,b", "Bearer b") == client_of("a,b", "Bearer b", "Bearer a") == (200, "key 1")
    for wrong in ([], ["Bearer a,b"], ["Bearer c"], ["Bearer "], ["Bearer a", "Bearer c"]):
        assert client_of("a,b", *wrong) == (401, None), wrong


def service(*, num_keys: int, open_: dict[str, int]) -> Service:
    """A server of 4 lanes, where 4 more answers may wait, with answers under way."""
    engine = SimpleNamespace(
        info=SimpleNamespace(settings={"max_num_seqs": 4}),
        state="ready",
        num_open=sum(open_.values()),
        num_open_of=lambda client: open_.get(client, 0),
    )
    found = Service(ServeConfig(max_waiting=4), engine, Metrics("m"), "m")  # type: ignore[arg-type]
    found.num_keys, found._has_tokenizer = num_keys, True
    return found


def admitted(found: Service, client: str, num_answers: int) -> int | None:
    """The status of a refusal; None: the request is taken."""
    body = CompletionRequest(prompt="a", n=num_answers)
    try:
        assert isinstance(found._admit(body, client, num_prompts=1), SamplingParams)
    except ApiError as error:
        return error.status
    return None


@pytest.mark.parametrize(
    ("num_keys", "open_", "num_answers", "expected"),
    [
        (0, {"a": 6}, 2, None),
        (0, {"a": 6}, 3, 429),
        (1, {"a": 7}, 1, None),
        (2, {"a": 4}, 1, 429),
        (2, {"b": 4}, 4, None),
        (2, {"b": 4}, 5, 400),
        (2, {"a": 1, "b": 3}, 4, 429),
        (2, {"a": 3, "b": 4}, 2, 429),
        (20, {"a": 0, "b": 1}, 1, None),
    ],
)
def test_each_key_has_a_share_of_the_queue(
    num_keys: int, open_: dict[str, int], num_answers: int, expected: int | None
) -> None:
    assert admitted(service(num_keys=num_keys, open_=open_), "a", num_answers) == expected


def test_a_request_says_its_priority_and_user() -> None:
    messages = [{"role": "user", "content": "a"}]
    assert ChatRequest(messages=messages).turn("k") == QueueOrder("k", 0, "")  # type: ignore[arg-type]
    given = CompletionRequest(prompt="a", priority=-2, user="u" * 999)
    assert given.turn("k") == QueueOrder("k", -2, "u" * 256)
    assert CompletionRequest(prompt="a", user={"a": 1}).turn("k").user == ""


def test_long_texts_have_a_thread_of_their_own() -> None:
    """A short one is encoded while a long one is under way."""
    found, may_continue, order = service(num_keys=0, open_={}), threading.Event(), list[int]()
    found.tokenizer, found._tokenizers = "short", ("short", "long")
    found.client.info.max_length = 99

    def encode(tokenizer: str, prompt: str, *, max_tokens: int) -> list[int]:
        assert tokenizer == ("long" if len(prompt) > 1 else "short")
        assert len(prompt) == 1 or may_continue.wait(60)
        order.append(len(prompt))
        return [len(prompt)]

    async def both() -> None:
        call = functools.partial(encode)
        long = asyncio.create_task(found.encode(call, ["a" * (LONG_CHARS + 1)], 2, "a"))
        await asyncio.sleep(0)
        assert await found.encode(call, ["a"], 1, "b") == [[1]]
        assert found._encoding == Counter(a=2)
        may_continue.set()
        assert await long == [[LONG_CHARS + 1]]

    asyncio.run(both())
    assert order == [1, LONG_CHARS + 1] and not found._encoding


def test_a_client_with_a_slow_conversation_keeps_to_the_other_thread() -> None:
    found, used = service(num_keys=0, open_={}), list[str]()
    found.tokenizer, found._tokenizers = "short", ("short", "long")
    found.client.info.max_length = 99

    def encode(tokenizer: str, prompt: str, *, max_tokens: int) -> list[int]:
        used.append(tokenizer)
        if prompt == "slow":
            raise UserError("IDLM-0217", "slow", fix="none") from TimeoutError()
        return [1]

    async def send(client: str, prompt: str) -> None:
        with contextlib.suppress(UserError):
            await found.encode(functools.partial(encode), [prompt], 1, client)

    async def run() -> None:
        for client, prompt in (("a", "slow"), ("a", "fast"), ("b", "fast")):
            await send(client, prompt)

    asyncio.run(run())
    assert used == ["short", "long", "short"]


def test_long_texts_of_clients_are_encoded_in_turn() -> None:
    """All of a conversation counts: its reasoning, calls and tools, and not its content alone."""
    found, order = service(num_keys=0, open_={}), list[str]()
    found.tokenizer, found._tokenizers = "short", ("short", "long")
    found.client.info.max_length = 99
    long = "a" * (LONG_CHARS + 1)
    call = {"function": {"name": "f", "arguments": {"text": [long]}}}
    given: list[tuple[str, Any, Any]] = [
        ("a", {"content": long}, ()),
        ("a", {"content": None, "reasoning_content": long}, ()),
        ("a", {"content": "", "tool_calls": [call]}, ()),
        ("b", {"content": ""}, ({"function": {"name": "f", "description": long}},)),
    ]

    def encode(tokenizer: str, messages: Any, *, max_tokens: int, client: str, tools: Any) -> list[int]:
        assert tokenizer == "long"
        order.append(client)
        return [1]

    async def run() -> None:
        calls = (
            (functools.partial(encode, client=one, tools=tools), each, one) for one, each, tools in given
        )
        await asyncio.gather(*(found.encode(call, [[each]], 1, client) for call, each, client in calls))

    asyncio.run(run())
    assert order == ["a", "b", "a", "a"]


def request(name: str, index: int = 0, *, client: str = "", priority: int = 0, user: str = "") -> Request:
    return Request(
        request_id=name,
        index=index,
        prompt_ids=[1],
        params=SamplingParams(),
        stop_ids=frozenset(),
        max_length=9,
        turn=QueueOrder(client, priority, user, name),
    )


def queued(requests: Iterable[Request]) -> Waiting:
    waiting = Waiting()
    for one in requests:
        waiting.add(one)
    return waiting


def order(waiting: Waiting) -> list[str]:
    names = []
    while waiting:
        first = waiting.first()
        assert waiting.pop() is first
        names.append(first.request_id)
    return names


def test_clients_requests_and_users_take_turns() -> None:
    waiting = queued(request(str(number), client="many") for number in range(500))
    assert [waiting.pop().request_id for _ in range(3)] == ["0", "1", "2"]
    waiting.add(request("one", client="few"))
    assert order(waiting)[:3] == ["3", "one", "4"]
    large = [request("large", index) for index in range(1024)]
    names = order(queued([*large, request("small"), request("two", 0), request("two", 1)]))
    assert names[:6] == ["large", "small", "two", "large", "two", "large"]
    waiting = queued([request(f"a{n}", user="a") for n in range(3)] + [request("b0", user="b")])
    assert order(waiting) == ["a0", "b0", "a1", "a2"]
    own = [request("late", client="a", priority=3), request("soon", client="a", priority=-3)]
    other = [request("x", client="b", priority=9), request("y", client="b")]
    assert order(queued([*own, *other])) == ["soon", "y", "late", "x"]


def test_what_has_interrupted_comes_first_and_nothing_is_lost_or_twice() -> None:
    rng, waiting, left = random.Random(0), Waiting(), set[Request]()
    interrupted: list[Request] = []
    for number in range(2000):
        match rng.randrange(5):
            case 0 | 1:
                one = request(str(number), client=rng.choice("ab"), priority=rng.randrange(2))
                waiting.add(one)
                left.add(one)
            case 2 if waiting:
                interrupted.append(waiting.pop())
                left.remove(interrupted[-1])
            case 3 if left:
                one = rng.choice(sorted(left, key=lambda each: each.request_id))
                waiting.remove(one)
                left.remove(one)
            case 4 if interrupted:
                admitting = [waiting.first()] if waiting else []
                waiting.put_back([*interrupted, *(one for one in admitting if one not in interrupted)])
                left |= set(interrupted)
                assert waiting.first() is interrupted[0]
                interrupted = []
        assert len(waiting) == len(left) and set(waiting) == left
    assert {one.request_id for one in left} == set(order(waiting))


def test_who_has_no_lane_while_others_have_several() -> None:
    many = [request(str(number), client="many") for number in range(9)]
    few = [request("x", client="few"), request("y", client="few", user="u")]
    running, new = [*many[:2], few[0], many[2]], request("z", client="new")
    waiting = queued([*many[3:], few[1]])
    assert waiting.starved(running) is None, "its client has a lane, and its other user only one"
    waiting.add(new)
    assert waiting.starved(running) is new
    waiting.prefer(new)
    assert order(waiting)[:2] == ["z", "3"]
    assert queued([new]).starved([many[0], few[0]]) is None
    waiting.put_back([many[1]])
    assert waiting.starved([]) is None


def test_a_request_of_one_answer_is_beside_one_that_has_many() -> None:
    large, small = [request("large", index) for index in range(4)], request("small")
    running = [large[0], request("other"), *large[1:3]]
    assert queued([large[3], small]).starved(running) is small
    assert queued([large[3]]).starved(running) is None
    assert queued([small, request("urgent", priority=-1)]).starved(running) is None
