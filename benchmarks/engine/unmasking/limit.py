"""Lower bound of a pass over blocks, from the rows that a trace implies and the rates of the same run.

Linears take their products at the rate of a large product, or the stream of their weights, whichever is
longer, in three parts with rows of their own: layer 0 and the queries, keys and values of layer 1; the layers
behind; the head. Attention takes its products or the stream of keys and values.
"""

from __future__ import annotations

from benchmarks.engine.decoding.harness import slot_bytes, weights_of
from benchmarks.engine.unmasking.rows import RowCounts
from idlm.infer.models.loader import LoadedModel

MATRICES = 4
"""Matrices of a layer in `weights_of`: the first is that of queries, keys and values."""


def limit_ms(
    model: LoadedModel, rows: RowCounts, *, batch: int, slots: float, stream: float, product: float
) -> float:
    """Time of a mean pass of `batch` sequences that see `slots` slots each."""
    spec, item = model.local, model.dtype.itemsize
    *weights, head = [weight.numel() for weight in weights_of(model)]
    prefix = sum(weights[: MATRICES + 1])
    fed, kept = rows.fed + rows.committed, rows.kept + rows.committed
    parts = ((prefix, fed), (sum(weights) - prefix, kept), (head, rows.head))
    seconds = sum(max(2 * num * batch * each / product, num * item / stream) for num, each in parts)
    attended = fed + (spec.num_layers - 1) * kept
    flops = 4 * spec.num_heads * spec.head_dim * batch * attended * slots
    return 1e3 * (seconds + max(flops / product, batch * slots * slot_bytes(model) / stream))


def linear_flops(model: LoadedModel, rows: RowCounts, *, batch: int) -> float:
    """FLOPs of all linears of a mean pass without eviction."""
    *weights, head = [weight.numel() for weight in weights_of(model)]
    return 2.0 * batch * (sum(weights) * (rows.kept + rows.committed) + head * rows.head)
