"""What happened between two lines of the metrics, on this rank, and how it travels with a checkpoint: a line
says the same whether or not the run was stopped since the line before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from idlm.train.distributed.collectives import gather_objects
from idlm.train.step import StepLosses

SUMMED = ("sums", "num_tokens", "fed")
"""What is of this rank alone; counts are over all ranks."""


@dataclass(slots=True)
class MetricsWindow:
    """Steps after `step`, which had a line of its own, all of one stage; `start` [s] on the performance
    counter. The tensors are those of `StepLosses`, added up; None before the first step.
    """

    step: int
    start: float
    counts: Tensor | None = None
    sums: Tensor | None = None
    num_tokens: Tensor | None = None
    fed: Tensor | None = None

    def add(self, step: StepLosses) -> None:
        """Take in an optimizer step."""
        for name in ("counts", *SUMMED):
            known, new = getattr(self, name), getattr(step, name)
            setattr(self, name, new.clone() if known is None else known.to(new.device) + new)

    def gathered(self, *, seconds: float) -> dict[str, Any] | None:
        """The windows of all ranks after `seconds` of training, as plain data that `restored` reads; None for
        an empty one. Collective.
        """
        if self.counts is None:
            return None
        ranks = gather_objects({name: getattr(self, name).tolist() for name in SUMMED})
        return {"step": self.step, "seconds": seconds, "counts": self.counts.tolist(), "ranks": ranks}


def restored(
    stored: dict[str, Any] | None, *, step: int, rank: int, world_size: int, device: torch.device
) -> MetricsWindow:
    """The window of `rank` as it was gathered, bit for bit; an empty one after `step` where none was stored.

    Where the number of ranks has changed, rank 0 takes what all have added up.
    """
    now = time.perf_counter()
    if stored is None:
        return MetricsWindow(step=step, start=now)
    own = {}
    for name in SUMMED:
        of_ranks = torch.tensor([one[name] for one in stored["ranks"]], device=device)
        own[name] = of_ranks[rank] if len(of_ranks) == world_size else of_ranks.sum(dim=0) * (rank == 0)
    counts = torch.tensor(stored["counts"], device=device)
    return MetricsWindow(step=stored["step"], start=now - stored["seconds"], counts=counts, **own)
