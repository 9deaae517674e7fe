"""Visibility in packed rows `[noisy rows | clean rows | padding]` as ranges of row indices.

Computed once per batch from plain tensors, shared by all layers and heads, without any host synchronisation
and without anything of size T x T. Contract and derivation in README.md.

B packed rows, T rows of one packed row, I tiles of one packed row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PADDING_DOC = -1
TILE_ROWS = 128
"""Rows of a stationary tile: queries in the forward pass, keys in the backward pass."""
WORK_ROWS = 64
"""Unit in rows for the length of a tile's walk, by which long walks start first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """Row q sees the keys `[across_start, across_end)` and `[own_start, own_until)`; row k is seen by the
    queries `[seen_start, seen_end)` and `[own_from, own_end)`. All int32, all ranges empty for padding. Where
    clean rows are keys alone, the tables have noisy rows only."""

    across_start_BT: torch.Tensor
    across_end_BT: torch.Tensor
    own_start_BT: torch.Tensor
    own_until_BT: torch.Tensor
    seen_start_BT: torch.Tensor
    seen_end_BT: torch.Tensor
    own_from_BT: torch.Tensor
    own_end_BT: torch.Tensor
    num_rows_B: torch.Tensor
    """Rows before the padding."""
    num_queries_B: torch.Tensor
    """Those of them that are queries, the first ones."""
    query_tiles_BI8: torch.Tensor
    """Per tile of queries: the union `[low, high)` of its keys across and the part `[low, high)` that all its
    rows see, then both for its own half."""
    key_tiles_BI8: torch.Tensor
    """The same for the queries of a tile of keys."""
    query_order: torch.Tensor
    """[B * I] flat tiles, longest walk first."""
    key_order: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in the order of the fields."""
        return tuple(getattr(self, name) for name in FIELDS)


FIELDS = tuple(Visibility.__dataclass_fields__)


def from_tensors(tensors: Sequence[torch.Tensor]) -> Visibility:
    """The inverse of `Visibility.tensors`."""
    return Visibility(**dict(zip(FIELDS, tensors, strict=True)))


def visibility(
    doc_ids_BT: torch.Tensor,
    positions_BT: torch.Tensor,
    block_starts_BT: torch.Tensor,
    is_noisy_BT: torch.Tensor,
    reach_BT: torch.Tensor | None = None,
    *,
    num_queries: int | None = None,
) -> Visibility:
    """The ranges of packed rows. `reach_BT`: the last position that a row sees of its own half, at least its
    own, not descending, and inside its block for a noisy row; None: its own position, which is causal.

    `num_queries`: every packed row begins with so many noisy rows and has no more, which alone are queries
    and need gradients; clean rows are keys without a gradient.

    Noisy rows come first, then clean rows, then padding (doc id -1). In either half documents ascend, and in
    a document blocks (noisy) or positions (clean) do. On a CPU a wrong order raises AssertionError; on a GPU
    it is not checked, because the host would have to wait."""
    reach, clean_half = 1 << 28, 1 << 58
    is_real = doc_ids_BT != PADDING_DOC
    noisy = is_noisy_BT & is_real
    doc = doc_ids_BT.long() * reach
    inner = torch.where(noisy, block_starts_BT, positions_BT).long()
    key = torch.where(noisy, doc + inner, clean_half + doc + inner)
    key = torch.where(is_real, key, 2 * clean_half).contiguous()
    if key.device.type == "cpu":
        assert bool((key.diff(dim=1) >= 0).all()), "rows are not ordered: half, document, block or position"

    def first(value: torch.Tensor, *, after: bool = False) -> torch.Tensor:
        """First row whose key is >= value, or > value."""
        return torch.searchsorted(key, value.contiguous(), right=after)

    rows = torch.arange(key.shape[1], device=key.device).expand_as(key)
    doc_clean = first(clean_half + doc)
    doc_clean_end = first(clean_half + doc + reach - 1, after=True)
    clean = is_real & ~noisy
    across = (
        torch.where(noisy, doc_clean, 0),
        torch.where(noisy, first(clean_half + doc + block_starts_BT), 0),
    )
    own_start = torch.where(noisy, first(key), torch.where(is_real, doc_clean, rows + 1))
    seen = (
        torch.where(clean, first(doc + positions_BT, after=True), 0),
        torch.where(clean, first(doc + reach - 1, after=True), 0),
    )
    own_end = torch.where(noisy, first(key, after=True), torch.where(is_real, doc_clean_end, rows))
    own_until, own_from = _reached(doc + clean_half * ~noisy, positions_BT, reach_BT, is_real)
    queries = slice(num_queries)
    across, own, seen, requested = (
        (start[:, queries], end[:, queries])
        for start, end in (across, (own_start, own_until), seen, (own_from, own_end))
    )
    return _with_tiles(across, own, seen, requested, is_real, num_queries)


