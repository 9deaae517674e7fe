"""Random cases of the ranking of prefixes, for a CPU, the interpreter and a GPU: ragged sequences, blocks at
slot 0, prefixes shorter than lists, positions without rows, and NaN in all slots that are not before a block.

L layers, R rows, B sequences, W positions, S physical slots, P pages, N query heads, K KV heads, H head dim,
C listed slots, Z lanes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from idlm.kernels.prefix_ranking import RankingPass, attention_share, rank_prefix, select_largest
from tests.kernels.references.sparse.prefix_ranking import (
    attention_share_reference,
    prefix_sums_reference,
    select_reference,
)

FP8 = torch.float8_e4m3fn
NOT_LISTED, OLD = -1, -7
Select = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
SHARE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 5e-5, torch.bfloat16: 5e-5}
"""Relative error of a share. Products of 16-bit numbers are exact in fp32, so all differ in sums alone,
which tensor cores round off; with fp64 the statistics are in fp32 all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a case is drawn from."""

    layers: int = 2
    sequences: int = 3
    width: int = 4
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    page_size: int = 16
    max_slots: int = 96
    listed: int = 8


@dataclass(slots=True, kw_only=True)
class Case:
    """A pass, and the lanes and lists that it writes to; `reference` is the same pass on the CPU."""

    reference: RankingPass
    ranking: RankingPass
    lanes_B: Tensor
    slots_LZKC: Tensor

    def check(self) -> None:
        """Shares and lists equal the definition, and what was not to be written is as it was."""
        shares_LBKS = attention_share(self.ranking, 0, len(self.ranking.q_LRNH))
        rank_prefix(self.ranking, self.lanes_B, self.slots_LZKC)
        written = set()
        for sequence, (lane, ranks) in enumerate(
            zip(self.lanes_B.tolist(), self.ranking.ranks_B.tolist(), strict=True)
        ):
            if ranks:
                written.add(lane)
                for layer in range(len(self.slots_LZKC)):
                    for kv_head in range(self.ranking.num_kv_heads):
                        self._check_list(layer, sequence, kv_head, lane, shares_LBKS)
        for lane in set(range(self.slots_LZKC.shape[1])) - written:
            assert (self.slots_LZKC[:, lane] == OLD).all(), f"lane {lane} was overwritten"

    def _check_list(self, layer: int, sequence: int, kv_head: int, lane: int, shares_LBKS: Tensor) -> None:
        expected_S = attention_share_reference(self.reference, layer, sequence, kv_head)
        num = len(expected_S)
        found_S = shares_LBKS[layer, sequence, kv_head, :num].cpu()
        tolerance = SHARE_TOLERANCE[self.ranking.q_LRNH.dtype]
        torch.testing.assert_close(
            found_S, expected_S.to(found_S.dtype), rtol=tolerance, atol=tolerance / max(1, num)
        )
        found = self.slots_LZKC[layer, lane, kv_head].tolist()
        # The list is the exact one of the shares found, and up to near ties that of the definition.
        maximum = self.slots_LZKC.shape[-1]
        listed = select_reference(found_S, maximum)
        assert found == listed + [NOT_LISTED] * (maximum - len(listed)), (layer, sequence, kv_head)
        if 0 < maximum < num:
            border = float(expected_S.sort(descending=True).values[maximum - 1])
            slack = 2 * tolerance * (border + 1 / num)
            right = set(select_reference(expected_S, maximum))
            for slot in right ^ set(listed):
                assert abs(float(expected_S[slot]) - border) <= slack, (layer, sequence, kv_head, slot)


def make_case(seed: int, sizes: Sizes, dtype: torch.dtype, *, device: str = "cpu", fp8: bool = False) -> Case:
    """A random case. In one of three positions there is no row; the first sequence's block may be at slot
    0."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    pages_per_sequence = -(-sizes.max_slots // sizes.page_size)
    num_pages = pages_per_sequence * sizes.sequences + 1
    starts = [rng.choice((rng.randint(0, sizes.max_slots), rng.randint(0, 2 * sizes.listed)))
              for _ in range(sizes.sequences)]  # fmt: skip
    starts = [min(start, sizes.max_slots) for start in starts]
    starts[0] = rng.choice((0, sizes.max_slots, starts[0]))
    width = sizes.sequences * sizes.width
    # Rows of prompts, which belong to no block, lie among the others.
    num_rows = width + rng.randint(0, 5)
    rows = torch.randperm(num_rows)[:width]
    rows[torch.rand(width) < rng.choice((0.0, 0.3))] = -1
    rows_BW = rows.view(sizes.sequences, sizes.width)
    ranks_B = (torch.rand(sizes.sequences) < rng.choice((0.5, 1.0))) & (rows_BW >= 0).any(-1)
    table_BP = torch.randperm(num_pages - 1)[: sizes.sequences * pages_per_sequence] + 1
    table_BP = table_BP.view(sizes.sequences, pages_per_sequence)
    heads = sizes.kv_heads * sizes.group
    # Attention from nearly flat to sharp.
    spread = rng.choice((0.2, 1.0, 3.0))
    q_LRNH = spread * torch.randn(sizes.layers, num_rows, heads, sizes.head_dim)
    keys_LSKH = torch.full(
        (sizes.layers, num_pages * sizes.page_size, sizes.kv_heads, sizes.head_dim), torch.nan
    )
    for sequence, start in enumerate(starts):
        slots = torch.arange(start)
        physical = table_BP[sequence, slots // sizes.page_size] * sizes.page_size + slots % sizes.page_size
        keys_LSKH[:, physical] = torch.randn(sizes.layers, start, sizes.kv_heads, sizes.head_dim)
    k_scale_LK = 0.5 + torch.rand(sizes.layers, sizes.kv_heads) if fp8 else None
    lanes_B = torch.randperm(sizes.sequences + 2)[: sizes.sequences]
    empty = torch.zeros(sizes.layers, num_rows, heads)
    reference = RankingPass(
        q_LRNH=q_LRNH.to(dtype),
        max_LRN=empty,
        sum_LRN=empty,
        keys_LSKH=keys_LSKH.to(FP8 if fp8 else dtype),
        k_scale_LK=k_scale_LK,
        block_table_BP=table_BP,
        page_size=sizes.page_size,
        rows_BW=rows_BW,
        starts_B=torch.tensor(starts),
        ranks_B=ranks_B,
        max_slots=sizes.max_slots,
        scale=sizes.head_dim**-0.5,
    )
    max_LRN, sum_LRN = prefix_sums_reference(reference)
    reference = replace(reference, max_LRN=max_LRN, sum_LRN=sum_LRN)
    shape = (sizes.layers, sizes.sequences + 2, sizes.kv_heads, sizes.listed)
    return Case(
        reference=reference,
        ranking=moved(reference, device),
        lanes_B=lanes_B.to(device),
        slots_LZKC=torch.full(shape, OLD, dtype=torch.int32, device=device),
    )


def moved(ranking: RankingPass, device: str) -> RankingPass:
    """The same pass on a device."""
    values = {field.name: getattr(ranking, field.name) for field in fields(ranking)}
    return RankingPass(
        **{name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}
    )


def check_selection(
    scores_LBKS: Tensor, counts: list[int], num: int, *, device: str, select: Select = select_largest
) -> None:
    """The lists of scores equal the definition, in every other lane, for all sequences but the last."""
    num_layers, num_sequences, num_kv_heads = scores_LBKS.shape[:3]
    is_selected_B = torch.arange(num_sequences) < max(1, num_sequences - 1)
    shape = (num_layers, 2 * num_sequences, num_kv_heads, num)
    slots_LZKC = torch.full(shape, OLD, dtype=torch.int32, device=device)
    lanes_B = 2 * torch.arange(num_sequences)
    select(
        scores_LBKS.to(device), torch.tensor(counts, device=device), is_selected_B.to(device),
        lanes_B.to(device), slots_LZKC,
    )  # fmt: skip
    expected_LZKC = torch.full(shape, OLD, dtype=torch.int32)
    for sequence in range(max(1, num_sequences - 1)):
        count, maximum = counts[sequence], min(num, counts[sequence])
        order_LKS = scores_LBKS[:, sequence, :, :count].sort(dim=-1, descending=True, stable=True).indices
        expected_LZKC[:, 2 * sequence] = NOT_LISTED
        expected_LZKC[:, 2 * sequence, :, :maximum] = order_LKS[..., :maximum].sort(dim=-1).values.int()
    assert torch.equal(slots_LZKC.cpu(), expected_LZKC)


def hard_scores(seed: int, shape: tuple[int, int, int, int]) -> Tensor:
    """Scores with many ties, of all magnitudes, of both signs, clustered, or all equal, by the seed."""
    torch.manual_seed(seed)
    scores_LBKS = torch.randn(shape)
    kind = seed % 6
    if kind == 1:
        return (3 * scores_LBKS).round()
    if kind == 2:
        return (20 * scores_LBKS).exp() * 1e-20
    if kind == 3:
        return torch.full(shape, 0.25)
    if kind == 4:
        # All large scores are neighbours, so that few groups have them all; -0 equals 0.
        slots_S = torch.arange(shape[-1])
        return torch.where(
            (slots_S % 97 < 50) & (slots_S > shape[-1] // 2), scores_LBKS.abs(), -0.0 * slots_S
        )
    return scores_LBKS.softmax(-1) if kind == 5 else scores_LBKS
