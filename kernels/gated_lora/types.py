"""Which rows of a pass have which adapter.

R rows, L adapters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowGroups(NamedTuple):
    """Rows by their adapter. `gate_R` (uint8): 1 plus the number of a MASK row's adapter, 0 in other rows.
    `order_R[starts[g] : starts[g + 1]]` are the numbers of the rows with gate g (int64; L + 2 starts)."""

    gate_R: Tensor
    order_R: Tensor
    starts: Tensor


Gate = Tensor | RowGroups
"""Of one adapter whether each row is a MASK row (bool), of several `RowGroups`."""


MAX_ADAPTERS = 254
"""Of one engine: `group_rows` counts them, and one more, in the bytes of a gate."""


def group_rows(gate_R: Tensor, num_adapters: int) -> Gate:
    """The rows by adapter, on their device, which the host does not wait for; of one adapter `gate_R`."""
    if num_adapters == 1:
        return gate_R
    sorted_R, order_R = gate_R.sort(stable=True)
    gates = torch.arange(num_adapters + 2, dtype=gate_R.dtype, device=gate_R.device)
    return RowGroups(gate_R, order_R, torch.searchsorted(sorted_R, gates))


def gate_of(gate: Gate) -> Tensor:
    return gate.gate_R if isinstance(gate, RowGroups) else gate


def num_adapters_of(gate: Gate) -> int:
    return len(gate.starts) - 2 if isinstance(gate, RowGroups) else 1
