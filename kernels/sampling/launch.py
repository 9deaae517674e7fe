"""Grids and scratch memory of the kernels for laws and draws. Nothing here reads a tensor's contents.

Shapes: X rows, V vocabulary, C chunks, B sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from idlm.kernels.sampling import kernel, kernel_filters, kernel_solve
from idlm.kernels.sampling.laws import NUM_NUMBERS, RowLaws, Tuning

KEY_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low mantissa bits of an fp32 that a logit of this dtype leaves zero."""
SMALLEST_CHUNK = 16
PAIRS = 128
PIVOTS = 16


def chunk_of(num_tokens: int, tuning: Tuning) -> int:
    """Tokens per chunk: a constant of the vocabulary."""
    return min(tuning.chunk, max(SMALLEST_CHUNK, triton.next_power_of_2(num_tokens)))


class Shape:
    """What every launch over chunks is told."""

    def __init__(self, num_tokens: int, tuning: Tuning) -> None:
        self.chunk = chunk_of(num_tokens, tuning)
        self.num_chunks = triton.cdiv(num_tokens, self.chunk)
        self.chunks = triton.next_power_of_2(self.num_chunks)
        self.wide = options(tuning, warps=tuning.num_warps)
        self.narrow = options(tuning, warps=1)


def options(tuning: Tuning, *, warps: int) -> dict[str, Any]:
    """Launch options; the interpreter knows no dependent launch, so it is named only when wanted."""
    return {"num_warps": warps, "PDL": tuning.pdl, **({"launch_pdl": True} if tuning.pdl else {})}


def row_laws(
    logits_XV: Tensor,
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    lanes_B: Tensor | None,
    *,
    filters: bool,
    tuning: Tuning,
) -> RowLaws:
    """Numbers of every row's law; `settings`: temperature, top_k, top_p, min_p, per row or per lane."""
    num_rows, num_tokens = logits_XV.shape
    shape, device = Shape(num_tokens, tuning), logits_XV.device
    laws = RowLaws(
        logits_XV=logits_XV,
        numbers_XF=torch.empty(num_rows, NUM_NUMBERS, dtype=torch.float64, device=device),
        masses_XC=torch.empty(num_rows, shape.num_chunks, dtype=torch.float32, device=device),
        tuning=tuning,
    )
    if num_rows == 0:
        return laws
    stats = torch.empty(num_rows, shape.num_chunks, 4, dtype=torch.float32, device=device)
    counts_X = torch.empty(num_rows, 2, dtype=torch.int32, device=device)
    rows_per_lane = 1 if lanes_B is None else num_rows // len(lanes_B)
    row = (logits_XV.stride(0), num_tokens, shape.num_chunks, rows_per_lane)
    of_rows = (*settings, settings[1] if lanes_B is None else lanes_B, stats)
    has_lanes = {"HAS_LANES": lanes_B is not None}
    kernel.stats_kernel[(num_rows * shape.num_chunks,)](
        logits_XV,
        settings[0],
        *of_rows[4:],
        counts_X,
        *row,
        **has_lanes,
        FILTERS=filters,
        CHUNK=shape.chunk,
        **shape.wide,
    )
    kept_XC = stats
    if filters:
        kept_XC = _Thresholds(laws, of_rows, counts_X, row, has_lanes).run()
    kernel.finish_kernel[(num_rows,)](
        *of_rows,
        kept_XC,
        laws.masses_XC,
        laws.numbers_XF,
        *row[1:],
        **has_lanes,
        FILTERS=filters,
        CHUNKS=shape.chunks,
        **shape.narrow,
    )
    return laws


