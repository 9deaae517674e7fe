"""Random blocks for the tests of block_eviction: paged keys, rows anywhere, NaN where nothing may read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.kernels.block_eviction import BlockKeys, Candidates, block_importance, select_positions
from idlm.kernels.block_eviction.op import plain_importance
from tests.kernels.references.sparse.block_eviction import importance_reference, select_reference

SHAPES = [
    (1, 32, 8, 2, 128, 16),
    (5, 32, 4, 4, 64, 4),
    (3, 5, 6, 2, 24, 3),
    (2, 64, 4, 1, 128, 64),
    (4, 1, 2, 2, 16, 1),
]
"""Sequences, positions, query heads, KV heads, head dim, page size."""
NUM_ROWS_AFTER = 3


@dataclass(frozen=True)
class Layer:
    """Arguments of `block_importance` for one layer."""

    q_RNH: Tensor
    rows_BW: Tensor
    keys: BlockKeys
    is_query_BW: Tensor
    is_key_BW: Tensor
    scale: float

    def found(self) -> Tensor:
        """By the op, summed over its parts."""
        parts_BPW = block_importance(
            self.q_RNH,
            self.rows_BW,
            self.keys,
            is_query_BW=self.is_query_BW,
            is_key_BW=self.is_key_BW,
            scale=self.scale,
        )
        return parts_BPW.sum(dim=1)

    def expected(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """By the reference, in `dtype`."""
        keys, found_BW = self.keys, torch.zeros(self.rows_BW.shape, dtype=dtype)
        for b in range(len(self.rows_BW)):
            queries = self.is_query_BW[b].nonzero()[:, 0].tolist()
            columns = self.is_key_BW[b].nonzero()[:, 0].tolist()
            if not queries or not columns:
                continue
            slots = [int(keys.starts_B[b]) + index for index in columns]
            pages = [int(keys.block_table_BP[b, slot // keys.page_size]) for slot in slots]
            physical = [
                page * keys.page_size + s % keys.page_size for page, s in zip(pages, slots, strict=True)
            ]
            k_JKH = keys.keys_SKH[physical].to(dtype).cpu()
            if keys.scale_K is not None:
                k_JKH = k_JKH * keys.scale_K.cpu()[:, None]
            q_INH = self.q_RNH[self.rows_BW[b, queries]].to(dtype).cpu()
            found_BW[b, columns] = importance_reference(q_INH, k_JKH, scale=self.scale).to(dtype)
        return found_BW


def make_layer(
    shape: tuple[int, int, int, int, int, int],
    dtype: torch.dtype,
    *,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    over_block: bool = False,
) -> Layer:
    """Masks at random; one sequence is not fed at all, if there are several."""
    num_sequences, size, num_heads, num_kv_heads, head_dim, page_size = shape
    generator = torch.Generator().manual_seed(seed)

    def ints(high: int, *of: int) -> Tensor:
        return torch.randint(0, high, of, generator=generator)

    is_fed_BW = ints(5, num_sequences, size) > 0
    is_mask_BW = is_fed_BW & (ints(3, num_sequences, size) > 0)
    if num_sequences > 1:
        is_fed_BW[1] = is_mask_BW[1] = False
    num_fed = int(is_fed_BW.sum())
    rows_BW = torch.full((num_sequences, size), -1)
    rows_BW[is_fed_BW] = torch.randperm(num_fed + NUM_ROWS_AFTER, generator=generator)[:num_fed]
    q_RNH = torch.randn(num_fed + NUM_ROWS_AFTER, num_heads, head_dim, generator=generator) * 2
    is_query_BW = is_fed_BW if over_block else is_mask_BW
    is_key_BW = torch.ones_like(is_mask_BW) if over_block else is_mask_BW
    is_read_R = torch.zeros(len(q_RNH), dtype=torch.bool)
    is_read_R[rows_BW[is_query_BW]] = True
    q_RNH[~is_read_R] = torch.nan
    pages = 3 * -(-size // page_size) + 1
    table_BP = torch.randperm(num_sequences * pages, generator=generator).view(num_sequences, pages)
    starts_B = ints(2, num_sequences) * size
    keys_SKH = torch.full((num_sequences * pages * page_size, num_kv_heads, head_dim), torch.nan)
    for b, index in is_key_BW.nonzero().tolist():
        slot = int(starts_B[b]) + index
        physical = int(table_BP[b, slot // page_size]) * page_size + slot % page_size
        keys_SKH[physical] = torch.randn(num_kv_heads, head_dim, generator=generator)
    kv_dtype = kv_dtype or dtype
    is_scaled = kv_dtype == torch.float8_e4m3fn
    keys = BlockKeys(
        keys_SKH=keys_SKH.to(kv_dtype).to(device),
        scale_K=(0.5 + torch.rand(num_kv_heads, generator=generator)).to(device) if is_scaled else None,
        block_table_BP=table_BP.to(device),
        page_size=page_size,
        starts_B=starts_B.to(device),
    )
    columns = (rows_BW, is_query_BW, is_key_BW)
    rows_BW, is_query_BW, is_key_BW = (column.to(device) for column in columns)
    return Layer(q_RNH.to(dtype).to(device), rows_BW, keys, is_query_BW, is_key_BW, head_dim**-0.5)


def check_importance(layer: Layer) -> None:
    """At most twice the error of plain torch in fp32, whatever dtype is read."""
    exact_BW, found_BW = layer.expected(), layer.found().cpu().double()
    wide = Layer(
        layer.q_RNH.float().cpu(),
        layer.rows_BW.cpu(),
        BlockKeys(
            keys_SKH=layer.keys.keys_SKH.cpu().float() * _scales(layer.keys),
            scale_K=None,
            block_table_BP=layer.keys.block_table_BP.cpu(),
            page_size=layer.keys.page_size,
            starts_B=layer.keys.starts_B.cpu(),
        ),
        layer.is_query_BW.cpu(),
        layer.is_key_BW.cpu(),
        layer.scale,
    )
    torchs_BPW = plain_importance(
        wide.q_RNH, wide.rows_BW, wide.keys, wide.is_query_BW, wide.is_key_BW, wide.scale
    )
    allowed = 2 * float((torchs_BPW[:, 0].double() - exact_BW).abs().max()) + 1e-6
    assert not found_BW.isnan().any()
    assert float((found_BW - exact_BW).abs().max()) <= allowed
    assert not found_BW[~layer.is_key_BW.cpu()].any()


def _scales(keys: BlockKeys) -> Tensor | float:
    return 1.0 if keys.scale_K is None else keys.scale_K.cpu()[:, None]


def make_candidates(seed: int, device: str = "cpu") -> tuple[Tensor, Tensor, Candidates, float]:
    """Parts of both layers, what is known of the positions, and alpha.

    Gains are multiples of 1/4, so that there are ties and sums are exact; NaN where there is no mask."""
    generator = torch.Generator().manual_seed(seed)

    def ints(high: int, *of: int) -> Tensor:
        return torch.randint(0, high, of, generator=generator)

    num_sequences, size, num_parts = 6, (1, 4, 7, 32, 64)[seed % 5], (1, 2, 3)[seed % 3]
    rows_BW = torch.where(ints(6, num_sequences, size) > 0, ints(99, num_sequences, size), -1)
    is_mask_BW = (rows_BW >= 0) & (ints(4, num_sequences, size) > 0)
    is_mask_BW[0] = False
    parts = ints(9, 2, num_sequences, num_parts, size).float() / 4
    candidates = Candidates(
        is_mine_B=(ints(5, num_sequences) > 0).to(device),
        is_mask_BW=is_mask_BW.to(device),
        is_maskable_BW=(ints(5, num_sequences, size) > 0).to(device),
        rows_BW=rows_BW.to(device),
        lanes_B=torch.randperm(9, generator=generator)[:num_sequences].to(device),
        processed_ZW=(ints(3, 9, size) > 0).to(device),
        mean_decoded_B=(1 + ints(9, num_sequences).double() / 4).to(device),
    )
    return parts[0].to(device), parts[1].to(device), candidates, (1.0, 1.2, 1.5, 3.0)[seed % 4]


def check_selection(seed: int, device: str = "cpu") -> None:
    """Equals the reference, sequence by sequence, unless a gain is at the threshold up to rounding."""
    first_BPW, second_BPW, of, alpha = make_candidates(seed, device)
    sees_processed = seed % 4 < 3
    found = select_positions(first_BPW, second_BPW, of, alpha=alpha, sees_processed=sees_processed)
    gains_BW = (second_BPW - first_BPW).sum(dim=1)
    for b in range(len(gains_BW)):
        masks = of.is_mask_BW[b].nonzero()[:, 0].tolist()
        gains = {index: float(gains_BW[b, index]) for index in masks}
        # Equal gains have no spread, in any arithmetic.
        if len(set(gains.values())) > 1:
            values = torch.tensor(list(gains.values()), dtype=torch.float64)
            threshold = values.mean() + values.std(correction=0)
            if float((values - threshold).abs().min()) < 1e-4:
                continue
        kept, end, budget = select_reference(
            gains,
            [index for index in masks if of.is_maskable_BW[b, index]],
            set((of.rows_BW[b] >= 0).nonzero()[:, 0].tolist()),
            set(of.processed_ZW[of.lanes_B[b]].nonzero()[:, 0].tolist()),
            size=gains_BW.shape[1],
            mean_decoded=float(of.mean_decoded_B[b]),
            alpha=alpha,
            is_mine=bool(of.is_mine_B[b]),
            sees_processed=sees_processed,
        )
        assert set(found.retained_BW[b].nonzero()[:, 0].tolist()) == kept
        assert (int(found.ends_B[b]), int(found.budget_B[b])) == (end, budget)
