"""Whether products of this CPU give a row the same bits in any number of rows, as MKL is asked for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import idlm

NUM_ROWS = 300


@functools.cache
def rows_keep_bits() -> bool:
    """Ask the library, for the products' first, middle and all rows."""
    assert idlm.__version__, "its import sets MKL's mode"
    generator = torch.Generator().manual_seed(0)
    for D, E in ((32, 48), (128, 96), (64, 300)):
        x_RD, weight_ED = (torch.randn(n, D, generator=generator) for n in (NUM_ROWS, E))
        whole_RE = torch.nn.functional.linear(x_RD, weight_ED)
        for num in (*range(1, 65), 100):
            for first in (0, 7):
                rows = slice(first, first + num)
                if not torch.equal(torch.nn.functional.linear(x_RD[rows], weight_ED), whole_RE[rows]):
                    return False
    return True


def assert_same_rows(found_RE: Tensor, expected_RE: Tensor) -> None:
    """Compare float32 results of passes of other sizes: bit for bit where the CPU allows it."""
    if rows_keep_bits():
        assert torch.equal(found_RE, expected_RE)
    torch.testing.assert_close(found_RE, expected_RE, atol=1e-4, rtol=0)
