"""Values that the op takes and returns, and the bytes of its workspace. Shapes: X wanted rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

WORKSPACE_BYTES = 8 << 20
WORKSPACE_ROW_BYTES = 16
"""The kernel needs at most so many bytes, and so many for each row. With less, the ranges
of a million rows would be longer, and the last round of programs emptier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """A token of every wanted row, int64 [X], and its values in the row's distribution, fp64 [X].

    `own_X`: its probability under the model's own distribution (temperature 1). `is_nonfinite_X` (bool): the
    row has no distribution (a logit is NaN or +inf, or all are -inf); its other values are 0. `entropy_X`:
    nats at temperature 1, None unless requested. For row -1 everything is 0."""

    token_X: Tensor
    own_X: Tensor
    is_nonfinite_X: Tensor
    entropy_X: Tensor | None = None
