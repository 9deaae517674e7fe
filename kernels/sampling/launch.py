"""Grids and scratch memory of the kernels. Nothing here waits for the device.

Shapes: X rows, V vocabulary, C chunks, Z lanes, B sequences, J drafts, A = J + 1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from idlm.kernels.sampling import kernel, kernel_verify
from idlm.kernels.sampling import kernel_probs as kernel_probs
from idlm.kernels.sampling.types import NUM_NUMBERS, DraftProbs, LayoutTables, RowProbs, Tuning, Verdict

KEY_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low mantissa bits of an fp32 that a logit of this dtype leaves zero."""
SMALLEST_CHUNK = 16
ROW_REGISTERS = 128
"""Per thread; the kernel of filtered rows would take twice as many, which would halve occupancy."""
MAX_DRAWS = 128
"""Philox numbers of a program of one warp. 16,384 took 25 s to compile and 3.3 GB of spills on an H200."""


def chunk_of(num_tokens: int, tuning: Tuning) -> int:
    """Tokens per chunk: a constant of the vocabulary."""
    return min(tuning.chunk, max(SMALLEST_CHUNK, triton.next_power_of_2(num_tokens)))


def num_chunks_of(num_tokens: int, tuning: Tuning) -> int:
    """Chunks of a row."""
    return triton.cdiv(num_tokens, chunk_of(num_tokens, tuning))


class Shape:
    """Sizes and options of every launch over chunks."""

    def __init__(self, num_tokens: int, tuning: Tuning) -> None:
        self.chunk = chunk_of(num_tokens, tuning)
        self.num_chunks = num_chunks_of(num_tokens, tuning)
        self.chunks = triton.next_power_of_2(self.num_chunks)
        self.tile = min(tuning.tile, self.chunks)
        self.num_tiles = triton.cdiv(self.num_chunks, self.tile)
        # For kernels that hold two rows at once.
        self.half_tile = max(1, self.tile // 2)
        self.num_half_tiles = triton.cdiv(self.num_chunks, self.half_tile)


def row_probs(
    logits_XV: Tensor,
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    lanes_B: Tensor | None,
    *,
    filters: bool,
    tuning: Tuning,
    forbidden_id: int | None = None,
    own: bool = False,
) -> RowProbs:
    """Numbers of every row's distribution; `settings`: temperature, top_k, top_p, min_p, per row or lane."""
    num_rows, num_tokens = logits_XV.shape
    shape, device = Shape(num_tokens, tuning), logits_XV.device
    probs = _empty_probs(logits_XV, shape.num_chunks, tuning)
    if num_rows == 0:
        return probs
    sizes = (num_tokens, shape.num_chunks)
    rows_per_lane = 1 if lanes_B is None else num_rows // len(lanes_B)
    lanes = settings[1] if lanes_B is None else lanes_B
    has_lanes = {"HAS_LANES": lanes_B is not None, "OWN": own}
    max_XC = torch.empty_like(probs.masses_XC)
    own_XC, moments_XC = torch.empty(2, *max_XC.shape, device=device) if own else (max_XC, max_XC)
    statistics = (max_XC, probs.masses_XC, own_XC, moments_XC)
    kernel.stats_kernel[(num_rows * shape.num_tiles,)](
        logits_XV,
        settings[0],
        lanes,
        *statistics,
        logits_XV.stride(0),
        *sizes,
        shape.num_tiles,
        rows_per_lane,
        -1 if forbidden_id is None else forbidden_id,
        LOWEST=torch.finfo(logits_XV.dtype).min,
        FORBIDS=forbidden_id is not None,
        **has_lanes,
        TILE=shape.tile,
        CHUNK=shape.chunk,
        num_warps=tuning.num_warps,
    )
    kernel_probs.probs_kernel[(num_rows,)](
        logits_XV,
        *settings,
        lanes,
        *statistics,
        probs.numbers_XF,
        *(_scratch(probs) if filters else (max_XC, max_XC, max_XC)),
        logits_XV.stride(0),
        *sizes,
        rows_per_lane,
        **has_lanes,
        **_search_options(probs, shape),
        FILTERS=filters,
        CHUNK=shape.chunk,
        CHUNKS=shape.chunks,
        **({"num_warps": tuning.row_warps, "maxnreg": ROW_REGISTERS} if filters else {"num_warps": 4}),
    )
    return probs


def _empty_probs(logits_XV: Tensor, num_chunks: int, tuning: Tuning) -> RowProbs:
    num_rows, device = len(logits_XV), logits_XV.device
    return RowProbs(
        logits_XV=logits_XV,
        numbers_XF=torch.empty(num_rows, NUM_NUMBERS, dtype=torch.float64, device=device),
        masses_XC=torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device),
        tuning=tuning,
    )


