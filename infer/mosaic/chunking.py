"""Lazy chunking: the fewest chunks with which a forward pass fits, found once per request.

Mosaic (section 4.4) computes everything whole while it fits, and else gives the operator that makes the peak
one chunk more, until the peak fits or cannot be cut. This file computes the same counts faster: as long as an
operator has more bytes alive than the capacity, no plan fits, so the paper's search cannot stop before its
count is large enough. That search never raises the count further, and the count depends on no other count,
because tensors of chunk size live in loops of one chunk count only. A binary search gives it. From there on
the search goes one chunk at a time, which matters only where first fit leaves a gap.

Departures from the paper: query rows are chunked too; a chunk has at least `min_rows` rows; the error names
the longest canvas that fits."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from idlm.errors import UserError
from idlm.infer.mosaic.planner import ArenaPlan, live_bytes, plan_template, storage_bytes
from idlm.infer.mosaic.template import K_QUERY, PassTemplate, Sizes, ceil_div
from idlm.infer.mosaic.trunk import TrunkShape, trunk_template

MIN_CHUNK_ROWS = 512
"""Rows of the smallest chunk: smaller products leave a large GPU idle and save no memory worth having."""

MIB = 1 << 20


@dataclass(frozen=True)
class Forward:
    """The templates of one forward pass: attention whole, and in query chunks (None: never chunked)."""

    whole: PassTemplate
    query: PassTemplate | None = None

    def template(self, chunks: Mapping[str, int]) -> PassTemplate:
        """Return the template for chunk counts: attention is whole while K_query is 1."""
        if chunks.get(K_QUERY, 1) == 1:
            return self.whole
        assert self.query is not None
        return self.query

    @cached_property
    def chunk_counts(self) -> tuple[str, ...]:
        """The chunk counts that a search may raise, in the order in which ops run."""
        template = self.query or self.whole
        names = dict.fromkeys(op.loop.chunks for op in template.ops if op.loop is not None)
        return tuple(name for name in names if name != K_QUERY or self.query is not None)


@dataclass(frozen=True, slots=True)
class Misfit:
    """A canvas that does not fit: the op whose bytes cannot be cut further, and the bytes needed there."""

    op_name: str
    num_bytes: int


def trunk_forward(shape: TrunkShape) -> Forward:
    return Forward(trunk_template(shape), trunk_template(shape, chunks_queries=True))


def plan_forward(
    forward: Forward, sizes: Sizes, *, capacity: int, min_rows: int = MIN_CHUNK_ROWS
) -> ArenaPlan:
    """Return the plan with the fewest chunks. UserError IDLM-0466 if it needs more than `capacity` bytes
    however it is chunked."""
    found = search(forward, sizes, capacity=capacity, min_rows=min_rows)
    if isinstance(found, ArenaPlan):
        return found
    length, wanted, group = sizes.length, sizes.wanted, sizes.group
    share = wanted / length
    nearest = max_length(forward, capacity=capacity, wanted_share=share, min_rows=min_rows, group=group)
    times = "" if group == 1 else f" {group} times"
    message = (
        f"a canvas of {length // group} rows, {wanted // group} of them wanted, does not fit{times}: "
        f"{found.op_name} needs {found.num_bytes} bytes ({ceil_div(found.num_bytes, MIB)} MiB) and "
        f"{max(0, capacity)} bytes ({max(0, capacity) // MIB} MiB) are free"
    )
    if not nearest:
        raise UserError("IDLM-0466", message, fix="free memory on the device")
    raise UserError(
        "IDLM-0466",
        message,
        fix=f"use at most {nearest} rows (prompt and gen_length), or free memory on the device",
    )


def search(
    forward: Forward, sizes: Sizes, *, capacity: int, min_rows: int = MIN_CHUNK_ROWS
) -> ArenaPlan | Misfit:
    """Return the plan with the fewest chunks of at least `min_rows` rows, or what does not fit."""
    # With guidance a pass may need more rows than it has: a sequence without it pairs a row with itself.
    assert sizes.wanted >= 0 and sizes.length > 0 and min_rows > 0, f"{sizes=} {min_rows=}"
    maximum = _max_chunks(forward, sizes, min_rows)
    for name in forward.chunk_counts:
        count = _fewest_chunks(forward, sizes, name, maximum[name], capacity)
        sizes = _with_chunks(sizes, name, count)
    while True:
        plan = plan_template(forward.template(sizes.chunks), sizes)
        if plan.peak_bytes <= capacity:
            return plan
        op = plan.template.ops[plan.peak_op]
        knob = "" if op.loop is None else op.loop.chunks
        count = sizes.chunks.get(knob, 1)
        if count >= maximum.get(knob, 1):
            return Misfit(op.name, plan.peak_bytes)
        sizes = _with_chunks(sizes, knob, count + 1)


def max_length(
    forward: Forward, *, capacity: int, wanted_share: float, min_rows: int = MIN_CHUNK_ROWS, group: int = 1
) -> int:
    """Return L_max, by bisection: the greatest length at which `group` canvases fit `capacity` bytes while
    `wanted_share` of the rows, rounded up, are wanted; 0 if none does."""

    def is_too_long(length: int) -> bool:
        # A share that is a quotient of two counts must give the count back, whatever its rounding.
        wanted = min(length, math.ceil(length * wanted_share - 1e-9))
        sizes = Sizes(length=group * length, wanted=group * wanted, group=group)
        found = search(forward, sizes, capacity=capacity, min_rows=min_rows)
        return isinstance(found, Misfit)

    end = 1
    while not is_too_long(end):
        end *= 2
    return bisect_left(range(end), True, lo=max(1, end // 2), key=is_too_long) - 1


def _max_chunks(forward: Forward, sizes: Sizes, min_rows: int) -> dict[str, int]:
    template = forward.query or forward.whole
    maximum = dict.fromkeys(forward.chunk_counts, 1)
    for op in template.ops:
        if op.loop is not None and op.loop.chunks in maximum:
            count = ceil_div(sizes.num_rows(op.loop.rows), min_rows)
            maximum[op.loop.chunks] = max(maximum[op.loop.chunks], count)
    return maximum


def _with_chunks(sizes: Sizes, name: str, count: int) -> Sizes:
    return replace(sizes, chunks={**sizes.chunks, name: count})


def _fewest_chunks(forward: Forward, sizes: Sizes, name: str, maximum: int, capacity: int) -> int:
    """The smallest value of one chunk count with which the ops of its loops fit; `maximum` if none does."""

    def fits(count: int) -> bool:
        tried = _with_chunks(sizes, name, count)
        template = forward.template(tried.chunks)
        lifetimes = template.lifetimes
        live = live_bytes(lifetimes, storage_bytes(lifetimes, tried))
        return all(
            num_bytes <= capacity
            for op, num_bytes in zip(template.ops, live, strict=True)
            if op.loop is not None and op.loop.chunks == name
        )

    if maximum == 1 or fits(1):
        return 1
    return 2 + bisect_left(range(2, maximum), True, key=fits)
