"""Grids and scratch memory of the kernels for probabilities and draws. Nothing here waits for the device.

Shapes: X rows, V vocabulary, C chunks, B sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from idlm.kernels.sampling import kernel
from idlm.kernels.sampling import kernel_probs as kernel_probs
from idlm.kernels.sampling.types import NUM_NUMBERS, RowProbs, Tuning

KEY_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low mantissa bits of an fp32 that a logit of this dtype leaves zero."""
SMALLEST_CHUNK = 16
PAIRS = 128
ROW_REGISTERS = 128
"""Per thread; the kernel of filtered rows would take twice as many, which would halve occupancy."""


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
        self.wide = options(tuning, warps=tuning.num_warps)
        self.narrow = options(tuning, warps=4)
        self.whole = options(tuning, warps=tuning.row_warps) | {"maxnreg": ROW_REGISTERS}


def options(tuning: Tuning, *, warps: int) -> dict[str, Any]:
    """Launch options; the interpreter does not know dependent launch, so it is named only if requested."""
    return {"num_warps": warps, "PDL": tuning.pdl, **({"launch_pdl": True} if tuning.pdl else {})}


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
        **shape.wide,
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
        **(shape.whole if filters else shape.narrow),
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
    ints_XC = torch.empty(2, num_rows, num_chunks, dtype=torch.int32, device=device)
    list_XL = torch.empty(num_rows, probs.tuning.capacity, dtype=torch.float32, device=device)
    return ints_XC[0], ints_XC[1], list_XL


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


def probability(probs: RowProbs, rows: Tensor, token_ids: Tensor) -> Tensor:
    """fp64, shaped as `rows`."""
    rows, token_ids = rows.contiguous(), token_ids.contiguous()
    out = torch.empty(rows.shape, dtype=torch.float64, device=rows.device)
    num_pairs = rows.numel()
    if num_pairs:
        kernel.probability_kernel[(triton.cdiv(num_pairs, PAIRS),)](
            probs.logits_XV,
            probs.numbers_XF,
            probs.masses_XC,
            rows,
            token_ids,
            out,
            probs.logits_XV.stride(0),
            num_pairs,
            probs.masses_XC.shape[1],
            PAIRS=PAIRS,
            CHUNK=chunk_of(probs.logits_XV.shape[1], probs.tuning),
            **options(probs.tuning, warps=4),
        )
    return out


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
            **options(probs.tuning, warps=1),
        )
    return out_B


def draw(probs: RowProbs, rows_B: Tensor, uniforms_B: Tensor) -> Tensor:
    """Tokens [B]."""
    shape = Shape(probs.logits_XV.shape[1], probs.tuning)
    rows_B = rows_B.contiguous()
    out_B = torch.empty_like(rows_B)
    if len(rows_B):
        kernel.draw_kernel[(len(rows_B),)](
            probs.logits_XV,
            probs.numbers_XF,
            probs.masses_XC,
            rows_B,
            uniforms_B,
            out_B,
            probs.logits_XV.stride(0),
            uniforms_B.stride(0),
            probs.logits_XV.shape[1],
            shape.num_chunks,
            CHUNK=shape.chunk,
            CHUNKS=shape.chunks,
            **shape.narrow,
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
            probs.logits_XV,
            probs.numbers_XF,
            probs.masses_XC,
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
            **shape.narrow,
        )
    return ids_X, confidence_X


def uniforms(
    seeds_Z: Tensor,
    samples_Z: Tensor,
    steps: Tensor,
    lanes_B: Tensor | None,
    num_draws: int,
    tuning: Tuning,
    *,
    steps_by_lane: bool = True,
) -> Tensor:
    """Philox numbers [B, num_draws], fp64."""
    num_sequences = len(seeds_Z if lanes_B is None else lanes_B)
    out_BD = torch.empty(num_sequences, num_draws, dtype=torch.float64, device=seeds_Z.device)
    if out_BD.numel():
        kernel.uniforms_kernel[(num_sequences,)](
            seeds_Z,
            samples_Z,
            steps,
            seeds_Z if lanes_B is None else lanes_B,
            out_BD,
            num_draws,
            HAS_LANES=lanes_B is not None,
            STEP_BY_LANE=steps_by_lane,
            DRAWS=triton.next_power_of_2(num_draws),
            **options(tuning, warps=1),
        )
    return out_BD
