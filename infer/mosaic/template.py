"""The registrar: one forward pass as a list of named ops, loops over chunks and tensors of symbolic size, and
their lifetimes: the first and last op of every storage, counted over the ops as registered.

Mosaic (section 4.3) registers the graph instead of capturing it, so that no graph break hides a lifetime. A
template is also the program of the executor: `steps` yields the ops in the order in which they run; the
executor maps their names to functions. Sizes are functions of the length, the wanted rows and the chunk
counts, filled in per request. A storage is the range of a tensor. Two storages conflict when an op exists at
which both are alive, which depends on no size.

Departures from the paper: loops are objects that ops refer to, so lifetimes over a loop follow from reads and
writes, without barriers; the layers are registered once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

LENGTH, WANTED = "length", "wanted"
"""What a size counts: all rows of a pass, or the wanted rows (those that get logits)."""

K_LOGITS, K_FFN, K_EXPERTS, K_QUERY = "logits", "ffn", "experts", "query"
"""Names of chunk counts."""


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Values of the symbols: the rows of a pass, and `chunks` by name of a chunk count (missing: 1). No chunk
    divides a `group` of wanted rows."""

    length: int
    wanted: int = 0
    group: int = 1
    chunks: Mapping[str, int] = field(default_factory=dict)

    def num_rows(self, rows: str) -> int:
        return self.length if rows == LENGTH else self.wanted

    def chunk_rows(self, rows: str, chunks: str | None) -> int:
        """Return the rows of one chunk: all chunks but the last have as many."""
        num_rows, group = self.num_rows(rows), self.group if rows == WANTED else 1
        if chunks is None:
            return num_rows
        return group * ceil_div(ceil_div(num_rows, group), self.chunks.get(chunks, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`row_bytes * repeat` bytes for every row of a chunk of `rows`, plus `constant` bytes.

    `chunks` names the chunk count that divides the rows; None is for tensors of all rows. `repeat` is the
    number of tensor rows per row of the pass: top-k for expert rows."""

    row_bytes: int = 0
    rows: str = LENGTH
    repeat: int = 1
    chunks: str | None = None
    constant: int = 0

    def __post_init__(self) -> None:
        assert self.rows in (LENGTH, WANTED), self.rows
        assert min(self.row_bytes, self.repeat, self.constant) >= 0, self

    def num_rows(self, sizes: Sizes) -> int:
        return sizes.chunk_rows(self.rows, self.chunks) * self.repeat

    def num_bytes(self, sizes: Sizes) -> int:
        return self.row_bytes * self.repeat * sizes.chunk_rows(self.rows, self.chunks) + self.constant

    def __str__(self) -> str:
        parts = []
        if self.row_bytes:
            rows = ("" if self.repeat == 1 else f"{self.repeat} x ") + self.rows
            parts.append(f"{self.row_bytes} B x {rows}" + (f" / K_{self.chunks}" if self.chunks else ""))
        if self.constant or not parts:
            parts.append(f"{self.constant} B")
        return " + ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop over chunks of `rows` (LENGTH or WANTED); `chunks` names its chunk count.

    Loops differ by `name`; several loops may share a chunk count."""

    name: str
    rows: str
    chunks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op: the names that it reads and writes (in both: updated in place), and the loop it runs in."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    loop: Loop | None = None
    in_layers: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """One range of the workspace: a tensor, its size, and its first and last op."""

    name: str
    size: Size
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """`alive` lists the storages at each op, `conflicts` those that overlap in time with each storage."""

    storages: tuple[Storage, ...]
    alive: tuple[tuple[int, ...], ...]
    conflicts: tuple[tuple[int, ...], ...]


def find_lifetimes(template: PassTemplate) -> Lifetimes:
    """Return the lifetimes of a finished graph. A tensor of chunk size is used in one loop only."""
    storages, ranges = [], template.ranges()
    for name, size in template.tensors.items():
        used = [at for at, op in enumerate(template.ops) if name in op.reads or name in op.writes]
        first, last = used[0], used[-1]
        for start, stop in ranges:
            touched = any(start <= position <= stop for position in used)
            # Used both inside and outside of the loop: every iteration must leave it in place.
            if touched and (used[0] < start or used[-1] > stop):
                first, last = min(first, start), max(last, stop)
        storages.append(Storage(name, size, first, last))
    return relate(storages, len(template.ops))


def relate(storages: Sequence[Storage], num_ops: int) -> Lifetimes:
    return Lifetimes(
        storages=tuple(storages),
        alive=tuple(
            tuple(
                index for index, storage in enumerate(storages) if storage.first <= position <= storage.last
            )
            for position in range(num_ops)
        ),
        conflicts=tuple(
            tuple(
                index
                for index, other in enumerate(storages)
                if other is not one and other.first <= one.last and one.first <= other.last
            )
            for one in storages
        ),
    )


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op: rows `start` to `stop` of its loop (of the pass, outside loops).

    `position` is the op's position in `template.ops`; `layer` is 0 outside the layers. `offsets`: byte
    offsets of the op's tensors; empty without a plan. A tensor with a chunk count starts at its offset in
    each chunk; a tensor of all rows has row r at offset + r * row bytes."""

    op: Op
    position: int
    layer: int
    start: int
    stop: int
    offsets: Mapping[str, int]


class _Group(NamedTuple):
    """Consecutive ops that run together, with their positions: one loop, or the ops between loops."""

    loop: Loop | None
    in_layers: bool
    ops: list[tuple[int, Op]]


class PassTemplate:
    """The ops and tensors of one forward pass: a prologue, layers that are registered once, an epilogue.

    A tensor that is used inside one iteration of a loop exists once, at chunk size. One that is also used
    outside keeps its position for the whole loop: a slice of rows that one iteration writes must survive the
    others. The layers are a loop too. Registration ends with the first question about lifetimes or steps."""

    def __init__(self, name: str) -> None:
        self.name, self.num_layers = name, 1
        self.ops: list[Op] = []
        self.tensors: dict[str, Size] = {}
        self._in_layers = False

    def add_tensor(self, name: str, size: Size) -> None:
        self.tensors[name] = size

    def add_rows(self, row_bytes: int, loop: Loop | None = None, *, repeat: int = 1, **tensors: int) -> None:
        """Register tensors of `row_bytes` times their multiple; of chunk size, given a loop."""
        rows, chunks = (LENGTH, None) if loop is None else (loop.rows, loop.chunks)
        for name, multiple in tensors.items():
            size = Size(row_bytes=row_bytes * multiple, rows=rows, chunks=chunks, repeat=repeat)
            self.add_tensor(name, size)

    def add_op(
        self, name: str, reads: Sequence[str] = (), writes: Sequence[str] = (), chunks: Loop | None = None
    ) -> None:
        """Register the next op; a tensor's first use is a write, unless it is an input, which is no tensor of
        the workspace. Consecutive ops with the same `chunks` are the body of that loop."""
        in_layers = self._in_layers
        self.ops.append(
            Op(name=name, reads=tuple(reads), writes=tuple(writes), loop=chunks, in_layers=in_layers)
        )

    @contextmanager
    def layers(self, num_layers: int) -> Iterator[None]:
        """Register the ops inside as the body that runs `num_layers` times."""
        self.num_layers, self._in_layers = num_layers, True
        yield
        self._in_layers = False

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """Storages of the workspace with the first and last op of each; they do not depend on sizes."""
        return find_lifetimes(self)

    def steps(self, sizes: Sizes, offsets: Mapping[str, int] | None = None) -> Iterator[OpCall]:
        """Yield the calls of one forward pass in order; `offsets` are those of a plan for `sizes`."""
        known = offsets or {}
        by_op = [{name: known[name] for name in (*op.reads, *op.writes) if name in known} for op in self.ops]
        for in_layers, groups in itertools.groupby(self._groups, key=lambda group: group.in_layers):
            body = list(groups)
            for layer in range(self.num_layers if in_layers else 1):
                for group in body:
                    yield from self._run(group, layer, sizes, by_op)

    def _run(
        self, group: _Group, layer: int, sizes: Sizes, by_op: Sequence[Mapping[str, int]]
    ) -> Iterator[OpCall]:
        num_rows, chunk_rows = sizes.num_rows(LENGTH), 0
        if group.loop is not None:
            num_rows = sizes.num_rows(group.loop.rows)
            chunk_rows = sizes.chunk_rows(group.loop.rows, group.loop.chunks)
        starts = range(0, num_rows, chunk_rows) if chunk_rows else range(0 if group.loop else 1)
        for start in starts:
            stop = min(num_rows, start + chunk_rows) if chunk_rows else num_rows
            for position, op in group.ops:
                yield OpCall(op, position, layer, start, stop, by_op[position])

    def ranges(self) -> list[tuple[int, int]]:
        """The first and last op of every loop, the layers included."""
        found = [(group.ops[0][0], group.ops[-1][0]) for group in self._groups if group.loop is not None]
        body = [position for position, op in enumerate(self.ops) if op.in_layers]
        return [*found, (body[0], body[-1])] if body else found

    @cached_property
    def _groups(self) -> list[_Group]:
        groups = itertools.groupby(enumerate(self.ops), key=lambda each: (each[1].loop, each[1].in_layers))
        return [_Group(*key, list(ops)) for key, ops in groups]
