"""The best token of every wanted row and its probability, from hidden states and the output head.

Two routes with the same results: chunks of rows through the library's product, and one fused kernel that
stores neither logits nor gathered rows. Contract in README.md.
Shapes: R rows of the pass, X wanted rows, Y rows of a chunk, V vocabulary, D width, S forbidden ids."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.backend import INTERPRETED, library_linear
from idlm.kernels.linear_cross_entropy.op import chunk_rows as even_chunk_rows
from idlm.kernels.masked_logits.types import Proposals
from idlm.kernels.sampling import entropy as entropy_of
from idlm.kernels.sampling import judged_draws, nonfinite, row_probs

MAX_BYTES = 128 << 20
"""Most memory of a chunk: its logits and its gathered rows."""
GPU_ROUTE = "fused"
"""The default route where the fused kernel runs; elsewhere it is chunks."""
ROUTES = ("chunks", "fused")
FUSED_MAJORS = (9, 10)
"""Compute capabilities whose multiprocessors have the shared memory of the fused kernel, 192 KiB."""
MAX_VOCABULARY = 1 << 24
"""Token ids pass through fp32, which is exact up to here."""


def has_fused(device: torch.device) -> bool:
    """Whether the fused kernel runs on a device: a GPU with enough shared memory, or Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETED
    return torch.cuda.get_device_capability(device)[0] in FUSED_MAJORS


@torch.inference_mode()
def masked_logits(
    hidden_RD: Tensor,
    rows_X: Tensor,
    weight_VD: Tensor,
    *,
    forbidden_S: Tensor | None = None,
    entropy: bool = False,
    route: str | None = None,
    max_bytes: int = MAX_BYTES,
    workspace: Tensor | None = None,
) -> Proposals:
    """Propose a token for row `rows_X[x]` (int64, -1: no row) of `hidden_RD` (fp32, bf16 or fp16).

    Logits are hidden times weight (same dtype, contiguous rows), rounded to that dtype; the token is the
    argmax, ties to the lower id. `forbidden_S`: ids (int64) that have no probability. `entropy`: also return
    it. `route`: "fused" (see `has_fused`) or "chunks"; None: the default. Chunks take `max_bytes`, whatever X
    is. `workspace` (fp32, flat): where the fused route stores its numbers, of `WORKSPACE_BYTES` + X *
    `WORKSPACE_ROW_BYTES` bytes."""
    assert hidden_RD.dtype == weight_VD.dtype and hidden_RD.shape[1] == weight_VD.shape[1], (
        f"{hidden_RD.dtype=} {weight_VD.dtype=} {hidden_RD.shape=} {weight_VD.shape=}"
    )
    assert hidden_RD.stride(1) == weight_VD.stride(1) == 1, f"{hidden_RD.stride()=} {weight_VD.stride()=}"
    assert len(weight_VD) <= MAX_VOCABULARY and rows_X.is_contiguous(), f"{weight_VD.shape=}"
    if route is None:
        route = GPU_ROUTE if has_fused(hidden_RD.device) else "chunks"
    assert route in ROUTES, f"{route=}"
    if route == "fused":
        assert has_fused(hidden_RD.device), f"the fused kernel does not run on {hidden_RD.device}"
        from idlm.kernels.masked_logits import launch

        given = hidden_RD, rows_X, weight_VD
        return launch.run(*given, forbidden_S=forbidden_S, entropy=entropy, workspace=workspace)
    step = chunk_rows(len(rows_X), weight_VD, max_bytes)
    parts = []
    for start in range(0, max(1, len(rows_X)), step):
        rows = slice(start, start + step)
        # In a function, so that the logits of a chunk are freed before those of the next are computed.
        parts.append(_chunk(hidden_RD, rows_X[rows], weight_VD, forbidden_S, entropy=entropy))
    return _joined(parts, rows_X >= 0)


