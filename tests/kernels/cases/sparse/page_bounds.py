"""Random cases of bounds of keys and of page scores, for a CPU, the interpreter and a GPU: pages of several
pieces, pieces that are stored in part, and NaN in all slots that may not be read.

B sequences, W positions, I pieces, C pieces of all pages, R rows, P pages, K KV heads, G heads of a KV head,
H head dim."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from idlm.kernels.page_bounds import Bounds, PagedSlots, Pieces, page_scores, write_bounds
from tests.kernels.references.sparse.page_bounds import bounds_reference, score_reference

FP8 = torch.float8_e4m3fn
OLD = 77.0


def check(
    seed: int, dtype: torch.dtype, *, device: str, fp8: bool = False, head_dim: int = 24, pages: int = 7
) -> None:
    """Bounds and scores of a random pass equal the definition."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    engine_page = rng.choice((16, 32, 8))
    page = rng.choice((16, 8, 48, engine_page))
    size, kv_heads, group, width = math.gcd(engine_page, page), rng.choice((1, 3)), 2, rng.choice((1, 5, 32))
    # Bounds of fp8 keys are in fp32.
    bound_dtype = torch.float32 if fp8 else dtype
    ends = [rng.randint(0, pages * engine_page) for _ in range(3)]
    table_BP = (torch.randperm(3 * pages) + 1).view(3, pages)
    slots = PagedSlots(block_table_BP=table_BP, page_size=engine_page)
    num_slots = (3 * pages + 1) * engine_page
    keys_SKH = torch.full((num_slots, kv_heads, head_dim), torch.nan)
    for sequence, end in enumerate(ends):
        physical = slots.physical(torch.arange(end)[None], torch.tensor([sequence]))[0]
        keys_SKH[physical] = torch.randn(end, kv_heads, head_dim)
    keys_SKH = keys_SKH.to(FP8 if fp8 else dtype)
    k_scale_K = 0.5 + torch.rand(kv_heads) if fp8 else None

    # All pieces that have a slot below the end, one more that has none, and one that is no piece.
    found = [(sequence, first) for sequence, end in enumerate(ends) for first in range(0, end, size)]
    given = [*((*one, True) for one in found), (1, ends[1], True), (0, 0, False)]
    rng.shuffle(given)
    shape = (num_slots // size + 1, kv_heads, head_dim)
    bounds = Bounds(
        min_CKH=torch.full(shape, OLD, dtype=bound_dtype, device=device),
        largest_CKH=torch.full(shape, OLD, dtype=bound_dtype, device=device),
        size=size,
    )
    sequences, firsts, are_pieces = zip(*given, strict=True)
    pieces = Pieces(
        sequences_I=torch.tensor(sequences, device=device),
        slots_I=torch.tensor(firsts, device=device),
        is_piece_I=torch.tensor(are_pieces, device=device),
    )
    on_device = PagedSlots(block_table_BP=table_BP.to(device), page_size=engine_page)
    scales = None if k_scale_K is None else k_scale_K.to(device)
    write_bounds(keys_SKH.to(device), scales, bounds, pieces, torch.tensor(ends, device=device), on_device)
    written = {}
    for sequence, first in found:
        end = min(first + size, ends[sequence])
        expected = bounds_reference(keys_SKH, k_scale_K, slots, sequence, first, end)
        physical = int(slots.physical(torch.tensor([[first]]), torch.tensor([sequence]))) // size
        for one, expected_KH in zip((bounds.min_CKH, bounds.largest_CKH), expected, strict=True):
            torch.testing.assert_close(one[physical].cpu(), expected_KH.to(bound_dtype), rtol=0, atol=0)
        written[sequence, first] = expected
    num_left = int((bounds.min_CKH[:-1, 0, 0] == OLD).sum())
    assert num_left == num_slots // size - len(found), "other pieces were overwritten"
    heads = torch.randn(3 * width + 2, kv_heads, group, head_dim).to(dtype)
    _check_scores(rng, heads, page, ends, bounds, on_device, written)


def _check_scores(
    rng: random.Random,
    q_RKGH: Tensor,
    page: int,
    ends: list[int],
    bounds: Bounds,
    slots: PagedSlots,
    written: dict[tuple[int, int], tuple[Tensor, Tensor]],
) -> None:
    """Scores of three blocks that begin at `ends`; `written`: bounds by sequence and first slot."""
    device, width = bounds.min_CKH.device, len(q_RKGH) // 3
    rows_BW = torch.randperm(len(q_RKGH))[: 3 * width].view(3, width)
    rows_BW[torch.rand(3, width) < rng.choice((0.0, 0.4))] = -1
    num_pages = -(-max(*ends, 1) // page)
    scores_BKP = page_scores(
        q_RKGH.flatten(1, 2).to(device),
        rows_BW.to(device),
        bounds,
        torch.tensor(ends, device=device),
        slots,
        page=page,
        num_pages=num_pages,
    ).cpu()
    for sequence, end in enumerate(ends):
        rows = rows_BW[sequence][rows_BW[sequence] >= 0]
        for kv_head in range(q_RKGH.shape[1]):
            q_WGH = q_RKGH[rows, kv_head]
            for number in range(-(-end // page)):
                firsts = range(number * page, min((number + 1) * page, end), bounds.size)
                min_H, largest_H = (
                    torch.stack([written[sequence, first][side][kv_head] for first in firsts])
                    for side in (0, 1)
                )
                min_H = min_H.amin(0).to(bounds.min_CKH.dtype)
                largest_H = largest_H.amax(0).to(bounds.min_CKH.dtype)
                expected = score_reference(q_WGH, min_H, largest_H) if len(rows) else torch.zeros(())
                found = scores_BKP[sequence, kv_head, number]
                torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)
