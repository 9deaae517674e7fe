"""Probabilities of rows of logits, draws, and the test of drafts: the same calls on every device.

On a GPU nothing waits for the device and no probabilities are stored; on a CPU they are fp64 tensors. A step
calls `row_probs`, `verify`, `emit_and_draft`, `put` in this order (put overwrites what emit needs). Rows may
be padding with any content, NaN included, and -1 means no row. Contract in README.md. Shapes: X rows, V
vocabulary, Z lanes, B sequences, J drafts, A = J + 1, D draws; of masks W words of bits, M sequences, Y rows.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from idlm.kernels.backend import has_kernels
from idlm.kernels.sampling import plain
from idlm.kernels.sampling.types import (
    NUM_NUMBERS,
    DraftProbs,
    Drafts,
    LayoutTables,
    PlainDraftProbs,
    Probs,
    RowProbs,
    Tuning,
    Verdict,
)

TUNING = Tuning()
MAX_VOCABULARY = 1 << 24
"""Token ids pass through fp32, which is exact up to here."""


def _module(uses_kernels: bool) -> ModuleType:
    """The module that computes the ops; both have the same functions."""
    if not uses_kernels:
        return plain
    from idlm.kernels.sampling import launch

    return launch


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
    which `judged_draws` and `entropy` need.
    """
    num_rows, num_tokens = logits_XV.shape
    assert num_tokens <= MAX_VOCABULARY and logits_XV.stride(1) == 1, f"{logits_XV.shape=}"
    # A kernel would write into the next row.
    assert forbidden_id is None or 0 <= forbidden_id < num_tokens, f"{forbidden_id=} {num_tokens=}"
    assert lanes_B is None or num_rows % max(1, len(lanes_B)) == 0, f"{num_rows=} {lanes_B.shape=}"
    settings = (temperature, top_k, top_p, min_p)
    if not has_kernels(logits_XV.device):
        return plain.row_probs(
            logits_XV, settings, lanes_B, filters=filters, forbidden_id=forbidden_id, own=own
        )
    from idlm.kernels.sampling import launch

    return launch.row_probs(
        logits_XV, settings, lanes_B, filters=filters, tuning=tuning, forbidden_id=forbidden_id, own=own
    )


def nonfinite(probs: Probs, rows_BJ: Tensor) -> Tensor:
    """1 + the place (int64 [B]) of the first of a sequence's rows without a distribution: a logit is NaN or
    infinite, or all are -inf. Draws from such a row are meaningless. 0: no such row. Rows -1 are skipped.
    """
    return _module(isinstance(probs, RowProbs)).nonfinite(probs, rows_BJ)


def draw(probs: Probs, rows_B: Tensor, uniforms_B: Tensor) -> Tensor:
    """One token (int64 [B]) per row by inversion of a uniform number in (0, 1); 0 for row -1."""
    return _module(isinstance(probs, RowProbs)).draw(probs, rows_B, uniforms_B)


def judged_draws(
    probs: Probs,
    uniforms_X: Tensor,
    temperature: Tensor,
    *,
    lanes_B: Tensor | None = None,
    takes_best_X: Tensor | None = None,
    always_own: bool = False,
) -> tuple[Tensor, Tensor]:
    """A token (int64 [X]) of every row and its confidence (fp64 [X]); `probs` must be computed with `own`.

    The token is drawn by inversion of a number in (0, 1), or is the most likely one (lowest id) where
    `takes_best_X` (bool). The confidence is its probability in the row's distribution, or in the model's own
    if the row is greedy (settings as in `row_probs`) or `always_own`.
    """
    assert len(uniforms_X) == len(probs) and uniforms_X.is_contiguous(), f"{uniforms_X.shape=}"
    return _module(isinstance(probs, RowProbs)).judged_draws(
        probs, uniforms_X, temperature, lanes_B, takes_best_X, always_own=always_own
    )


def entropy(probs: Probs) -> Tensor:
    """Entropy (nats, fp64 [X]) of every row at temperature 1 without filters; needs `own`."""
    return probs.numbers_XF[:, 7] if isinstance(probs, RowProbs) else plain.entropy(probs)


def draft_probs(
    num_lanes: int,
    num_drafts: int,
    num_tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tuning: Tuning = TUNING,
) -> Drafts:
    """An empty store of drafts' probabilities; `dtype` of the logits; `tuning` as in `row_probs`."""
    shape = (num_lanes, num_drafts, num_tokens)
    if not has_kernels(device):
        return PlainDraftProbs(probs_ZJV=torch.zeros(shape, dtype=torch.float64, device=device))
    from idlm.kernels.sampling import launch

    num_chunks = launch.num_chunks_of(num_tokens, tuning)
    return DraftProbs(
        logits_ZJV=torch.zeros(shape, dtype=dtype, device=device),
        numbers_ZJF=torch.zeros(*shape[:2], NUM_NUMBERS, dtype=torch.float64, device=device),
        masses_ZJC=torch.zeros(*shape[:2], num_chunks, dtype=torch.float32, device=device),
    )


