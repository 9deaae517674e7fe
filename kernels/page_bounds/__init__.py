"""Bounds of keys, and scores of pages by them; contract in README.md."""

from idlm.kernels.page_bounds.op import Bounds, PagedSlots, Pieces, page_scores, write_bounds
