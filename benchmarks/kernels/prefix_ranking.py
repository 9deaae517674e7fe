"""The ranking of prefixes after a pass on a GPU: against the time of reading the keys once.

    python -m benchmarks.prefix_ranking [cases=1x65536,6x131072] [k=1024] [layers=34] [sharpness=1.5]
                                        [rounds=7] [record=true] [results=DIR]

SDAR-8B's shape (32 heads, 8 KV heads, head dim 128, blocks of 32, pages of 32 slots in random order), bf16,
random queries and keys. `rank_ms` is what all layers take, captured as a graph; its floor is the time of
reading their keys. `rank_rested_ms` is the same with a rest before each replay, as a block ranks in one of
its passes: a load longer than that of the floor may lower the clock. `rank_idle_share` is what the same
launches take when no sequence ranks, as a share of the shortest possible step (reading the weights). First
shares and lists of some layers and KV heads must equal those computed from the same keys by plain products.
It needs a GPU.
L sparse layers, R rows, B sequences, W positions, S slots, P pages, N query heads, K KV heads, G heads of a
KV head, H head dim, C listed slots.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.shared import Report, defaults, parse_options, start
from benchmarks.stream import Timer
from idlm.kernels.prefix_ranking import RankingPass, attention_share, rank_prefix

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK, PAGE = 32, 8, 128, 32, 32
GROUP = NUM_HEADS // NUM_KV_HEADS
WEIGHT_BYTES = 15.1e9
DEFAULTS = defaults("cases=1x65536,6x131072 k=1024 layers=34 sharpness=1.5 rounds=7 record=true")
REST_SECONDS = 0.15
NUM_CHECKED = 12
SHARE_TOLERANCE = 1e-4
"""Relative error of a share; products of bf16 numbers are exact, and only sums differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A pass in which all sequences rank, and their lists."""

    ranking: RankingPass
    lanes_B: Tensor
    slots_LZKC: Tensor

    def rank(self, ranking: RankingPass | None = None) -> None:
        rank_prefix(ranking or self.ranking, self.lanes_B, self.slots_LZKC)

    @property
    def key_bytes(self) -> int:
        slots = len(self.lanes_B) * self.ranking.max_slots
        return len(self.slots_LZKC) * slots * NUM_KV_HEADS * HEAD_DIM * self.ranking.keys_LSKH.itemsize


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="prefix_ranking")
    timer, report = Timer(rounds=int(options["rounds"])), Report("prefix_ranking", options)
    for case in options["cases"].split(","):
        batch, context = (int(number) for number in case.split("x"))
        problem = make_problem(options, batch, context)
        times(report, problem, timer, check(problem))
        del problem
        torch.cuda.empty_cache()
    return report.status


def make_problem(options: dict[str, str], batch: int, context: int, *, device: str = "cuda") -> Problem:
    """Random keys on pages in random order, and random queries."""
    generator = torch.Generator(device).manual_seed(0)
    num_layers, num_pages = int(options["layers"]), batch * context // PAGE

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    keys_LSKH = torch.empty(
        num_layers, num_pages * PAGE, NUM_KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16
    )
    for keys_SKH in keys_LSKH:
        keys_SKH.normal_(generator=generator)
    rows = batch * BLOCK
    q_LRNH = float(options["sharpness"]) * normal(num_layers, rows, NUM_HEADS, HEAD_DIM)
    empty_LRN = torch.empty(num_layers, rows, NUM_HEADS, device=device)
    ranking = RankingPass(
        q_LRNH=q_LRNH,
        max_LRN=empty_LRN,
        sum_LRN=empty_LRN.clone(),
        keys_LSKH=keys_LSKH,
        block_table_BP=torch.randperm(num_pages, generator=generator, device=device).view(batch, -1),
        page_size=PAGE,
        rows_BW=torch.arange(rows, device=device).view(batch, BLOCK),
        starts_B=torch.full((batch,), context, device=device),
        ranks_B=torch.ones(batch, dtype=torch.bool, device=device),
        max_slots=context,
        scale=HEAD_DIM**-0.5,
    )
    for layer, sequence in itertools.product(range(num_layers), range(batch)):
        _fill_sums(ranking, layer, sequence)
    slots_LZKC = torch.full(
        (num_layers, batch, NUM_KV_HEADS, int(options["k"])), -1, dtype=torch.int32, device=device
    )
    return Problem(ranking=ranking, lanes_B=torch.arange(batch, device=device), slots_LZKC=slots_LZKC)


def _scores(ranking: RankingPass, layer: int, sequence: int) -> Iterator[Tensor]:
    """Scores [GW, S] of each KV head in base 2, from products in fp32."""
    pages_P = ranking.block_table_BP[sequence]
    k_SKH = ranking.keys_LSKH[layer].view(-1, PAGE, NUM_KV_HEADS, HEAD_DIM)[pages_P].flatten(0, 1)
    q_WNH = ranking.q_LRNH[layer, ranking.rows_BW[sequence]]
    for kv_head in range(NUM_KV_HEADS):
        q_XH = q_WNH[:, kv_head * GROUP : (kv_head + 1) * GROUP].transpose(0, 1).flatten(0, 1).float()
        yield q_XH @ k_SKH[:, kv_head].float().T * (ranking.scale / math.log(2))


def _fill_sums(ranking: RankingPass, layer: int, sequence: int) -> None:
    rows_W = ranking.rows_BW[sequence]
    for kv_head, scores_XS in enumerate(_scores(ranking, layer, sequence)):
        max_X = scores_XS.amax(-1)
        sum_X = scores_XS.sub_(max_X[:, None]).exp2_().sum(-1)
        heads = slice(kv_head * GROUP, (kv_head + 1) * GROUP)
        ranking.max_LRN[layer, rows_W, heads] = max_X.view(GROUP, -1).T
        ranking.sum_LRN[layer, rows_W, heads] = sum_X.view(GROUP, -1).T


def check(problem: Problem) -> bool:
    """Whether shares and lists of some layers, sequences and KV heads are right."""
    ranking, lists_LZKC = problem.ranking, problem.slots_LZKC
    problem.rank()
    chosen = random.Random(0)
    maximum = lists_LZKC.shape[-1]
    is_right, largest, moved = True, 0.0, 0
    for _ in range(NUM_CHECKED):
        layer, sequence = chosen.randrange(len(lists_LZKC)), chosen.randrange(len(problem.lanes_B))
        shares_KS = attention_share(ranking, layer, 1)[0, sequence, :, : ranking.max_slots]
        for kv_head, scores_XS in enumerate(_scores(ranking, layer, sequence)):
            expected_S = scores_XS.mul_(math.log(2)).softmax(-1).mean(0)
            error = float(((shares_KS[kv_head] - expected_S) / expected_S).abs().max())
            largest = max(largest, error)
            found_C = lists_LZKC[layer, sequence, kv_head].long()
            own_C = shares_KS[kv_head].sort(descending=True, stable=True).indices[:maximum].sort().values
            is_right &= error <= SHARE_TOLERANCE and torch.equal(found_C, own_C)
            border = expected_S.topk(maximum).values[-1]
            is_right &= bool((expected_S[found_C] >= border * (1 - 2 * SHARE_TOLERANCE)).all())
            moved += int((expected_S[found_C] < border).sum())
    print(
        f"shares differ by {largest:.1e} at most; {moved} listed slots are near ties",
        "" if is_right else "WRONG",
    )
    return is_right


def times(report: Report, problem: Problem, timer: Timer, gate: bool) -> None:
    case = {"batch": len(problem.lanes_B), "context": problem.ranking.max_slots}
    floor = problem.key_bytes / timer.bytes_per_us / 1e3
    for metric, rest in (("rank_ms", 0.0), ("rank_rested_ms", REST_SECONDS)):
        ms = timer.us_per_call([problem.rank], rest=rest) / 1e3
        report.add(case, metric, ms, "ms", floor=floor, gate_passed=gate)
    idle_pass = replace(problem.ranking, ranks_B=torch.zeros_like(problem.ranking.ranks_B))
    idle = timer.us_per_call([partial(problem.rank, idle_pass)])
    report.add(case, "rank_idle_share", idle * timer.bytes_per_us / WEIGHT_BYTES, "x", gate_passed=gate)


if __name__ == "__main__":
    start(measure, __doc__)