def put(store: Drafts, lanes_B: Tensor, probs: Probs, rows_BJ: Tensor, *, active_B: Tensor) -> None:
    """Store the probabilities of `rows_BJ` in the lanes of active sequences; row -1 changes nothing."""
    if isinstance(probs, RowProbs) and isinstance(store, DraftProbs):
        dtypes = (probs.logits_XV.dtype, torch.float32)
        assert store.logits_ZJV.dtype in dtypes, f"{store.logits_ZJV.dtype=} {dtypes=}"
        assert store.masses_ZJC.shape[2] == probs.masses_XC.shape[1], f"{probs.tuning=}"
    _module(isinstance(probs, RowProbs)).put(store, lanes_B, probs, rows_BJ, active_B)


def verify(
    probs: Probs,
    store: Drafts,
    tables: LayoutTables,
    *,
    lanes_B: Tensor,
    first_rows_B: Tensor,
    active_B: Tensor,
    drafts_ZJ: Tensor,
    tau_Z: Tensor,
    layout_Z: Tensor,
    uniforms_BJ: Tensor,
) -> Verdict:
    """Accept draft j while u * q < (1 + tau) * p, with p from row first + j and q from the store.

    `first_rows_B`: row of the pending token; `drafts_ZJ`, `layout_Z`, `lanes_B` int64, `active_B` bool,
    `tau_Z` and `uniforms_BJ` fp64 (at least J columns). `emit_and_draft` adds the last token.
    """
    assert uniforms_BJ.shape[1] >= drafts_ZJ.shape[1] and drafts_ZJ.is_contiguous(), f"{uniforms_BJ.shape=}"
    num_masks = drafts_ZJ.shape[1]
    assert tables.draft_rows_YAJ.shape[1:] == (num_masks + 1, num_masks), f"{tables.draft_rows_YAJ.shape=}"
    columns = (lanes_B, first_rows_B, active_B, drafts_ZJ, tau_Z, layout_Z)
    return _module(isinstance(probs, RowProbs)).verify(probs, store, tables, columns, uniforms_BJ)


def emit_and_draft(
    probs: Probs,
    store: Drafts,
    verdict: Verdict,
    *,
    lanes_B: Tensor,
    uniforms_BA: Tensor,
    drafts_ZJ: Tensor,
    layout_Z: Tensor,
    takes_best: bool = False,
) -> None:
    """Write the token after the accepted drafts into `verdict.token_ids_BA`, and the next drafts and layout
    of active sequences into their lanes (0 if there is no draft row).

    The token comes from normalise(max(0, p - q)) after a rejection (from p if that is zero), else from p, by
    the first column of `uniforms_BA`; the others are for the drafts. `takes_best`: drafts are the argmax
    instead of a draw, as in the published rule (lossy). Without drafts (J = 0) the layout stays.
    """
    assert uniforms_BA.shape[1] > drafts_ZJ.shape[1] and drafts_ZJ.is_contiguous(), f"{uniforms_BA.shape=}"
    state = (drafts_ZJ, layout_Z)
    _module(isinstance(probs, RowProbs)).emit_and_draft(
        probs, store, verdict, lanes_B, uniforms_BA, state, takes_best=takes_best
    )


def allowed_logits(logits_XV: Tensor, rows_Y: Tensor, bits_MW: Tensor, masks_Y: Tensor) -> Tensor:
    """Copies [Y, V] of the rows `rows_Y` (int64), in which tokens that are not allowed have -inf.

    `masks_Y` (int64): the row of `bits_MW` that says which are; -1: all. `bits_MW` int32, contiguous: bit
    i % 32 of word i // 32 is set if token i is allowed.
    """
    assert 32 * bits_MW.shape[1] >= logits_XV.shape[1] and bits_MW.is_contiguous(), f"{bits_MW.shape=}"
    if not has_kernels(logits_XV.device):
        return plain.allowed_logits(logits_XV, rows_Y, bits_MW, masks_Y)
    from idlm.kernels.sampling import launch_bits

    return launch_bits.allowed_logits(logits_XV, rows_Y, bits_MW, masks_Y)


def restrict(
    store: Drafts, lanes_M: Tensor, bits_MAW: Tensor, only_MD: Tensor, *, tuning: Tuning = TUNING
) -> None:
    """Condition the stored distributions of some drafts on allowed tokens, in place.

    Draft d < D of lane `lanes_M[m]` keeps the tokens that row d of `bits_MAW[m]` allows (as in
    `allowed_logits`; A >= D), with the same ratios between them; if it has none of them, all its
    probabilities become 0. Where `only_MD` (int64) is a token and not -1, that token gets probability 1.
    """
    assert only_MD.shape[1] <= bits_MAW.shape[1] and bits_MAW.is_contiguous(), f"{bits_MAW.shape=}"
    if not isinstance(store, DraftProbs):
        plain.restrict(store, lanes_M, bits_MAW, only_MD)
        return
    from idlm.kernels.sampling import launch_bits

    launch_bits.restrict(store, lanes_M, bits_MAW, only_MD.contiguous(), tuning)


def uniforms(
    seeds: Tensor,
    samples: Tensor,
    steps: Tensor,
    num_draws: int,
    *,
    lanes_B: Tensor | None = None,
    steps_by_lane: bool = True,
) -> Tensor:
    """Numbers in (0, 1), fp64 [B, num_draws]: Philox4x32-10 of (seed, sample, step, draw), int64 tensors.

    One entry per sequence, or, with `lanes_B`, per lane (steps only if `steps_by_lane`). Devices agree
    exactly.
    """
    module = _module(has_kernels(seeds.device))
    return module.uniforms(seeds, samples, steps, lanes_B, num_draws, steps_by_lane=steps_by_lane)
