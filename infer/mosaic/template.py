"""The registrar: one forward pass as a list of named ops and tensors of symbolic size.

Mosaic (section 4.3) registers the graph instead of capturing it, so that no graph break hides a lifetime. A
template is also the program of the executor: `steps` yields the ops in the order in which they run. Ops
carry names only; the executor maps names to functions.

Departures from the paper: loops are objects that ops refer to, so lifetimes over a loop follow from reads and
writes, and barriers are needed only for results and for baselines; the layers are registered once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from idlm.infer.mosaic.lifetimes import LENGTH, Graph, Lifetimes, Loop, Op, Size, Sizes, find_lifetimes


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op: rows `start` to `stop` of its loop (of the pass, outside loops).

    `position` is the op's position in `template.ops`; `layer` is 0 outside the layers. `offsets` has the byte
    offset of every tensor of the op; it is empty without a plan. A tensor with a chunk count starts at its
    offset in each chunk; a tensor of all rows keeps row r at offset + r * row bytes."""

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


class PassTemplate(Graph):
    """The ops and tensors of one forward pass: a prologue, layers that are registered once, an epilogue.

    A tensor that is used inside one iteration of a loop exists once, at chunk size. A tensor that is also
    used outside the loop keeps its position for the whole loop: a slice of rows that one iteration writes
    must survive the others. The same holds for the layers, which are a loop too. Registration ends with the
    first question about lifetimes or steps; a mistake in a template is an AssertionError."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.num_layers = 1
        self._in_layers = self._has_layers = self._is_finished = False
        self._closed: set[str] = set()

    def add_input(self, *names: str) -> None:
        """Register tensors outside the workspace, which the executor provides: token ids, wanted rows."""
        for name in names:
            self._check_new(name)
            self.inputs.add(name)

    def add_tensor(self, name: str, size: Size) -> None:
        self._check_new(name)
        self.tensors[name] = size

    def add_rows(self, row_bytes: int, loop: Loop | None = None, *, repeat: int = 1, **tensors: int) -> None:
        """Register tensors of `row_bytes` times their multiple; of chunk size, given a loop."""
        rows, chunks = (LENGTH, None) if loop is None else (loop.rows, loop.chunks)
        for name, multiple in tensors.items():
            size = Size(row_bytes=row_bytes * multiple, rows=rows, chunks=chunks, repeat=repeat)
            self.add_tensor(name, size)

    def add_alias(self, name: str, target: str, size: Size | None = None) -> None:
        """Register `name` as a second view that starts where `target` starts; without `size`, as large.

        Both live from the first use of either to the last use of either."""
        self._check_new(name)
        assert target in self.tensors, f"{self.name}: {name} is an alias of unknown {target}"
        self.tensors[name] = size or self.tensors[target]
        self.aliases[name] = self.root(target)

    def add_op(
        self, name: str, reads: Sequence[str] = (), writes: Sequence[str] = (), chunks: Loop | None = None
    ) -> None:
        """Register the next op. Consecutive ops with the same `chunks` are the body of that loop."""
        self._add(Op(name=name, reads=tuple(reads), writes=tuple(writes), loop=chunks))

    def add_barrier(self, *names: str, chunks: Loop | None = None) -> None:
        """Keep the tensors alive at least until here."""
        self._add(Op(name="barrier", reads=names, loop=chunks, is_barrier=True))

    @contextmanager
    def layers(self, num_layers: int) -> Iterator[None]:
        """Register the ops inside as the body that runs `num_layers` times."""
        assert num_layers > 0 and not self._has_layers, f"{self.name}: {num_layers=}, or layers twice"
        self.num_layers, self._in_layers, self._has_layers = num_layers, True, True
        yield
        self._in_layers = False

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """Storages of the workspace with the first and last op of each; they do not depend on sizes."""
        assert not self._in_layers, f"{self.name}: inside of layers()"
        self._is_finished = True
        return find_lifetimes(self, self._ranges())

    def steps(self, sizes: Sizes, offsets: Mapping[str, int] | None = None) -> Iterator[OpCall]:
        """Yield the calls of one forward pass in order; `offsets` are those of a plan for `sizes`."""
        known = offsets or {}
        by_op = [{name: known[name] for name in (*op.reads, *op.writes) if name in known} for op in self.ops]
        first, last = self._layer_groups
        groups = self._groups
        for group in groups[:first]:
            yield from self._run(group, 0, sizes, by_op)
        for layer in range(self.num_layers):
            for group in groups[first:last]:
                yield from self._run(group, layer, sizes, by_op)
        for group in groups[last:]:
            yield from self._run(group, 0, sizes, by_op)

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
                if not op.is_barrier:
                    yield OpCall(op, position, layer, start, stop, by_op[position])

    def _ranges(self) -> list[tuple[int, int]]:
        found, start = [], 0
        for group in self._groups:
            stop = start + len(group.ops)
            if group.loop is not None:
                found.append((start, stop - 1))
            start = stop
        body = [position for position, op in enumerate(self.ops) if op.in_layers]
        if body:
            found.append((body[0], body[-1]))
        return found

    @cached_property
    def _groups(self) -> list[_Group]:
        groups = itertools.groupby(enumerate(self.ops), key=lambda each: (each[1].loop, each[1].in_layers))
        return [_Group(*key, list(ops)) for key, ops in groups]

    @cached_property
    def _layer_groups(self) -> tuple[int, int]:
        body = [position for position, group in enumerate(self._groups) if group.in_layers]
        return (body[0], body[-1] + 1) if body else (len(self._groups), len(self._groups))

    def _check_new(self, name: str) -> None:
        assert not self._is_finished, f"{self.name} is finished: {name}"
        assert name not in self.tensors and name not in self.inputs, f"{self.name}: {name} is there already"

    def _add(self, op: Op) -> None:
        assert not self._is_finished, f"{self.name} is finished: {op.name}"
        known = self.tensors.keys() | self.inputs
        unknown = [name for name in (*op.reads, *op.writes) if name not in known]
        assert not unknown, f"{self.name}: {op.name} uses unknown {unknown}"
        assert not self.inputs & set(op.writes), f"{self.name}: {op.name} writes an input"
        last = self.ops[-1] if self.ops else None
        if last is not None and last.loop is not None and last.loop != op.loop:
            self._closed.add(last.loop.name)
        if op.loop is not None:
            assert op.loop.name not in self._closed, f"{self.name}: loop {op.loop.name} has ended"
        same_loop = last is not None and last.loop is not None and last.loop == op.loop
        assert last is None or not same_loop or last.in_layers == self._in_layers, f"{op.name} splits a loop"
        self.ops.append(replace(op, in_layers=self._in_layers))
