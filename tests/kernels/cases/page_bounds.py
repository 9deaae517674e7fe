"""Random passes of page_bounds: ragged sequences on shuffled pages, rows that were dropped, NaN in every slot
that holds no final key, bounds of earlier owners in pieces that hold nothing.

B sequences, I pieces, R rows, W places, K KV heads, H head dim.
"""

from __future__ import annotations

import torch

from idlm.kernels.page_bounds import (
    NOT_LISTED,
    PageLayout,
    list_slots,
    page_scores,
    page_scores_reference,
    write_bounds,
    write_bounds_reference,
)

FP8 = torch.float8_e4m3fn
SIZES = ((16, 16, 16), (32, 16, 16), (8, 4, 4), (8, 4, 12), (16, 8, 24))
"""Slots of a page of the cache, of a piece, and of a page that is scored."""
TOLERANCE = 2e-5
"""Relative to the largest product; sums of up to 1,024 products of 16-bit numbers are rounded in fp32."""


class Case:
    """`check` compares bounds, scores and lists with the definitions."""

    def __init__(self, seed: int, dtype: torch.dtype, *, device: str = "cpu", fp8: bool = False) -> None:
        page_size, piece, page = SIZES[seed % len(SIZES)]
        self.num_sequences, self.num_kv_heads, group, head_dim = (
            3,
            1 + seed % 2,
            1 + seed % 3,
            (16, 24)[seed % 2],
        )
        self.num_table, self.device = 6, torch.device(device)
        generator = torch.Generator().manual_seed(seed)
        pages = torch.randperm(self.num_sequences * self.num_table, generator=generator)
        layout = {"page_size": page_size, "piece": piece, "page": page}
        self.layout = PageLayout(block_table_BP=pages.view(self.num_sequences, -1).to(device), **layout)
        most = self.num_table * page_size
        shape = (len(pages) * page_size, self.num_kv_heads, head_dim)
        keys = torch.randn(shape, generator=generator).to(FP8 if fp8 else dtype)
        self.scale_K = torch.rand(self.num_kv_heads, generator=generator).to(device) + 0.5 if fp8 else None
        self.ends_B = torch.randint(0, most + 1, (self.num_sequences,), generator=generator)
        self.ends_B[0] = (0, most, 1)[seed % 3]
        self.starts_B = self.ends_B.to(device)
        if not fp8:
            for b, end in enumerate(self.ends_B.tolist()):
                slots = torch.arange(end, most)
                keys[pages.view(3, -1)[b, slots // page_size] * page_size + slots % page_size] = torch.nan
        self.keys = keys.to(device)
        bounds_dtype = torch.float32 if fp8 else dtype
        num_pieces = len(pages) * page_size // piece + 1
        least_largest = torch.randn(2, num_pieces, *shape[1:], generator=generator).sort(dim=0).values
        self.bounds = (9 * least_largest).to(bounds_dtype)
        entries = [
            (first, b)
            for b, end in enumerate(self.ends_B.tolist())
            # The first final row may lie inside a piece; the last entry of each sequence names no piece.
            for first in [piece // 2, *range(piece, end, piece), end]
        ]
        first_slots_I, sequences_I = torch.tensor(entries).T.contiguous().to(device)
        self.pieces = {"first_slots_I": first_slots_I, "sequences_I": sequences_I, "ends_B": self.starts_B}
        self.q_RNH = torch.randn(20, self.num_kv_heads * group, head_dim, generator=generator).to(
            device, dtype
        )
        rows = torch.randperm(20, generator=generator)[:12].view(3, 4)
        self.rows_BW = torch.where(torch.rand(3, 4, generator=generator) < 0.3, -1, rows).to(device)
        self.rows_BW[:, 1] = rows[:, 1].to(device)

    def check(self) -> None:
        right, found = self.bounds.clone().to(self.device), self.bounds.clone().to(self.device)
        write_bounds_reference(self.keys, self.scale_K, *right, **self.pieces, layout=self.layout)
        write_bounds(self.keys, self.scale_K, *found, **self.pieces, layout=self.layout)
        assert torch.equal(found[:, :-1], right[:, :-1])
        num_pages = -(-self.num_table * self.layout.page_size // self.layout.page)
        scores_BKP = page_scores(
            self.q_RNH, self.rows_BW, *found, starts_B=self.starts_B, num_pages=num_pages, layout=self.layout
        )
        limit = TOLERANCE * float(self.q_RNH.abs().max()) * float(found.abs().max()) * self.q_RNH.shape[2]
        for b, start in enumerate(self.ends_B.tolist()):
            expected = page_scores_reference(
                self.q_RNH, self.rows_BW[b], *right, sequence=b, start=start, layout=self.layout
            )
            for head, scores in enumerate(expected):
                mine = scores_BKP[b, head, : len(scores)].cpu().double()
                torch.testing.assert_close(mine, torch.tensor(scores).double(), atol=limit, rtol=0)
        self._check_lists(num_pages)

    def _check_lists(self, num_pages: int) -> None:
        shape = (self.num_sequences, self.num_kv_heads, num_pages + 1)
        pages_BKC = torch.arange(num_pages + 1, dtype=torch.int32).expand(shape).clone()
        pages_BKC[..., -1] = NOT_LISTED
        page = self.layout.page
        found_BKX = list_slots(pages_BKC.to(self.device), self.starts_B, page).tolist()
        for b, start in enumerate(self.ends_B.tolist()):
            listed = [slot if slot < start else NOT_LISTED for slot in range(num_pages * page)]
            assert found_BKX[b] == [listed + [NOT_LISTED] * page] * self.num_kv_heads
