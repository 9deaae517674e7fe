"""The graph of a template (ops, loops over chunks, sizes of tensors), and the lifetimes in it: the first and
last op of every storage, counted over the ops as registered.

Sizes are functions of the length, the wanted rows and the chunk counts: Mosaic (section 4.3) leaves these
dimensions of its graph symbolic and fills them in per request. A storage is a tensor with its aliases. Two
storages conflict when an op exists at which both are alive, which depends on no size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
    """One op: the names that it reads and writes (in both: updated in place), and the loop it runs in.

    A barrier is an op that reads tensors and runs nothing."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    loop: Loop | None = None
    in_layers: bool = False
    is_barrier: bool = False


@dataclass(slots=True)
class Graph:
    """Ops in order, and what they use; `aliases` names the tensor that an alias starts in, `inputs` are
    outside the workspace."""

    name: str
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, Size] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)

    def root(self, name: str) -> str:
        return self.aliases.get(name, name)


@dataclass(frozen=True, slots=True)
class Storage:
    """One range of the workspace: a tensor, the sizes of all its views, and its first and last op."""

    name: str
    sizes: tuple[Size, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """`alive` lists the storages at each op, `conflicts` those that overlap in time with each storage."""

    storages: tuple[Storage, ...]
    alive: tuple[tuple[int, ...], ...]
    conflicts: tuple[tuple[int, ...], ...]
    index_of: dict[str, int]


def find_lifetimes(graph: Graph, ranges: Iterable[tuple[int, int]]) -> Lifetimes:
    """Return the lifetimes of a finished graph; `ranges`: the first and last op of every loop, the layers
    included."""
    used = _uses(graph)
    storages = []
    for name, positions in used.items():
        first, last = positions[0], positions[-1]
        views = [size for view, size in graph.tensors.items() if graph.root(view) == name]
        for start, stop in ranges:
            touched = any(start <= position <= stop for position in positions)
            # Used both inside and outside of the loop: every iteration must leave it in place.
            if touched and (positions[0] < start or positions[-1] > stop):
                first, last = min(first, start), max(last, stop)
        storages.append(Storage(name, tuple(dict.fromkeys(views)), first, last))
    _check_chunks(graph, used, storages)
    return relate(storages, len(graph.ops), graph.aliases)


def relate(storages: Sequence[Storage], num_ops: int, aliases: Mapping[str, str]) -> Lifetimes:
    index_of = {storage.name: index for index, storage in enumerate(storages)}
    index_of |= {alias: index_of[root] for alias, root in aliases.items()}
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
        index_of=index_of,
    )


def _uses(graph: Graph) -> dict[str, list[int]]:
    """Positions of the ops that use each storage, in order; the first use must be a write."""
    used: dict[str, list[int]] = {graph.root(name): [] for name in graph.tensors}
    for position, op in enumerate(graph.ops):
        written = {graph.root(name) for name in op.writes}
        for name in dict.fromkeys(graph.root(name) for name in (*op.reads, *op.writes)):
            if name in graph.inputs:
                continue
            reads = [read for read in op.reads if graph.root(read) == name]
            is_written = used[name] or (name in written and not reads)
            assert is_written, f"{graph.name}: {op.name} reads {name} before anything writes it"
            used[name].append(position)
    unused = [name for name, positions in used.items() if not positions]
    assert not unused, f"{graph.name}: no op uses {unused}"
    return used


def _check_chunks(graph: Graph, used: dict[str, list[int]], storages: list[Storage]) -> None:
    """A tensor of chunk size must be used in one loop only, which has the same chunk count and rows."""
    for storage in storages:
        for size in storage.sizes:
            if size.chunks is None:
                continue
            loops = {graph.ops[position].loop for position in used[storage.name]}
            loop = next(iter(loops))
            is_inside = len(loops) == 1 and loop is not None
            assert is_inside, f"{graph.name}: {storage.name} has chunk size and is used outside of its loop"
            assert loop is not None and (loop.chunks, loop.rows) == (size.chunks, size.rows), (
                f"{graph.name}: {storage.name} has chunks of {size}, and its loop is {loop}"
            )
