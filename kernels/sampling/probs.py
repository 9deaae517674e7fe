"""Probabilities of rows of logits: numbers of each row on a GPU, fp64 tensors on a CPU.

On a GPU nothing waits for the device and no probabilities are stored. Contract in README.md. Shapes: X rows,
V vocabulary, C chunks, Z lanes, B sequences, J drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels import backend
from idlm.kernels.sampling.types import NUM_NUMBERS, TUNING, ChunkShape, PlainProbs, Probs, RowProbs, Tuning

MAX_VOCABULARY = 1 << 24
"""Token ids pass through fp32, which is exact up to here."""
KEY_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low mantissa bits of an fp32 that a logit of this dtype leaves zero."""
ROW_REGISTERS = 128
"""Per thread; the kernel of filtered rows would take twice as many, which would halve occupancy."""


def row_probs(
    logits_XV: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    filters: bool,
    lanes_B: Tensor | None = None,
    forbidden_id: int | None = None,
    own: bool = False,
    tuning: Tuning = TUNING,
) -> Probs:
    """The distribution of every row of `logits_XV` (fp32, bf16 or fp16; a row is contiguous).

    Settings are per row, or, with `lanes_B`, per lane: the X / B consecutive rows of sequence b use the
    settings of lane `lanes_B[b]`. temperature, top_p and min_p fp64, top_k int64 (0: off); temperature 0 is
    the argmax (lowest id) and ignores the rest. `filters=False` promises that no row uses top_k, top_p or
    min_p. The result refers to `logits_XV`. `forbidden_id`: a token that no row may draw; its logits become
    the lowest finite number. `own`: also compute each row's distribution at temperature 1 without filters,
    which `judged_draws` and `entropy` need."""
    num_rows, num_tokens = logits_XV.shape
    assert num_tokens <= MAX_VOCABULARY and logits_XV.stride(1) == 1, f"{logits_XV.shape=}"
    # A kernel would write into the next row.
    assert forbidden_id is None or 0 <= forbidden_id < num_tokens, f"{forbidden_id=} {num_tokens=}"
    assert lanes_B is None or num_rows % max(1, len(lanes_B)) == 0, f"{num_rows=} {lanes_B.shape=}"
    settings, options = (temperature, top_k, top_p, min_p), {"filters": filters, "own": own}
    if not backend.has_kernels(logits_XV.device):
        return plain_row_probs(logits_XV, settings, lanes_B, forbidden_id=forbidden_id, **options)
    return _launched_row_probs(logits_XV, settings, lanes_B, tuning, forbidden_id=forbidden_id, **options)


def nonfinite(probs: Probs, rows_BJ: Tensor) -> Tensor:
    """1 + the position (int64 [B]) of the first of a sequence's rows without a distribution: a logit is NaN
    or infinite, or all are -inf. Draws from such a row are meaningless. 0: no such row. Rows -1 are
    skipped."""
    if isinstance(probs, PlainProbs):
        assert probs.is_nonfinite_X is not None, "these probs were not computed from logits"
        is_nonfinite_BJ = (rows_BJ >= 0) & probs.is_nonfinite_X[rows_BJ.clamp(min=0)]
        return torch.where(is_nonfinite_BJ.any(-1), is_nonfinite_BJ.long().argmax(-1) + 1, 0)
    import triton

    from idlm.kernels.sampling import kernel

    num_sequences, num_rows = rows_BJ.shape
    out_B = torch.empty(num_sequences, dtype=torch.int64, device=rows_BJ.device)
    if num_sequences:
        kernel.nonfinite_kernel[(num_sequences,)](
            *(probs.numbers_XF, rows_BJ.contiguous(), out_B, num_rows),
            ROWS=triton.next_power_of_2(max(1, num_rows)),
            num_warps=1,
        )
    return out_B


def _launched_row_probs(
    logits_XV: Tensor,
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    lanes_B: Tensor | None,
    tuning: Tuning,
    *,
    filters: bool,
    forbidden_id: int | None,
    own: bool,
) -> RowProbs:
    """Numbers of every row's distribution; `settings`: temperature, top_k, top_p, min_p, per row or lane."""
    from idlm.kernels.sampling import kernel, kernel_probs

    num_rows, num_tokens = logits_XV.shape
    shape, device = ChunkShape(num_tokens, tuning), logits_XV.device
    numbers_XF = torch.empty(num_rows, NUM_NUMBERS, dtype=torch.float64, device=device)
    masses_XC = torch.empty(num_rows, shape.num_chunks, dtype=torch.float32, device=device)
    probs = RowProbs(logits_XV=logits_XV, numbers_XF=numbers_XF, masses_XC=masses_XC, tuning=tuning)
    if num_rows == 0:
        return probs
    sizes = (logits_XV.stride(0), num_tokens, shape.num_chunks)
    rows_per_lane = 1 if lanes_B is None else num_rows // len(lanes_B)
    max_XC = torch.empty_like(masses_XC)
    own_XC = tuple(torch.empty(2, *max_XC.shape, device=device)) if own else None
    statistics = (max_XC, masses_XC, own_XC)
    kernel.stats_kernel[(num_rows * shape.num_tiles,)](
        *(logits_XV, settings[0], lanes_B, *statistics),
        *((*sizes, shape.num_tiles), rows_per_lane, -1 if forbidden_id is None else forbidden_id),
        LOWEST=torch.finfo(logits_XV.dtype).min,
        FORBIDS=forbidden_id is not None,
        TILE=shape.tile,
        CHUNK=shape.chunk,
        num_warps=tuning.num_warps,
    )
    kernel_probs.probs_kernel[(num_rows,)](
        *(logits_XV, settings, lanes_B, *statistics, numbers_XF),
        *(_scratch(probs) if filters else None, sizes, rows_per_lane),
        KEY_SHIFT=KEY_SHIFTS[logits_XV.dtype],
        TUNING=tuning,
        GROUP=min(tuning.group, shape.chunks),
        CHUNK=shape.chunk,
        CHUNKS=shape.chunks,
        **({"num_warps": tuning.row_warps, "maxnreg": ROW_REGISTERS} if filters else {"num_warps": 4}),
    )
    return probs


