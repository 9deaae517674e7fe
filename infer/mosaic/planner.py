"""The planner: offsets of all storages in one workspace, by first fit; and a plan as a table.

Mosaic (section 4.5) takes first fit in place of an integer program, at 0.1 to 4.3 % of its time; the program
is the oracle of the tests. Departures from the paper: several orders are tried until one reaches the lower
bound, and the best one is used. Offsets are multiples of 512 bytes, and so are the bytes counted here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from idlm.infer.mosaic.template import WANTED, Lifetimes, OpCall, PassTemplate, Sizes, ceil_div

ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Offsets for one template at given sizes.

    `offsets` and `num_bytes` by tensor; `peak_bytes` is the size of the workspace, `live_bytes` its lower
    bound: the most bytes that are alive at once, at `template.ops[peak_op]`."""

    template: PassTemplate
    sizes: Sizes
    offsets: dict[str, int]
    num_bytes: dict[str, int]
    peak_bytes: int
    live_bytes: int
    peak_op: int

    def steps(self, wanted: int | None = None) -> Iterator[OpCall]:
        """Yield the calls of one forward pass, with offsets. `wanted`: the wanted rows of this pass; chunks
        keep the planned number of rows, so fewer rows run in fewer chunks."""
        sizes = self.sizes
        if wanted is not None:
            assert 0 <= wanted <= sizes.wanted, f"{wanted=}, planned for {sizes.wanted}"
            chunks = dict(sizes.chunks)
            for op in self.template.ops:
                if op.loop is not None and op.loop.rows == WANTED:
                    chunk_rows = max(1, sizes.chunk_rows(WANTED, op.loop.chunks))
                    chunks[op.loop.chunks] = max(1, ceil_div(wanted, chunk_rows))
            sizes = replace(sizes, wanted=wanted, chunks=chunks)
        return self.template.steps(sizes, self.offsets)


def storage_bytes(lifetimes: Lifetimes, sizes: Sizes) -> list[int]:
    return [ceil_div(storage.size.num_bytes(sizes), ALIGNMENT) * ALIGNMENT for storage in lifetimes.storages]


def live_bytes(lifetimes: Lifetimes, num_bytes: Sequence[int]) -> list[int]:
    return [sum([num_bytes[index] for index in alive]) for alive in lifetimes.alive]


def first_fit(
    num_bytes: Sequence[int], conflicts: Sequence[Sequence[int]], order: Iterable[int]
) -> tuple[list[int], int]:
    """Place each storage at the lowest offset that is free for its whole life; return offsets and end."""
    offsets, peak = [-1] * len(num_bytes), 0
    for index in order:
        size, offset = num_bytes[index], 0
        if size:
            taken = [
                (offsets[other], offsets[other] + num_bytes[other])
                for other in conflicts[index]
                if offsets[other] >= 0 and num_bytes[other]
            ]
            for start, stop in sorted(taken):
                if start - offset >= size:
                    break
                offset = max(offset, stop)
        offsets[index] = offset
        peak = max(peak, offset + size)
    return offsets, peak


def orders(lifetimes: Lifetimes, num_bytes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the orders in which storages are placed, the most successful one first: longest lives (x lies at
    the bottom, and every region stacks its tensors on what outlives it), then size, size times life, and
    first use. Ties go to the earlier first use, the best order for tensors of one size."""
    storages = lifetimes.storages
    by_start = sorted(range(len(storages)), key=lambda index: (storages[index].first, -num_bytes[index]))
    spans = [storage.last - storage.first + 1 for storage in storages]
    yield sorted(by_start, key=lambda index: (-spans[index], -num_bytes[index]))
    yield sorted(by_start, key=lambda index: (-num_bytes[index], -spans[index]))
    yield sorted(by_start, key=lambda index: -num_bytes[index] * spans[index])
    yield by_start


def plan_template(template: PassTemplate, sizes: Sizes) -> ArenaPlan:
    """Return the best of the first-fit plans of a template at given sizes."""
    lifetimes = template.lifetimes
    num_bytes = storage_bytes(lifetimes, sizes)
    live = live_bytes(lifetimes, num_bytes)
    bound = max(live, default=0)
    best: list[int] = []
    peak = -1
    for order in orders(lifetimes, num_bytes):
        offsets, end = first_fit(num_bytes, lifetimes.conflicts, order)
        if peak < 0 or end < peak:
            best, peak = offsets, end
        if peak == bound:
            break
    return ArenaPlan(
        template=template,
        sizes=sizes,
        offsets={one.name: offset for one, offset in zip(lifetimes.storages, best, strict=True)},
        num_bytes={name: size.num_bytes(sizes) for name, size in template.tensors.items()},
        peak_bytes=max(peak, 0),
        live_bytes=bound,
        peak_op=live.index(bound) if live else 0,
    )


HEADER = ("tensor", "bytes", "first op", "last op", "offset", "size")
MIB = 1 << 20


def describe_plan(plan: ArenaPlan) -> str:
    """Return the plan as text: sizes and chunks, a row per tensor, the op of the peak, totals."""
    template, lifetimes, sizes = plan.template, plan.template.lifetimes, plan.sizes
    rows: list[tuple[str, ...]] = [HEADER]
    for storage in lifetimes.storages:
        name = storage.name
        first, last = (
            f"{position} {op.name}{' (layers)' if op.in_layers else ''}"
            for position, op in ((each, template.ops[each]) for each in (storage.first, storage.last))
        )
        rows.append(
            (name, f"{plan.num_bytes[name]:,}", first, last, f"{plan.offsets[name]:,}", str(storage.size))
        )
    chunks = ", ".join(f"K_{name}={count}" for name, count in sorted(sizes.chunks.items()))
    ratio = plan.peak_bytes / max(1, plan.live_bytes)
    peak = template.ops[plan.peak_op]
    alive = ", ".join(lifetimes.storages[index].name for index in lifetimes.alive[plan.peak_op])
    per_row = plan.peak_bytes / max(1, sizes.length) / 1024
    return "\n".join(
        [
            f"{template.name}: {sizes.length} rows, {sizes.wanted} wanted, "
            f"{template.num_layers} layers, {chunks or 'no chunks'}",
            *_table(rows),
            f"most alive at {plan.peak_op} {peak.name}: {alive}",
            f"planned {plan.peak_bytes:,} bytes ({plan.peak_bytes / MIB:.1f} MiB, {per_row:.2f} KiB a row), "
            f"most alive {plan.live_bytes:,}, ratio {ratio:.4f}",
        ]
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    right = {HEADER.index("bytes"), HEADER.index("offset")}
    return [
        "  ".join(
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
