"""Parts of a template: ops, loops over chunks, and the graph that lifetimes are found in."""

from __future__ import annotations

from dataclasses import dataclass, field

from idlm.infer.planning.sizes import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop over chunks of `rows` (LENGTH or WANTED); `chunks` names its chunk count.

    Loops are told apart by `name`; several loops may share a chunk count.
    """

    name: str
    rows: str
    chunks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op: the names that it reads and writes (in both: updated in place), and the loop it runs in.

    A barrier is an op that reads tensors and runs nothing.
    """

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    loop: Loop | None = None
    in_layers: bool = False
    is_barrier: bool = False


@dataclass(slots=True)
class Graph:
    """Ops in order, and what they use; `aliases` names the tensor that an alias starts in, `inputs` are
    outside the workspace.
    """

    name: str
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, Size] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)

    def root(self, name: str) -> str:
        """Return the tensor that `name` is an alias of, or `name`."""
        return self.aliases.get(name, name)