def _scratch(probs: RowProbs) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk numbers and ties [X, C], a list of candidates per row."""
    num_rows, num_chunks = probs.masses_XC.shape
    device = probs.masses_XC.device
    # Two tensors, so that both begin at 16 bytes: Triton compiles a kernel again for one that does not.
    chunks_XC, ties_XC = (
        torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device) for _ in range(2)
    )
    list_XL = torch.empty(num_rows, probs.tuning.capacity, dtype=torch.float32, device=device)
    return chunks_XC, ties_XC, list_XL


def _search_options(probs: RowProbs, shape: Shape) -> dict[str, int]:
    tuning = probs.tuning
    return {
        "KEY_SHIFT": KEY_SHIFTS[probs.logits_XV.dtype],
        "LIST": tuning.capacity,
        "LISTED": tuning.listed,
        "GROUP": min(tuning.group, shape.chunks),
        "SAMPLE": tuning.sample,
        "STEP": tuning.step,
    }


def nonfinite(probs: RowProbs, rows_BJ: Tensor) -> Tensor:
    """1 + the first place [B], or 0."""
    num_sequences, num_rows = rows_BJ.shape
    rows_BJ = rows_BJ.contiguous()
    out_B = torch.empty(num_sequences, dtype=torch.int64, device=rows_BJ.device)
    if num_sequences:
        kernel.nonfinite_kernel[(num_sequences,)](
            probs.numbers_XF,
            rows_BJ,
            out_B,
            num_rows,
            ROWS=triton.next_power_of_2(max(1, num_rows)),
            num_warps=1,
        )
    return out_B


def draw(probs: RowProbs, rows_B: Tensor, uniforms_B: Tensor) -> Tensor:
    """Tokens [B]."""
    shape = Shape(probs.logits_XV.shape[1], probs.tuning)
    rows_B = rows_B.contiguous()
    out_B = torch.empty_like(rows_B)
    if len(rows_B):
        kernel.draw_kernel[(len(rows_B),)](
            *probs.tensors(),
            rows_B,
            uniforms_B,
            out_B,
            probs.logits_XV.stride(0),
            uniforms_B.stride(0),
            probs.logits_XV.shape[1],
            shape.num_chunks,
            CHUNK=shape.chunk,
            CHUNKS=shape.chunks,
            num_warps=4,
        )
    return out_B


def judged_draws(
    probs: RowProbs,
    uniforms_X: Tensor,
    temperature: Tensor,
    lanes_B: Tensor | None,
    takes_best_X: Tensor | None,
    *,
    always_own: bool,
) -> tuple[Tensor, Tensor]:
    """Tokens and their probabilities [X]."""
    num_rows, num_tokens = probs.logits_XV.shape
    shape, device = Shape(num_tokens, probs.tuning), probs.logits_XV.device
    ids_X = torch.empty(num_rows, dtype=torch.int64, device=device)
    confidence_X = torch.empty(num_rows, dtype=torch.float64, device=device)
    if num_rows:
        kernel.judged_kernel[(num_rows,)](
            *probs.tensors(),
            uniforms_X,
            temperature,
            ids_X if lanes_B is None else lanes_B,
            ids_X if takes_best_X is None else takes_best_X,
            ids_X,
            confidence_X,
            probs.logits_XV.stride(0),
            num_tokens,
            shape.num_chunks,
            1 if lanes_B is None else num_rows // len(lanes_B),
            HAS_LANES=lanes_B is not None,
            HAS_BEST=takes_best_X is not None,
            ALWAYS_OWN=always_own,
            CHUNK=shape.chunk,
            CHUNKS=shape.chunks,
            num_warps=4,
        )
    return ids_X, confidence_X


def uniforms(
    seeds_Z: Tensor,
    samples_Z: Tensor,
    steps: Tensor,
    lanes_B: Tensor | None,
    num_draws: int,
    *,
    steps_by_lane: bool = True,
) -> Tensor:
    """Philox numbers [B, num_draws], fp64."""
    num_sequences = len(seeds_Z if lanes_B is None else lanes_B)
    out_BD = torch.empty(num_sequences, num_draws, dtype=torch.float64, device=seeds_Z.device)
    tile = min(MAX_DRAWS, triton.next_power_of_2(num_draws))
    if out_BD.numel():
        kernel.uniforms_kernel[(num_sequences, triton.cdiv(num_draws, tile))](
            seeds_Z,
            samples_Z,
            steps,
            seeds_Z if lanes_B is None else lanes_B,
            out_BD,
            num_draws,
            HAS_LANES=lanes_B is not None,
            STEP_BY_LANE=steps_by_lane,
            TILE=tile,
            num_warps=1,
        )
    return out_BD


def put(store: DraftProbs, lanes_B: Tensor, probs: RowProbs, rows_BJ: Tensor, active_B: Tensor) -> None:
    """Copy rows into their lanes."""
    num_tokens = probs.logits_XV.shape[1]
    shape = Shape(num_tokens, probs.tuning)
    if rows_BJ.numel():
        kernel_verify.put_kernel[(rows_BJ.numel() * shape.num_half_tiles,)](
            *probs.tensors(),
            *store.tensors(),
            lanes_B,
            active_B,
            rows_BJ,
            probs.logits_XV.stride(0),
            num_tokens,
            shape.num_chunks,
            shape.num_half_tiles,
            rows_BJ.shape[1],
            TILE=shape.half_tile,
            CHUNK=shape.chunk,
            num_warps=probs.tuning.num_warps,
        )


def verify(
    probs: RowProbs,
    store: DraftProbs,
    tables: LayoutTables,
    columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    uniforms_BJ: Tensor,
) -> Verdict:
    """`columns`: lanes_B, first_rows_B, active_B, drafts_ZJ, tau_Z, layout_Z."""
    num_sequences, num_masks = len(columns[0]), columns[3].shape[1]
    ints: dict[str, Any] = {"dtype": torch.int64, "device": probs.logits_XV.device}
    values_FB = torch.empty(kernel_verify.NUM_VERDICT.value, num_sequences, **ints)
    token_ids_BA = torch.empty(num_sequences, num_masks + 1, **ints)
    draft_rows_BJ = torch.empty(num_sequences, num_masks, **ints)
    verdict = Verdict(values_FB, token_ids_BA, draft_rows_BJ, *values_FB)
    if num_sequences:
        kernel_verify.verify_kernel[(num_sequences,)](
            probs.logits_XV,
            probs.numbers_XF,
            *store.tensors(),
            *columns,
            tables.num_drafts_Y,
            tables.draft_rows_YAJ,
            tables.next_layouts_YA,
            uniforms_BJ,
            verdict.values_FB,
            verdict.token_ids_BA,
            verdict.draft_rows_BJ,
            probs.logits_XV.stride(0),
            uniforms_BJ.stride(0),
            probs.logits_XV.shape[1],
            probs.masses_XC.shape[1],
            num_sequences,
            num_masks,
            MASKS=triton.next_power_of_2(max(1, num_masks)),
            CHUNK=chunk_of(probs.logits_XV.shape[1], probs.tuning),
            num_warps=1,
        )
    return verdict


def emit_and_draft(
    probs: RowProbs,
    store: DraftProbs,
    verdict: Verdict,
    lanes_B: Tensor,
    uniforms_BA: Tensor,
    state: tuple[Tensor, Tensor],
    *,
    takes_best: bool,
) -> None:
    """The token after the accepted drafts, and the next drafts and layouts into `state` (drafts_ZJ,
    layout_Z), one draw per column of `uniforms_BA`. Two launches: the residual's masses, the draws.
    """
    num_sequences, num_masks = verdict.draft_rows_BJ.shape
    num_tokens = probs.logits_XV.shape[1]
    shape = Shape(num_tokens, probs.tuning)
    if num_sequences == 0:
        return
    excess_BC = torch.empty(num_sequences, shape.num_chunks, dtype=torch.float32, device=lanes_B.device)
    if num_masks:
        kernel_verify.residual_kernel[(num_sequences * shape.num_half_tiles,)](
            *probs.tensors(),
            *store.tensors(),
            lanes_B,
            verdict.values_FB,
            excess_BC,
            probs.logits_XV.stride(0),
            num_tokens,
            shape.num_chunks,
            shape.num_half_tiles,
            num_sequences,
            num_masks,
            TILE=shape.half_tile,
            CHUNK=shape.chunk,
            num_warps=probs.tuning.num_warps,
        )
    kernel_verify.emit_kernel[(num_sequences * (num_masks + 1),)](
        *probs.tensors(),
        *store.tensors(),
        lanes_B,
        verdict.values_FB,
        excess_BC,
        uniforms_BA,
        verdict.token_ids_BA,
        verdict.draft_rows_BJ,
        *state,
        probs.logits_XV.stride(0),
        uniforms_BA.stride(0),
        num_tokens,
        shape.num_chunks,
        num_sequences,
        num_masks,
        TAKES_BEST=takes_best,
        CHUNK=shape.chunk,
        CHUNKS=shape.chunks,
        num_warps=4,
    )
