"""Bounds of keys, and scores of pages by them; contract in README.md."""

from idlm.kernels.page_bounds.op import page_scores, write_bounds
from idlm.kernels.page_bounds.types import Bounds, PagedSlots, Pieces
