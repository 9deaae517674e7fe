"""What an objective is: which rows a sample becomes, and which summed losses they yield. The trainer knows no
more.

Adding an objective is one new file in this package that registers a class.

Shape letters: B packed rows, T rows of one packed row, D width, V vocabulary, M supervised rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from idlm.registry import Registry
from idlm.train.curriculum import Stage
from idlm.train.layout import Sample, SampleRows

Head = Callable[[Tensor], Tensor]
Batch = dict[str, Tensor]
MAX_LOGITS = 2**26
"""Logit elements that may exist at once; 2**26 fp32 values are 256 MiB. Beyond it the head runs chunk by
chunk.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Teacher-forced expected acceptance, per draft position: sums [num_masks] and counts [num_masks],
    detached.
    """

    sums: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """`sums` [num_terms]: summed negative log-likelihood in nats per term, in the order of
    `Objective.term_names`.
    """

    sums: Tensor
    overlap: Overlap | None = None


class Objective(Protocol):
    """One training objective; stateless."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """Names of the summed losses, in the order of `Terms.sums`."""

    def default_row_length(self, max_length: int) -> int:
        """Rows that hold the longest allowed sample."""

    def num_rows(self, sample: Sample) -> int:
        """Rows the sample occupies; the same at every stage."""

    def rows(self, sample: Sample, stage: Stage) -> SampleRows:
        """The sample's rows at a stage of the curriculum."""

    def counts(self, batch: Batch) -> Tensor:
        """Supervised tokens per term, int64 [num_terms] on the CPU, from shapes alone."""

    def terms(self, head: Head, hidden_BTD: Tensor, batch: Batch, *, want_overlap: bool) -> Terms:
        """Summed losses of a micro-batch; `head` maps [M, D] to logits [M, V] and is called on supervised
        rows only.
        """

    def needs_means(self, stage: Stage) -> bool:
        """Whether `weights` looks at the step's own losses, which must then be known before the backward
        pass.
        """

    def weights(self, stage: Stage, means: Tensor | None) -> Tensor:
        """Weight of each term, float32 [num_terms]; `means`: global means, given where `needs_means`."""


OBJECTIVES: Registry[Callable[..., Objective]] = Registry("objective", "idlm.train.objectives")
"""Factories `(mask_token_id: int | None, mask_region: str) -> Objective`."""


def token_losses(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """Negative log-likelihood in float32 [M]."""
    return functional.cross_entropy(logits_MV.float(), labels_M, reduction="none")


def chunked(
    function: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...], *, rows: int
) -> list[Tensor]:
    """Apply `function` to chunks of at most `rows` rows, recomputing in backward when there is more than one
    chunk.

    Returns the concatenated outputs. Keeps at most one chunk of logits alive, at the price of a second head
    product.
    """
    total = len(tensors[0])
    if total <= rows:
        return list(function(*tensors))
    outputs = []
    for start in range(0, total, rows):
        chunk = tuple(tensor[start : start + rows] for tensor in tensors)
        outputs.append(checkpoint(function, *chunk, use_reentrant=False))
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)]
