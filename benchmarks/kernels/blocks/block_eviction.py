"""What FOCUS adds to a pass on a GPU: importance, selection, compaction and gather, each against plain torch.

    python -m benchmarks.block_eviction [batches=1,16,128,256] [rounds=9] [record=true]
                                                       [step_ms=4.1,6.9,21.5,43] [results=DIR]

SDAR-8B's shape (32 query heads, 8 KV heads of 128, width 4096, bf16), blocks of 32 of which half are masks;
each op and arm in one CUDA graph. First the kernels must choose the rows that plain torch chooses, and copy
the same bits. `selection_share`: both importances, selection, compaction and gather over `step_ms`, the
milliseconds of a step at each batch.
B sequences, W places of a block, P parts of a sum.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from idlm.cli import command
from idlm.errors import UserError
from idlm.kernels import block_eviction, row_compaction
from idlm.kernels.block_eviction import BlockKeys, Candidates, Selected
from idlm.kernels.block_eviction import plain as plain_eviction
from idlm.kernels.row_compaction import Compacted, Drop, PackedRows
from idlm.kernels.row_compaction import plain as plain_compaction

BLOCK, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WIDTH, PAGE = 32, 32, 8, 128, 4096, 32
ALPHA, MEAN_DECODED = 1.5, 2.13
REPLAYS, WARM_UPS = 20, 3
BENCH = "block_eviction"
DEFAULTS = {
    "batches": "1,16,128,256",
    "step_ms": "4.1,6.9,21.5,43",
    "rounds": "9",
    "record": "true",
    "results": str(RESULTS),
}
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One pass over B blocks whose rows are all fed, and layer 1's inputs."""

    rows: PackedRows
    rows_BW: Tensor
    is_mask_BW: Tensor
    q_RNH: Tensor
    residual_RD: Tensor
    layers: tuple[BlockKeys, BlockKeys]
    candidates: Candidates

    def importance(self, ops: Any, layer: int) -> Tensor:
        """Parts of the importance in a layer, by the ops of a module."""
        parts_BPW: Tensor = ops.block_importance(
            self.q_RNH,
            self.rows_BW,
            self.layers[layer],
            is_query_BW=self.is_mask_BW,
            is_key_BW=self.is_mask_BW,
            scale=HEAD_DIM**-0.5,
        )
        return parts_BPW

    def compacted(self, ops: Any, selected: Selected) -> Compacted:
        """The rows that go on."""
        none_B = torch.zeros_like(self.candidates.is_mine_B)
        drop = Drop(
            rows_BW=self.rows_BW, keep_R=selected.kept_BW.flatten(), needs_all_B=none_B, waits_B=none_B
        )
        num_rows = len(self.q_RNH)
        found: Compacted = ops.compact_rows(
            self.rows, drop, num_left=num_rows, num_origins=num_rows, room=None
        )
        return found


def make_problem(num_sequences: int, device: str) -> Problem:
    """Random queries, keys and masks."""
    generator = torch.Generator(device).manual_seed(num_sequences)
    num_rows = num_sequences * BLOCK

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    numbers_R = torch.arange(num_rows, device=device)
    is_mask_BW = torch.rand(num_sequences, BLOCK, generator=generator, device=device) < 0.5
    starts_B = torch.zeros(num_sequences, dtype=torch.int64, device=device)
    table_BP = torch.randperm(num_sequences, generator=generator, device=device)[:, None]
    layers = [
        BlockKeys(
            keys_SKH=normal(num_rows, NUM_KV_HEADS, HEAD_DIM),
            scale_K=None,
            block_table_BP=table_BP,
            page_size=PAGE,
            starts_B=starts_B,
        )
        for _ in range(2)
    ]
    names = ("token_ids_R", "positions_R", "slots_R", "limits_R", "branch_starts_R", "mapping_R", "origin_R")
    return Problem(
        rows=PackedRows(
            cu_rows_B1=torch.arange(num_sequences + 1, device=device) * BLOCK,
            sequence_R=numbers_R // BLOCK,
            is_mask_R=is_mask_BW.flatten(),
            **{name: numbers_R + number for number, name in enumerate(names)},
        ),
        rows_BW=numbers_R.view(-1, BLOCK),
        is_mask_BW=is_mask_BW,
        q_RNH=normal(num_rows, NUM_HEADS, HEAD_DIM),
        residual_RD=normal(num_rows, WIDTH),
        layers=(layers[0], layers[1]),
        candidates=Candidates(
            is_mine_B=starts_B == 0,
            is_mask_BW=is_mask_BW,
            is_maskable_BW=is_mask_BW,
            rows_BW=numbers_R.view(-1, BLOCK),
            lanes_B=torch.arange(num_sequences, device=device),
            processed_ZW=torch.ones_like(is_mask_BW),
            mean_decoded_B=torch.full_like(starts_B, MEAN_DECODED, dtype=torch.float64),
        ),
    )


