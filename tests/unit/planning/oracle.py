"""The best possible plan, by mixed-integer programming: the offline oracle of first fit.

Mosaic (section 5.3) compares first fit with such a program.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array


def minimum_peak(
    num_bytes: Sequence[int],
    conflicts: Sequence[Sequence[int]],
    upper: int,
    *,
    lower: int = 0,
    time_limit: float = 60.0,
) -> float:
    """Return the smallest workspace in bytes; `upper` is a peak that some plan reaches (that of first fit),
    `lower` a bound that none beats (the most bytes alive), with which the proof is shorter.

    Sizes are divided by `upper`, so that the big-M of "either below or above" is 1. HiGHS is exact to about
    1e-6 of `upper`. RuntimeError if it does not prove optimality.
    """
    if not upper:
        return 0.0
    num = peak = len(num_bytes)
    shares = np.array(num_bytes, dtype=np.float64) / upper
    pairs = [(one, two) for one in range(num) for two in conflicts[one] if one < two]
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    limits: list[float] = []

    def add(*terms: tuple[int, float], limit: float) -> None:
        """Add `sum of value * variable <= limit`."""
        for column, value in terms:
            rows.append(len(limits))
            columns.append(column)
            values.append(value)
        limits.append(limit)

    # Variables: the offset of each storage, the peak, and for each pair whether the first lies above.
    for index in range(num):
        add((index, 1.0), (peak, -1.0), limit=-shares[index])
    for at, (one, two) in enumerate(pairs):
        is_above = num + 1 + at
        add((one, 1.0), (two, -1.0), (is_above, -1.0), limit=-shares[one])
        add((two, 1.0), (one, -1.0), (is_above, 1.0), limit=1.0 - shares[two])
    num_variables = num + 1 + len(pairs)
    matrix = coo_array((values, (rows, columns)), shape=(len(limits), num_variables)).tocsr()
    found = milp(
        c=np.eye(1, num_variables, peak)[0],
        constraints=LinearConstraint(matrix, ub=np.array(limits)),
        integrality=np.concatenate([np.zeros(num + 1), np.ones(len(pairs))]),
        bounds=Bounds(np.where(np.arange(num_variables) == peak, lower / upper, 0.0), 1.0),
        options={"time_limit": time_limit},
    )
    if found.status != 0:
        raise RuntimeError(f"HiGHS ended with status {found.status}: {found.message}")
    return float(found.fun) * upper
