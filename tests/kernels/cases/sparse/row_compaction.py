"""Random packed rows for the tests of row_compaction: prompts, blocks that are fed in part or not at all,
padding, and keep flags that mean nothing where no block has a row."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from idlm.kernels.row_compaction import (
    Compacted,
    Drop,
    PackedRows,
    RowCapacity,
    compact_rows,
    find_index,
    gather_rows,
    retain_wanted,
    spread_index,
)
from tests.kernels.references.sparse.row_compaction import compact_reference, wanted_reference

SIZES = (1, 3, 4, 8, 32)
Moved = TypeVar("Moved", PackedRows, Drop, RowCapacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Arguments of `compact_rows`; for the reference the rows of each sequence before and in its block."""

    rows: PackedRows
    drop: Drop
    limit: RowCapacity | None
    drops_stored: bool
    num_left: int
    num_origins: int
    by_sequence: list[tuple[list[int], list[int]]]

    def run(self) -> Compacted:
        """By the op."""
        options = {"limit": self.limit, "drops_stored": self.drops_stored}
        return compact_rows(
            self.rows, self.drop, num_left=self.num_left, num_origins=self.num_origins, **options
        )


def make_case(seed: int, device: str = "cpu") -> Case:
    """One pass."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def ints(high: int, *of: int) -> Tensor:
        return torch.randint(0, high, of, generator=generator)

    size, num_sequences = SIZES[seed % len(SIZES)], rng.choice([1, 2, 5, 17])
    by_sequence, indices, number = [], [], 0
    for _ in range(num_sequences):
        before = list(range(number, number + rng.choice([0, 0, size, 3 * size])))
        fed = sorted(rng.sample(range(size), rng.choice([0, size, size, rng.randrange(size + 1)])))
        number += len(before) + len(fed)
        by_sequence.append((before, list(range(number - len(fed), number))))
        indices.append(fed)
    num_fed, num_rows = number, max(1, number + rng.choice([0, 0, 5, 140]))
    ends = torch.tensor([0] + [len(before) + len(block) for before, block in by_sequence]).cumsum(0)
    sequence_R = torch.searchsorted(ends[1:], torch.arange(num_rows), right=True).clamp(max=num_sequences - 1)
    rows_BW = torch.full((num_sequences, size), -1)
    for b, (fed, (_, block)) in enumerate(zip(indices, by_sequence, strict=True)):
        rows_BW[b, fed] = torch.tensor(block, dtype=torch.int64)
    ints_JR = ints(1000, 7, num_rows)
    names = ("token_ids_R", "positions_R", "slots_R", "limits_R", "branch_starts_R", "mapping_R", "origin_R")
    has_masks = rng.random() < 0.8
    rows = PackedRows(
        cu_rows_B1=ends,
        sequence_R=sequence_R,
        is_mask_R=ints(2, num_rows) > 0 if has_masks else None,
        **dict(zip(names, ints_JR, strict=True)),
    )
    scheduled_B = torch.tensor([rng.choice([0, len(before), 99]) for before, _ in by_sequence])
    drop = Drop(
        rows_BW=rows_BW,
        keep_R=ints(3, num_rows) > 0,
        needs_all_B=ints(5, num_sequences) == 0,
        waits_B=ints(6, num_sequences) == 0,
        limits_R=ints(1000, num_rows) if rng.random() < 0.7 else None,
        scheduled_B=scheduled_B if rng.random() < 0.7 else None,
    )
    drops_stored = rng.random() < 0.4
    limit = None
    num_scheduled = sum(
        len(before) if drop.scheduled_B is None else min(len(before), int(drop.scheduled_B[b]))
        for b, (before, _) in enumerate(by_sequence)
    )
    if rng.random() < 0.6:
        limit = RowCapacity(
            capacity=num_scheduled + rng.randrange(2 * size, max(2, num_sequences) * size + 1),
            num_waits_B=ints(3, num_sequences),
        )
    return Case(
        rows=_moved(rows, device),
        drop=_moved(drop, device),
        limit=None if limit is None else _moved(limit, device),
        drops_stored=drops_stored,
        num_left=max(1, rng.choice([num_rows, num_fed, num_fed // 2 if rng.random() < 0.3 else num_rows])),
        num_origins=5000,
        by_sequence=by_sequence,
    )


def _moved(given: Moved, device: str) -> Moved:
    return type(given)(*(x.to(device) if isinstance(x, Tensor) else x for x in given))


def check(case: Case) -> None:
    """Equals the reference, row by row."""
    found, rows, drop, limit = case.run(), case.rows, case.drop, case.limit
    left, waits, demand = compact_reference(
        case.by_sequence,
        retained=set(drop.keep_R.nonzero()[:, 0].tolist()),
        needs_all=drop.needs_all_B.tolist(),
        waits=drop.waits_B.tolist(),
        scheduled=None if drop.scheduled_B is None else drop.scheduled_B.tolist(),
        num_waits=None if limit is None else limit.num_waits_B.tolist(),
        capacity=None if limit is None else limit.capacity,
        size=drop.rows_BW.shape[1],
        drops_stored=case.drops_stored,
    )
    assert found.waits_B.tolist() == waits
    assert found.demand_B.tolist() == demand
    ends = torch.tensor([0] + [len(numbers) for numbers in left]).cumsum(0).clamp(max=case.num_left)
    assert found.rows.cu_rows_B1.tolist() == ends.tolist()
    retained = [row for numbers in left for row in numbers][: case.num_left]
    num_padding = case.num_left - len(retained)
    assert found.numbers_I.tolist() == retained + [0] * num_padding
    chosen = torch.tensor([*retained, *[0] * num_padding], device=rows.slots_R.device)
    is_row = torch.arange(case.num_left, device=chosen.device) < len(retained)
    for name in ("sequence_R", "token_ids_R", "positions_R", "slots_R", "branch_starts_R"):
        assert torch.equal(getattr(found.rows, name), getattr(rows, name)[chosen]), name
    assert torch.equal(found.rows.mapping_R, torch.where(is_row, rows.mapping_R[chosen], -1))
    assert torch.equal(found.rows.origin_R, torch.where(is_row, rows.origin_R[chosen], case.num_origins))
    if rows.is_mask_R is not None:
        assert found.rows.is_mask_R is not None
        assert torch.equal(found.rows.is_mask_R, rows.is_mask_R[chosen] & is_row)
    lowered = {
        row
        for b, (_, block) in enumerate(case.by_sequence)
        for row in block
        if not drop.needs_all_B[b] and drop.limits_R is not None
    }
    limits = rows.limits_R.tolist()
    for row in lowered:
        assert drop.limits_R is not None
        limits[row] = min(limits[row], int(drop.limits_R[row]))
    assert found.rows.limits_R.tolist() == [limits[row] for row in chosen.tolist()]
    number_of = {row: number for number, row in enumerate(retained)}
    assert found.rows_BW.tolist() == [
        [number_of.get(row, -1) for row in of_sequence] for of_sequence in drop.rows_BW.tolist()
    ]


def check_positions(seed: int, device: str = "cpu") -> None:
    """Rows of positions and back, of sequences that feed rows before their block, some of its rows, or
    none."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size, num_sequences = SIZES[seed % len(SIZES)], rng.choice([1, 2, 5, 17])
    starts = [size * rng.randrange(4) for _ in range(num_sequences)]
    slots: list[int] = []
    rows, ends = [[-1] * size for _ in starts], [0]
    for b, start in enumerate(starts):
        first, num_fed = rng.randrange(start + 1), rng.choice([0, size, size, rng.randrange(size + 1)])
        for slot in range(first, start + num_fed):
            if slot >= start:
                rows[b][slot - start] = len(slots)
            slots.append(slot)
        ends.append(len(slots))
    slots += [3] * rng.choice([0 if slots else 1, 1, 5])
    is_mask_R = torch.randint(0, 2, (len(slots),), generator=generator) > 0
    moved = [torch.tensor(each).to(device) for each in (ends, slots, starts)]
    for masks_R in (None, is_mask_R.to(device)):
        rows_BW, is_mask_BW = find_index(moved[0], moved[1], masks_R, moved[2], size)
        assert rows_BW.tolist() == rows
        expected = [
            [row >= 0 and masks_R is not None and bool(is_mask_R[row]) for row in each] for each in rows
        ]
        assert is_mask_BW.tolist() == expected
    retained_BW = torch.randint(0, 2, (num_sequences, size), generator=generator) > 0
    ends_B = torch.randint(0, size + 1, (num_sequences,), generator=generator)
    keep_R, limits_R = spread_index(retained_BW.to(device), ends_B.to(device), moved[2], rows_BW, len(slots))
    for b, of_sequence in enumerate(rows):
        for index, row in enumerate(of_sequence):
            if row >= 0:
                assert bool(keep_R[row]) == bool(retained_BW[b, index])
                assert int(limits_R[row]) == starts[b] + int(ends_B[b])


