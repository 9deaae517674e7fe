"""Sums over ranks, several in a row, as one rank sees them: in the interpreter and on GPUs.

N ranks, R rows, D width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.kernels.peer_sum import PeerBoxes, peer_sum_rms_norm
from tests.kernels.cases.trunk import assert_close
from tests.kernels.references.peer_sum import peer_sum_reference

EPS = 1e-6
CALLS = [(1, 1), (3, 2), (4, 1), (5, 2), (5, 2), (2, 1), (5, 1), (1, 2), (4, 2), (5, 1)]
"""Rows and rounds of sums that follow each other: each row has its own turn."""


def draw(number: int, size: int, rows: int, boxes: PeerBoxes) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, R, D], the residual and the weight of call `number`, the same on all ranks."""
    generator = torch.Generator().manual_seed(number)
    shape = (rows, boxes.width)
    drawn = [torch.randn(each, generator=generator) for each in ((size, *shape), shape, shape[1:])]
    x_NRD, residual_RD, weight_D = (each.to(boxes.dtype) for each in drawn)
    return x_NRD, residual_RD, weight_D


def check_sums(
    boxes: PeerBoxes,
    calls: Sequence[tuple[int, int | None]],
    before: Callable[[int], None] = lambda number: None,
) -> list[Tensor]:
    """Run the sums on this rank without waiting, `before` each of them what is given; then compare them with
    the definition. Returns the normed rows, whose bits must be those of the other ranks."""
    device, found = boxes.turns.device, []
    for number, (rows, rounds) in enumerate(calls):
        x_NRD, residual_RD, weight_D = (each.to(device) for each in draw(number, boxes.size, rows, boxes))
        before(number)
        found.append(
            peer_sum_rms_norm(x_NRD[boxes.rank], residual_RD, weight_D, eps=EPS, boxes=boxes, rounds=rounds)
        )
    for number, (normed_RD, residual_RD) in enumerate(found):
        x_NRD, start_RD, weight_D = draw(number, boxes.size, calls[number][0], boxes)
        total_RD = torch.zeros(start_RD.shape)
        for x_RD in x_NRD:
            total_RD += x_RD.float()
        total_RD = total_RD.to(boxes.dtype) + start_RD
        assert torch.equal(residual_RD.cpu(), total_RD), f"sum {number} of rank {boxes.rank}"
        true_RD, _ = peer_sum_reference(x_NRD.double(), start_RD.double(), weight_D.double(), eps=EPS)
        plain_RD = F.rms_norm(total_RD.float(), weight_D.shape, eps=EPS).to(boxes.dtype) * weight_D
        assert_close(normed_RD.cpu(), plain_RD, true_RD, f"sum {number} of rank {boxes.rank}")
    return [normed_RD.cpu() for normed_RD, _ in found]