def _scratch(probs: RowProbs) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk numbers and ties [X, C], a list of candidates per row."""
    # Two tensors, so that both begin at 16 bytes: Triton compiles a kernel again for one that does not.
    chunks_XC, ties_XC = (torch.empty_like(probs.masses_XC, dtype=torch.int32) for _ in range(2))
    return chunks_XC, ties_XC, probs.masses_XC.new_empty(len(probs), probs.tuning.capacity)


def plain_row_probs(
    logits_XV: Tensor,
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    lanes_B: Tensor | None,
    *,
    filters: bool,
    forbidden_id: int | None = None,
    own: bool = False,
) -> PlainProbs:
    """`row_probs` in fp64; a filter that no row uses costs nothing."""
    if forbidden_id is not None:
        with torch.inference_mode():
            logits_XV[:, forbidden_id] = torch.finfo(logits_XV.dtype).min
    best_X1 = logits_XV.argmax(-1, keepdim=True)
    # A NaN is the largest.
    highest_X1 = logits_XV.gather(-1, best_X1)
    return PlainProbs(
        probs_XV=_warped_probs(logits_XV, best_X1, highest_X1, settings, lanes_B, filters=filters),
        is_nonfinite_X=~highest_X1[:, 0].isfinite(),
        own_XV=logits_XV.double().softmax(-1) if own else None,
        best_X=best_X1[:, 0] if own else None,
    )


def _warped_probs(
    logits_XV: Tensor,
    best_X1: Tensor,
    highest_X1: Tensor,
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    lanes_B: Tensor | None,
    *,
    filters: bool,
) -> Tensor:
    num_rows = len(logits_XV)
    if lanes_B is not None:
        repeats = num_rows // max(1, len(lanes_B))
        lanes_X = lanes_B.repeat_interleave(repeats)
        settings = (settings[0][lanes_X], settings[1][lanes_X], settings[2][lanes_X], settings[3][lanes_X])
    temperature_X, top_k_X, top_p_X, min_p_X = settings
    if num_rows == 0:
        return logits_XV.double()
    temperatures = set(temperature_X.tolist())
    has_greedy = 0.0 in temperatures
    if temperatures == {0.0}:
        return _one_hot(logits_XV, best_X1)
    # Relative to the maximum: a tiny temperature then gives -inf for the others, and never inf - inf.
    probs_XV = logits_XV.double() - highest_X1
    if temperatures != {1.0}:
        divisor_X = torch.where(temperature_X == 0, 1.0, temperature_X) if has_greedy else temperature_X
        probs_XV /= divisor_X[:, None]
    if filters and max(top_k_X.tolist()) > 0:
        _drop_below_kth(probs_XV, logits_XV, top_k_X)
    probs_XV = probs_XV.softmax(-1)
    is_cut = False
    if filters and min(top_p_X.tolist()) < 1:
        probs_XV, is_cut = _keep_top_p(probs_XV, logits_XV, top_p_X), True
    if filters and max(min_p_X.tolist()) > 0:
        floor_X1 = (min_p_X * probs_XV.amax(-1))[:, None]
        probs_XV, is_cut = probs_XV.where(probs_XV >= floor_X1, 0.0), True
    if is_cut:
        probs_XV = probs_XV / probs_XV.sum(-1, keepdim=True)
    if has_greedy:
        probs_XV = torch.where((temperature_X == 0)[:, None], _one_hot(logits_XV, best_X1), probs_XV)
    return probs_XV


def _one_hot(logits_XV: Tensor, best_X1: Tensor) -> Tensor:
    return torch.zeros_like(logits_XV, dtype=torch.float64).scatter_(-1, best_X1, 1.0)


def _drop_below_kth(scaled_XV: Tensor, logits_XV: Tensor, top_k_X: Tensor) -> None:
    """Drop tokens in place; ties with the k-th stay. Compares logits: scaling may round two into one."""
    num_tokens = scaled_XV.shape[-1]
    is_on_X = (top_k_X > 0) & (top_k_X < num_tokens)
    if bool(is_on_X.any()):
        k_X = torch.where(is_on_X, top_k_X, 1)
        highest_XK = logits_XV.topk(int(k_X.max()), dim=-1).values
        kth_X1 = highest_XK.gather(-1, (k_X - 1)[:, None])
        scaled_XV.masked_fill_((logits_XV < kth_X1) & is_on_X[:, None], -torch.inf)


def _keep_top_p(probs_XV: Tensor, logits_XV: Tensor, top_p_X: Tensor) -> Tensor:
    # Sort by logits: at a large temperature the probabilities of different logits round into one.
    order_XV = logits_XV.sort(dim=-1, descending=True, stable=True).indices
    sorted_XV = probs_XV.gather(-1, order_XV)
    before_XV = sorted_XV.cumsum(-1) - sorted_XV
    keep_XV = (before_XV < top_p_X[:, None]) | (top_p_X[:, None] >= 1.0)
    keep_XV[:, 0] = True
    return probs_XV.where(torch.zeros_like(keep_XV).scatter_(-1, order_XV, keep_XV), 0.0)
