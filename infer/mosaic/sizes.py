"""Symbolic sizes: bytes of a tensor as a function of the length, the wanted rows and the chunk counts.

Mosaic (section 4.3) leaves these dimensions of its graph template symbolic and fills them in per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LENGTH, WANTED = "length", "wanted"
"""What a size counts: all rows of a pass, or the wanted rows (those that get logits)."""

K_LOGITS, K_FFN, K_EXPERTS, K_QUERY = "logits", "ffn", "experts", "query"
"""Names of chunk counts."""


def ceil_div(number: int, divisor: int) -> int:
    """Return `number / divisor`, rounded up."""
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
        """Return the value of LENGTH or WANTED."""
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
        """Return the rows of the tensor."""
        return sizes.chunk_rows(self.rows, self.chunks) * self.repeat

    def num_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the tensor."""
        return self.row_bytes * self.repeat * sizes.chunk_rows(self.rows, self.chunks) + self.constant

    def __str__(self) -> str:
        parts = []
        if self.row_bytes:
            rows = ("" if self.repeat == 1 else f"{self.repeat} x ") + self.rows
            parts.append(f"{self.row_bytes} B x {rows}" + (f" / K_{self.chunks}" if self.chunks else ""))
        if self.constant or not parts:
            parts.append(f"{self.constant} B")
        return " + ".join(parts)
