"""Which rows of a pass have which adapter.

R rows, L adapters, M rows of an adapter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from idlm.kernels.backend import runs_kernels


class RowGroups(NamedTuple):
    """Rows by their adapter. `gate_R` (uint8): 1 plus the number of a MASK row's adapter, 0 in other rows.
    `order_R[starts[g] : starts[g + 1]]` are the numbers of the rows with gate g (int64; L + 2 starts)."""

    gate_R: Tensor
    order_R: Tensor
    starts: Tensor


class HostGroups(NamedTuple):
    """The same where no kernel runs: `gate_R` (bool of one adapter), and the numbers of each adapter's rows,
    as a range where they follow each other."""

    gate_R: Tensor
    rows: tuple[slice | Tensor, ...]


Gate = Tensor | RowGroups | HostGroups
"""Of one adapter whether each row is a MASK row (bool); rows of one or several by adapter."""


MAX_ADAPTERS = 254
"""Of one engine: `group_rows` counts them, and one more, in the bytes of a gate."""


def group_rows(gate_R: Tensor, num_adapters: int) -> Gate:
    """The rows by adapter, on their device, which the host does not wait for; of one adapter `gate_R`. Where
    no kernel runs, `HostGroups`."""
    if not runs_kernels(gate_R):
        return HostGroups(gate_R, tuple(_numbers(gate_R == number + 1) for number in range(num_adapters)))
    if num_adapters == 1:
        return gate_R
    sorted_R, order_R = gate_R.sort(stable=True)
    gates = torch.arange(num_adapters + 2, dtype=gate_R.dtype, device=gate_R.device)
    return RowGroups(gate_R, order_R, torch.searchsorted(sorted_R, gates))


def rows_of(gate: Gate) -> tuple[slice | Tensor, ...]:
    """The rows of each adapter where no kernel runs."""
    if isinstance(gate, HostGroups):
        return gate.rows
    assert isinstance(gate, Tensor), f"{type(gate)=}"
    return (_numbers(gate),)


def _numbers(is_own_R: Tensor) -> slice | Tensor:
    """Numbers of the true rows."""
    rows_M = is_own_R.nonzero()[:, 0]
    first, last = (int(rows_M[0]), int(rows_M[-1])) if len(rows_M) else (0, -1)
    return slice(first, last + 1) if last - first + 1 == len(rows_M) else rows_M


def gate_of(gate: Gate) -> Tensor:
    return gate if isinstance(gate, Tensor) else gate.gate_R


def num_adapters_of(gate: Gate) -> int:
    if isinstance(gate, HostGroups):
        return len(gate.rows)
    return len(gate.starts) - 2 if isinstance(gate, RowGroups) else 1
