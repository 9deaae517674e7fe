"""The definition of compaction, sequence by sequence in plain Python. Rules in README.md."""

from __future__ import annotations

from collections.abc import Sequence


def compact_reference(
    rows: Sequence[tuple[list[int], list[int]]],
    *,
    retained: set[int],
    needs_all: list[bool],
    waits: list[bool],
    scheduled: list[int] | None,
    num_waits: list[int] | None,
    capacity: int | None,
    size: int,
    drops_stored: bool,
) -> tuple[list[list[int]], list[bool], list[int]]:
    """The numbers of the rows that each sequence goes on with, which sequences wait, and how many rows each
    asked for.

    `rows`: of each sequence the rows before its block and those of the block; `retained`: rows that remain;
    `size` of a block; `drops_stored`: the block before may lose rows as well."""
    left, needs = [], []
    for b, (before, block) in enumerate(rows):
        remains = [row for row in block if needs_all[b] or row in retained]
        if drops_stored:
            before = before[:-size] + [row for row in before[-size:] if row in retained]
        num_scheduled = len(before) if scheduled is None else min(len(before), scheduled[b])
        left.append((before[:num_scheduled], before[num_scheduled:] + remains))
        needs.append(len(left[-1][1]))
    demand = [len(first) + len(then) for first, then in left]
    if capacity is None or num_waits is None:
        return [first + then for first, then in left], list(waits), demand
    waits, taken = list(waits), sum(len(first) for first, _ in left)
    for b in sorted(range(len(rows)), key=lambda b: (-num_waits[b], needs[b], b)):
        taken += needs[b]
        waits[b] = waits[b] or (needs[b] > 0 and taken > capacity)
    return [first if waits[b] else first + then for b, (first, then) in enumerate(left)], waits, demand


def wanted_reference(
    wanted: Sequence[Sequence[int]], order: Sequence[int], left: Sequence[int], *, num_head: int | None
) -> tuple[list[tuple[int, int]], list[int | None], list[int], list[bool]]:
    """The head's rows, each as (position among the rows that are left, number of the wanted row); for each
    wanted row its row of the head, None: none; the rows that each sequence requested, and which do not fit.

    `wanted`: of each sequence the rows that it wants; their numbers follow one another in the `order` of
    sequences. `left`: the rows that are left. With `num_head` None a row of the head has the number of its
    wanted row."""
    head: list[tuple[int, int]] = []
    numbers: list[int | None] = []
    demand, waits = [0] * len(wanted), [False] * len(wanted)
    for b in order:
        for row in wanted[b]:
            numbers.append(None)
            if row not in left:
                continue
            demand[b] += 1
            if num_head is not None and len(head) >= num_head:
                waits[b] = True
                continue
            numbers[-1] = len(numbers) - 1 if num_head is None else len(head)
            head.append((left.index(row), len(numbers) - 1))
    return head, numbers, demand, waits
