"""Bounds of keys by piece, scores of pages, and slots of pages. Contract in README.md.

B sequences, I pieces of a pass, F slots of a piece, R rows, W places of a block, S physical slots, X pieces
of the cache, C pieces of a sequence (listed pages of `list_slots`), P pages that are scored, N query heads,
K KV heads, G heads of a KV head, H head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from idlm.kernels.backend import runs_kernels
from idlm.kernels.page_bounds.types import PageLayout

FP8 = torch.float8_e4m3fn
NOT_LISTED = -1
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def write_bounds(
    keys_SKH: Tensor,
    k_scale_K: Tensor | None,
    least_XKH: Tensor,
    largest_XKH: Tensor,
    *,
    first_slots_I: Tensor,
    sequences_I: Tensor,
    ends_B: Tensor,
    layout: PageLayout,
) -> None:
    """Set the bounds of pieces to those of their slots below `ends_B`; integers are int64.

    `first_slots_I`: a slot of each piece of sequence `sequences_I`; from the sequence's end on it names none.
    """
    if runs_kernels(keys_SKH) and least_XKH.dtype in KERNEL_DTYPES:
        from idlm.kernels.page_bounds import launch

        launch.write_bounds(
            keys_SKH, k_scale_K, least_XKH, largest_XKH, first_slots_I, sequences_I, ends_B, layout
        )
        return
    begins_I1 = (first_slots_I // layout.piece * layout.piece)[:, None]
    slots_IF = begins_I1 + torch.arange(layout.piece, device=keys_SKH.device)
    ends_I1 = ends_B[sequences_I, None]
    physical_IF = _physical(slots_IF, sequences_I, layout)
    is_final_IF11 = (slots_IF < ends_I1)[:, :, None, None]
    k_IFKH = _read(keys_SKH, physical_IF, k_scale_K)
    is_written_I = first_slots_I < ends_I1[:, 0]
    pieces_I = torch.where(is_written_I, physical_IF[:, 0] // layout.piece, len(least_XKH) - 1)
    least_XKH[pieces_I] = torch.where(is_final_IF11, k_IFKH, math.inf).amin(1).to(least_XKH.dtype)
    largest_XKH[pieces_I] = torch.where(is_final_IF11, k_IFKH, -math.inf).amax(1).to(largest_XKH.dtype)


def page_scores(
    q_RNH: Tensor,
    rows_BW: Tensor,
    least_XKH: Tensor,
    largest_XKH: Tensor,
    *,
    starts_B: Tensor,
    num_pages: int,
    layout: PageLayout,
) -> Tensor:
    """Upper bounds [B, K, P] of products, averaged over the queries of the rows `rows_BW` (-1: none), fp32
    (fp64 of fp64). Scores of pages without a slot before `starts_B` are undefined.
    """
    if runs_kernels(q_RNH) and q_RNH.dtype in KERNEL_DTYPES:
        from idlm.kernels.page_bounds import launch

        return launch.page_scores(q_RNH, rows_BW, least_XKH, largest_XKH, starts_B, num_pages, layout)
    wide = torch.float64 if q_RNH.dtype == torch.float64 else torch.float32
    is_fed_BW = rows_BW >= 0
    q_BWNH = torch.where(is_fed_BW[:, :, None, None], q_RNH[rows_BW.clamp(min=0)].to(wide), 0)
    q_BWKGH = q_BWNH.unflatten(2, (least_XKH.shape[1], -1))
    num_queries_B11 = (is_fed_BW.sum(-1).clamp(min=1) * q_BWKGH.shape[3])[:, None, None]
    up_BKH = q_BWKGH.clamp(min=0).sum((1, 3)) / num_queries_B11
    down_BKH = q_BWKGH.clamp(max=0).sum((1, 3)) / num_queries_B11
    first_C = torch.arange(num_pages * (layout.page // layout.piece), device=q_RNH.device) * layout.piece
    slots_BC = first_C.expand(len(starts_B), -1)
    sequences_B = torch.arange(len(starts_B), device=q_RNH.device)
    pieces_BC = _physical(slots_BC, sequences_B, layout) // layout.piece
    # Pieces that hold nothing yet have the bounds of an earlier owner.
    is_stored_BC11 = (slots_BC < starts_B[:, None])[:, :, None, None]
    least_BCKH = torch.where(is_stored_BC11, least_XKH[pieces_BC].to(wide), math.inf)
    largest_BCKH = torch.where(is_stored_BC11, largest_XKH[pieces_BC].to(wide), -math.inf)
    is_any_BP11 = is_stored_BC11.unflatten(1, (num_pages, -1)).any(2)
    least_BPKH = torch.where(is_any_BP11, least_BCKH.unflatten(1, (num_pages, -1)).amin(2), 0)
    largest_BPKH = torch.where(is_any_BP11, largest_BCKH.unflatten(1, (num_pages, -1)).amax(2), 0)
    return torch.einsum("bkh,bpkh->bkp", up_BKH, largest_BPKH) + torch.einsum(
        "bkh,bpkh->bkp", down_BKH, least_BPKH
    )


def list_slots(pages_BKC: Tensor, starts_B: Tensor, page: int) -> Tensor:
    """Slots [B, K, C * page] of pages, both int32: `NOT_LISTED` from `starts_B` on, and of pages below 0."""
    if runs_kernels(pages_BKC):
        from idlm.kernels.page_bounds import launch

        return launch.list_slots(pages_BKC, starts_B, page)
    pages_BKC1 = pages_BKC[..., None]
    slots_BKCF = pages_BKC1 * page + torch.arange(page, dtype=torch.int32, device=pages_BKC.device)
    is_listed_BKCF = (pages_BKC1 >= 0) & (slots_BKCF < starts_B[:, None, None, None])
    return torch.where(is_listed_BKCF, slots_BKCF, NOT_LISTED).flatten(2)


def _physical(slots_BX: Tensor, sequences_B: Tensor, layout: PageLayout) -> Tensor:
    """Physical slots; of slots beyond the table, any that exist."""
    table_BP, size = layout.block_table_BP, layout.page_size
    slots_BX = slots_BX.clamp(max=table_BP.shape[1] * size - 1)
    return table_BP[sequences_B[:, None], slots_BX // size] * size + slots_BX % size


def _read(keys_SKH: Tensor, physical_IF: Tensor, k_scale_K: Tensor | None) -> Tensor:
    # Gathered as bytes: not every device gathers eight-bit floats.
    is_fp8 = keys_SKH.dtype == FP8
    k_IFKH = keys_SKH.view(torch.uint8)[physical_IF].view(FP8) if is_fp8 else keys_SKH[physical_IF]
    k_IFKH = k_IFKH.to(torch.float64 if keys_SKH.dtype == torch.float64 else torch.float32)
    return k_IFKH if k_scale_K is None else k_IFKH * k_scale_K[:, None]