def check_wanted(seed: int, device: str = "cpu") -> None:
    """Wanted rows of sequences in any order, some of which waited before, with padding that holds any row."""
    rng = random.Random(seed)
    size, num_sequences, num_rows = (
        SIZES[seed % len(SIZES)],
        rng.choice([1, 2, 5, 17]),
        rng.choice([1, 40, 700]),
    )
    left = sorted(rng.sample(range(num_rows), rng.randrange(num_rows + 1)))
    waited = [rng.random() < 0.2 for _ in range(num_sequences)]
    wanted = [[rng.randrange(num_rows) for _ in range(rng.randrange(size + 1))] for _ in waited]
    order = rng.sample(range(num_sequences), num_sequences)
    rows, first = list[int](), [0] * num_sequences
    for b in order:
        first[b] = len(rows)
        rows += wanted[b]
    num_wanted = max(1, len(rows) + rng.choice([0, 3, 200]))
    # The last sequence did not fit before, and what it wanted is not there.
    beyond = [num_wanted - rng.randrange(3), rng.randrange(1, size + 1)]
    padding = [rng.choice([*left, 0]) for _ in range(num_wanted - len(rows))]
    if beyond[0] < len(rows):
        beyond[0] = num_wanted
    origins = left + [num_rows] * rng.choice([0 if left else 1, 1, 150])
    columns = [[*first, beyond[0]], [*map(len, wanted), beyond[1]], [*waited, True]]
    num_head = rng.choice([None, 1, max(1, len(rows) // 3), num_wanted])
    moved = [torch.tensor(each).to(device) for each in ([*rows, *padding], *columns, origins)]
    found = retain_wanted(*moved, size=size, num_head=num_head)
    # Rows of sequences that waited keep their numbers.
    retained = [[-1] * len(each) if waits else each for each, waits in zip(wanted, waited, strict=True)]
    head, numbers, demand, waits = wanted_reference(retained, order, left, num_head=num_head)
    assert found.demand_B.tolist() == [*demand, 0]
    assert found.waits_B.tolist() == [*(a or b for a, b in zip(waits, waited, strict=True)), True]
    expected = [-1 if number is None else number for number in numbers]
    assert found.numbers_X.tolist() == expected + [-1] * (num_wanted - len(rows))
    if num_head is None:
        indices = {number: index for index, number in head}
        assert found.origin_H is None
        assert found.index_H.tolist() == [indices.get(number, 0) for number in range(num_wanted)]
    else:
        head += [(0, 0)] * (num_head - len(head))
        assert found.origin_H is not None
        assert found.index_H.tolist() == [index for index, _ in head]
        assert found.origin_H.tolist() == [number for _, number in head]


def check_gather(seed: int, device: str = "cpu") -> None:
    """Bit by bit, NaN included; of tensors with gaps too."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = 1 + seed % 9
    numbers_I = torch.randint(0, num_rows, (1 + seed % 13,), generator=generator).to(device)
    qkv_RE = torch.randn(num_rows, 3, 24, generator=generator).to(torch.bfloat16)
    tensors = [
        torch.randn(num_rows, 1500, generator=generator),
        qkv_RE[:, :2],
        torch.randn(num_rows, 7, generator=generator).to(torch.float16),
        torch.arange(num_rows) * 3,
        torch.arange(num_rows) % 2 > 0,
        torch.full((num_rows, 5), torch.nan).to(torch.float8_e4m3fn),
    ][: 1 + seed % 6]
    tensors = [tensor.to(device) for tensor in tensors]
    out = [tensor.new_empty(2, len(numbers_I), *tensor.shape[1:])[1] for tensor in tensors]
    assert gather_rows(numbers_I, tensors, out=out) is out
    found_twice = [*gather_rows(numbers_I, tensors), *out]
    for found, tensor in zip(found_twice, [*tensors, *tensors], strict=True):
        expected = tensor[numbers_I] if tensor.element_size() > 1 else tensor.view(torch.uint8)[numbers_I]
        assert found.is_contiguous() and found.dtype == tensor.dtype
        assert torch.equal(_bits(found), _bits(expected.contiguous()))


def _bits(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1).view(torch.uint8)