def check(problem: Problem) -> bool:
    """Whether both arms agree: importance up to rounding, everything that follows from it exactly."""
    parts = [problem.importance(block_eviction, layer) for layer in (0, 1)]
    plain_parts = [problem.importance(plain_eviction, layer) for layer in (0, 1)]
    error = max(
        float((mine_BPW.sum(1) - plain_BPW.sum(1)).abs().max())
        for mine_BPW, plain_BPW in zip(parts, plain_parts, strict=True)
    )
    found = block_eviction.select_places(parts[0], parts[1], problem.candidates, alpha=ALPHA)
    expected = plain_eviction.select_places(parts[0], parts[1], problem.candidates, alpha=ALPHA)
    left, plain_left = (problem.compacted(ops, expected) for ops in (row_compaction, plain_compaction))
    gathered = row_compaction.gather_rows(left.numbers_I, (problem.q_RNH, problem.residual_RD))
    return (
        error <= 1e-4
        and torch.equal(found.kept_BW, expected.kept_BW)
        and torch.equal(left.numbers_I, plain_left.numbers_I)
        and torch.equal(left.rows_BW, plain_left.rows_BW)
        and torch.equal(gathered[0], problem.q_RNH[left.numbers_I])
        and torch.equal(gathered[1], problem.residual_RD[left.numbers_I])
    )


def calls_of(problem: Problem) -> dict[str, tuple[Call, Call]]:
    """By op the kernels' call and that of plain torch."""
    first_BPW, second_BPW = (problem.importance(block_eviction, layer) for layer in (0, 1))
    selected = block_eviction.select_places(first_BPW, second_BPW, problem.candidates, alpha=ALPHA)
    numbers_I = problem.compacted(row_compaction, selected).numbers_I
    aligned = (problem.q_RNH, problem.residual_RD, problem.rows.positions_R)

    def select(ops: Any) -> Call:
        return lambda: ops.select_places(first_BPW, second_BPW, problem.candidates, alpha=ALPHA)

    return {
        "importance": (
            lambda: problem.importance(block_eviction, 1),
            lambda: problem.importance(plain_eviction, 1),
        ),
        "select": (select(block_eviction), select(plain_eviction)),
        "compact": (
            lambda: problem.compacted(row_compaction, selected),
            lambda: problem.compacted(plain_compaction, selected),
        ),
        "gather": (
            lambda: row_compaction.gather_rows(numbers_I, aligned),
            lambda: [tensor[numbers_I] for tensor in aligned],
        ),
    }


def captured(call: Call) -> torch.cuda.CUDAGraph:
    """A graph of `REPLAYS` calls."""
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYS):
            call()
    return graph


def microseconds(graphs: Sequence[torch.cuda.CUDAGraph], *, rounds: int) -> list[float]:
    """Median time of one call of each; they run in turn within a round."""
    measured: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds + 1):
        for graph, found in zip(graphs, measured, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(float(start.elapsed_time(end)) * 1e3 / REPLAYS)
    return [statistics.median(found[1:]) for found in measured]


def measure_batch(num_sequences: int, step_ms: float, *, rounds: int) -> list[dict[str, Any]]:
    """Rows of one batch size."""
    problem = make_problem(num_sequences, "cuda")
    gate, calls = check(problem), calls_of(problem)
    times = microseconds([captured(call) for pair in calls.values() for call in pair], rounds=rounds)
    rows, total = [], 0.0
    for number, name in enumerate(calls):
        mine, plainly = times[2 * number : 2 * number + 2]
        total += mine * (2 if name == "importance" else 1)
        case = {"op": name, "batch": num_sequences}
        print(f"B={num_sequences:4d} {name:11s} {mine:8.1f} us, plain torch {plainly:8.1f}", flush=True)
        rows.append(result_row(BENCH, case, "us", mine, "us", baseline=plainly, gate_passed=gate))
    share = total / (step_ms * 1e3)
    print(f"B={num_sequences:4d} together    {total:8.1f} us, {share:.2%} of {step_ms} ms", flush=True)
    case = {"batch": num_sequences, "step_ms": step_ms}
    return [*rows, result_row(BENCH, case, "selection_share", share, "share", gate_passed=gate)]


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Print and record times; returns the exit status."""
    options = parse_options(arguments, DEFAULTS)
    if not torch.cuda.is_available():
        raise UserError("IDLM-0543", "no CUDA device", fix="run benchmarks.block_eviction on a GPU")
    batches = [int(one) for one in options["batches"].split(",")]
    steps = [float(one) for one in options["step_ms"].split(",")]
    if len(batches) != len(steps):
        raise UserError(
            "IDLM-0107",
            f"batches={options['batches']} and step_ms={options['step_ms']} differ in length",
            fix="give a step time for every batch size",
        )
    rows: list[dict[str, Any]] = []
    for num_sequences, step_ms in zip(batches, steps, strict=True):
        rows += measure_batch(num_sequences, step_ms, rounds=int(options["rounds"]))
    if options["record"] == "true":
        append_rows(BENCH, rows, results=Path(options["results"]))
    return 0 if all(row["gate_passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