Ranges = tuple[torch.Tensor, torch.Tensor]


def _with_tiles(
    across: Ranges,
    own: Ranges,
    seen: Ranges,
    requested: Ranges,
    is_real_BT: torch.Tensor,
    num_queries: int | None,
) -> Visibility:
    """The ranges of keys that a row sees, across and in its own half, and of queries that see it."""
    is_real = is_real_BT[:, :num_queries]
    query_tiles = torch.cat((_tiles(*across, is_real), _tiles(*own, is_real)), dim=2)
    key_tiles = torch.cat((_tiles(*seen, is_real), _tiles(*requested, is_real)), dim=2)
    return Visibility(
        across_start_BT=_table(across[0]),
        across_end_BT=_table(across[1]),
        own_start_BT=_table(own[0]),
        own_until_BT=_table(own[1]),
        seen_start_BT=_table(seen[0]),
        seen_end_BT=_table(seen[1]),
        own_from_BT=_table(requested[0]),
        own_end_BT=_table(requested[1]),
        num_rows_B=is_real_BT.sum(dim=1, dtype=torch.int32),
        num_queries_B=is_real.sum(dim=1, dtype=torch.int32),
        query_tiles_BI8=query_tiles.int().contiguous(),
        key_tiles_BI8=key_tiles.int().contiguous(),
        query_order=_longest_first(query_tiles),
        key_order=_longest_first(key_tiles),
    )


def _table(values_BT: torch.Tensor) -> torch.Tensor:
    return values_BT.int().contiguous()


def _reached(
    half_BT: torch.Tensor, positions_BT: torch.Tensor, reach_BT: torch.Tensor | None, is_real_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """End of the keys that a row sees in its own half, and start of the queries that see it. `half_BT`
    separates the halves of documents.

    Inside a half, positions and reaches ascend, and the reach of a noisy row never leaves its block."""
    rows = torch.arange(half_BT.shape[1], device=half_BT.device).expand_as(half_BT)
    if reach_BT is None:
        return rows + 1, rows
    after_all = 1 << 60
    index = torch.where(is_real_BT, half_BT + positions_BT, after_all).contiguous()
    reached = torch.where(is_real_BT, half_BT + reach_BT, after_all).contiguous()
    until = torch.where(is_real_BT, torch.searchsorted(index, reached, right=True), rows + 1)
    return until, torch.where(is_real_BT, torch.searchsorted(reached, index), rows)


def _tiles(start_BT: torch.Tensor, end_BT: torch.Tensor, is_real_BT: torch.Tensor) -> torch.Tensor:
    """[B, I, 4]: union `[low, high)` of the ranges of a tile's rows, and their intersection."""
    far = 1 << 30
    padded = -start_BT.shape[1] % TILE_ROWS

    def reduced(values_BT: torch.Tensor, fill: int, largest: bool) -> torch.Tensor:
        tiles = torch.nn.functional.pad(values_BT, (0, padded), value=fill).unflatten(1, (-1, TILE_ROWS))
        return tiles.amax(dim=2) if largest else tiles.amin(dim=2)

    is_empty = start_BT >= end_BT
    high = reduced(torch.where(is_empty, 0, end_BT), 0, True)
    low = torch.minimum(reduced(torch.where(is_empty, far, start_BT), far, False), high)
    # Padding in a tile need not mask its other rows: the results of padding are discarded.
    common_low = reduced(torch.where(is_real_BT, torch.where(is_empty, far, start_BT), 0), 0, True)
    common_high = reduced(torch.where(is_real_BT, end_BT, far), far, False)
    return torch.stack((low, high, common_low, common_high), dim=2)


def _longest_first(tiles_BI8: torch.Tensor) -> torch.Tensor:
    walks = (tiles_BI8[..., 1::4] - tiles_BI8[..., 0::4] + WORK_ROWS - 1) // WORK_ROWS
    return walks.sum(dim=2).flatten().argsort(descending=True, stable=True).int()
