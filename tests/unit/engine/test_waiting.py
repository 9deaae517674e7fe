"""Who is admitted next: in turn over clients, users and calls, by priority within a client."""

from __future__ import annotations

import random
from collections.abc import Iterable

from idlm.contracts import SamplingParams
from idlm.infer.request import QueueOrder, Request, Waiting


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


def test_requests_of_one_client_come_in_order() -> None:
    assert order(queued(request(str(number)) for number in range(5))) == list("01234")


def test_a_second_client_waits_for_one_turn() -> None:
    waiting = queued(request(str(number), client="many") for number in range(500))
    assert [waiting.pop().request_id for _ in range(3)] == ["0", "1", "2"]
    waiting.add(request("one", client="few"))
    assert order(waiting)[:3] == ["3", "one", "4"]


def test_a_request_waits_for_one_answer_of_each_other_request() -> None:
    large = [request("large", index) for index in range(1024)]
    names = order(queued([*large, request("small"), request("two", 0), request("two", 1)]))
    assert names[:6] == ["large", "small", "two", "large", "two", "large"]


def test_users_of_a_client_take_turns() -> None:
    waiting = queued([request(f"a{n}", user="a") for n in range(3)] + [request("b0", user="b")])
    assert order(waiting) == ["a0", "b0", "a1", "a2"]


def test_priority_is_that_within_a_client() -> None:
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
