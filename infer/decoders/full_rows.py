"""The plan of a pass of decoder `full`, and the places that it wants.

Shapes: B sequences, W places of the active block, X wanted places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.infer.state.batch import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasPlan(StepPlan):
    """A plan whose wanted row x, or group x of them, predicts place `place_X[x]` of the active block of
    sequence `sequence_X[x]`.

    `is_maskable_BW` (bool): masks that this pass may decide; wanted rows of others mean nothing.
    `draw_steps_B`: each sequence's step of the random stream.
    """

    sequence_X: Tensor
    place_X: Tensor
    is_maskable_BW: Tensor
    draw_steps_B: Tensor

    @property
    def batch_lanes_B(self) -> Tensor:
        """Lanes of the sequences that the batch has."""
        return self.lanes_B[: len(self.is_maskable_BW)]


def wanted_places(is_maskable_BW: Tensor, *, is_exact: bool) -> tuple[Tensor, Tensor]:
    """Sequence and place of every wanted row: exactly the masks that may be decided, which the host waits
    for, or (a static shape) all places. At least one row.
    """
    if is_exact:
        sequence_X, place_X = is_maskable_BW.nonzero(as_tuple=True)
        if len(place_X):
            return sequence_X, place_X
        is_maskable_BW = is_maskable_BW[:1, :1]
    num_sequences, width = is_maskable_BW.shape
    flat_X = torch.arange(num_sequences * width, device=is_maskable_BW.device)
    return flat_X // width, flat_X % width