class _Thresholds:
    """Scratch memory and launches of the threshold search, for filtered rows."""

    def __init__(
        self,
        laws: RowLaws,
        of_rows: tuple[Tensor, ...],
        counts_X: Tensor,
        row: tuple[int, int, int, int],
        has_lanes: dict[str, bool],
    ) -> None:
        num_rows, num_tokens = laws.logits_XV.shape
        tuning, device = laws.tuning, laws.logits_XV.device
        rounds, self.num_rows = tuning.rounds, num_rows
        self.laws, self.of_rows, self.counts_X, self.row = laws, of_rows, counts_X, row
        self.shape = Shape(num_tokens, tuning)
        self.shared = {
            **has_lanes,
            "ROUNDS": rounds,
            "CAPACITY": tuning.capacity,
            "CHUNKS": self.shape.chunks,
        }
        id_bits = max(1, (num_tokens - 1).bit_length())
        self.keys = {"KEY_SHIFT": KEY_SHIFTS[laws.logits_XV.dtype], "ID_BITS": id_bits}
        self.brackets = torch.empty(num_rows, rounds + 1, 4, dtype=torch.float64, device=device)
        self.pivots = torch.empty(num_rows, rounds, PIVOTS, dtype=torch.float32, device=device)
        sums = (num_rows, rounds, self.shape.num_chunks, PIVOTS)
        self.sums = torch.empty(sums, dtype=torch.float32, device=device)
        self.packed = torch.empty(num_rows, tuning.capacity, dtype=torch.int64, device=device)

    def run(self) -> Tensor:
        """Kept masses [X, C] of the chunks of filtered rows, whose numbers are filled in too."""
        self._gather(is_first=True)
        for number in range(self.laws.tuning.rounds):
            self._pivots(number)
        self._gather(is_first=False)
        tuning, kept_XC = self.laws.tuning, torch.empty_like(self.laws.masses_XC)
        kernel_solve.solve_kernel[(self.num_rows,)](
            self.laws.logits_XV,
            *self.of_rows,
            self.brackets,
            self.counts_X,
            self.packed,
            kept_XC,
            self.laws.numbers_XF,
            *self.row,
            FEW=min(tuning.few, tuning.capacity),
            SCAN=tuning.scan,
            CHUNK=self.shape.chunk,
            **self.keys,
            **self.shared,
            **self.shape.wide,
        )
        kernel.kept_kernel[(self.num_rows * self.shape.num_chunks,)](
            self.laws.logits_XV,
            *self.of_rows,
            self.counts_X,
            self.laws.numbers_XF,
            kept_XC,
            *self.row,
            HAS_LANES=self.shared["HAS_LANES"],
            CHUNK=self.shape.chunk,
            **self.shape.wide,
        )
        return kept_XC

    def _pivots(self, number: int) -> None:
        kernel_filters.pivots_kernel[(self.num_rows * self.shape.num_chunks,)](
            self.laws.logits_XV,
            *self.of_rows,
            self.brackets,
            self.pivots,
            self.sums,
            self.counts_X,
            *self.row,
            ROUND=number,
            CHUNK=self.shape.chunk,
            **self.shared,
            **self.shape.wide,
        )

    def _gather(self, *, is_first: bool) -> None:
        kernel_filters.gather_kernel[(self.num_rows * self.shape.num_chunks,)](
            self.laws.logits_XV,
            *self.of_rows,
            self.brackets,
            self.pivots,
            self.sums,
            self.counts_X,
            self.packed,
            *self.row,
            IS_FIRST=is_first,
            CHUNK=self.shape.chunk,
            **self.keys,
            **self.shared,
            **self.shape.wide,
        )


def probability(laws: RowLaws, rows: Tensor, token_ids: Tensor) -> Tensor:
    """fp64, shaped as `rows`."""
    rows, token_ids = rows.contiguous(), token_ids.contiguous()
    out = torch.empty(rows.shape, dtype=torch.float64, device=rows.device)
    num_pairs = rows.numel()
    if num_pairs:
        kernel.probability_kernel[(triton.cdiv(num_pairs, PAIRS),)](
            laws.logits_XV,
            laws.numbers_XF,
            rows,
            token_ids,
            out,
            laws.logits_XV.stride(0),
            num_pairs,
            PAIRS=PAIRS,
            **options(laws.tuning, warps=4),
        )
    return out


def draw(laws: RowLaws, rows_B: Tensor, uniforms_B: Tensor) -> Tensor:
    """Tokens [B]."""
    shape = Shape(laws.logits_XV.shape[1], laws.tuning)
    rows_B = rows_B.contiguous()
    out_B = torch.empty_like(rows_B)
    if len(rows_B):
        kernel.draw_kernel[(len(rows_B),)](
            laws.logits_XV,
            laws.numbers_XF,
            laws.masses_XC,
            rows_B,
            uniforms_B,
            out_B,
            laws.logits_XV.stride(0),
            uniforms_B.stride(0),
            laws.logits_XV.shape[1],
            shape.num_chunks,
            CHUNK=shape.chunk,
            CHUNKS=shape.chunks,
            **shape.wide,
        )
    return out_B


def uniforms(
    seeds_Z: Tensor,
    samples_Z: Tensor,
    steps_Z: Tensor,
    lanes_B: Tensor | None,
    num_draws: int,
    tuning: Tuning,
) -> Tensor:
    """Philox numbers [B, num_draws], fp64."""
    num_sequences = len(seeds_Z if lanes_B is None else lanes_B)
    out_BD = torch.empty(num_sequences, num_draws, dtype=torch.float64, device=seeds_Z.device)
    if out_BD.numel():
        kernel.uniforms_kernel[(num_sequences,)](
            seeds_Z,
            samples_Z,
            steps_Z,
            seeds_Z if lanes_B is None else lanes_B,
            out_BD,
            num_draws,
            HAS_LANES=lanes_B is not None,
            DRAWS=triton.next_power_of_2(num_draws),
            **options(tuning, warps=1),
        )
    return out_BD