def _chunk(
    hidden_RD: Tensor, rows_Y: Tensor, weight_VD: Tensor, forbidden_S: Tensor | None, *, entropy: bool
) -> Proposals:
    logits_YV = library_linear(hidden_RD[rows_Y.clamp(min=0)], weight_VD)
    if forbidden_S is not None:
        logits_YV.index_fill_(1, forbidden_S, -torch.inf)
    return (_best if logits_YV.is_cuda else _plain)(logits_YV, entropy=entropy)


def chunk_rows(num_rows: int, weight_VD: Tensor, max_bytes: int) -> int:
    """Rows of a chunk: few, about equal chunks, in whole tiles of a product."""
    row_bytes = sum(weight_VD.shape) * weight_VD.element_size()
    return even_chunk_rows(num_rows, row_bytes, max_bytes)


def _best(logits_YV: Tensor, *, entropy: bool) -> Proposals:
    """The likeliest tokens, by the kernels of the sampling op."""
    num_rows = len(logits_YV)
    zeros_Y = logits_YV.new_zeros(num_rows, dtype=torch.float64)
    unused_Y = logits_YV.new_zeros(num_rows, dtype=torch.int64)
    probs = row_probs(logits_YV, zeros_Y, unused_Y, zeros_Y, zeros_Y, filters=False, own=True)
    ids_Y, own_Y = judged_draws(probs, zeros_Y + 0.5, zeros_Y)
    is_nonfinite_Y = nonfinite(probs, torch.arange(num_rows, device=logits_YV.device)[:, None]) > 0
    return Proposals(
        token_X=ids_Y,
        own_X=own_Y,
        is_nonfinite_X=is_nonfinite_Y,
        entropy_X=entropy_of(probs) if entropy else None,
    )


def _plain(logits_YV: Tensor, *, entropy: bool) -> Proposals:
    """The same in fp64 and plain torch."""
    logits_YV = logits_YV.double()
    largest_Y1 = logits_YV.amax(-1, keepdim=True)
    below_YV = logits_YV - torch.where(largest_Y1.isfinite(), largest_Y1, 0.0)
    weights_YV = below_YV.exp()
    mass_Y = weights_YV.sum(-1)
    ids_Y = _first(below_YV == 0)
    entropy_Y = None
    if entropy:
        moments_YV = torch.where(weights_YV > 0, weights_YV * below_YV, 0.0)
        entropy_Y = mass_Y.log() - moments_YV.sum(-1) / mass_Y
    return Proposals(
        token_X=ids_Y,
        own_X=below_YV.gather(1, ids_Y[:, None])[:, 0].exp() / mass_Y,
        is_nonfinite_X=~largest_Y1[:, 0].isfinite(),
        entropy_X=entropy_Y,
    )


def _first(is_best_YV: Tensor) -> Tensor:
    """The lowest id [Y] of those that are best; 0 if none is."""
    ids_V = torch.arange(is_best_YV.shape[1], device=is_best_YV.device)
    ids_Y = torch.where(is_best_YV, ids_V, len(ids_V)).amin(-1)
    return torch.where(ids_Y < len(ids_V), ids_Y, 0)


def _joined(parts: list[Proposals], is_row_X: Tensor) -> Proposals:
    """The proposals of all chunks, with zeros for rows without a distribution and for no row."""
    names = ("token_X", "own_X", "is_nonfinite_X", "entropy_X")
    columns = [[getattr(part, name) for part in parts] for name in names]
    joined = [None if one[0] is None else one[0] if len(one) == 1 else torch.cat(one) for one in columns]
    token_X, own_X, is_nonfinite_X, entropy_X = joined
    assert token_X is not None and own_X is not None and is_nonfinite_X is not None
    is_good_X = is_row_X & ~is_nonfinite_X
    return Proposals(
        token_X=torch.where(is_good_X, token_X, 0),
        own_X=torch.where(is_good_X, own_X, 0.0),
        is_nonfinite_X=is_row_X & is_nonfinite_X,
        entropy_X=None if entropy_X is None else torch.where(is_good_X, entropy_X, 0.0),
    )
