"""Bounds of keys by page, and the scores of pages that follow from them; contract in README.md."""

from idlm.kernels.page_bounds.op import NOT_LISTED, list_slots, page_scores, write_bounds
from idlm.kernels.page_bounds.reference import page_scores_reference, write_bounds_reference
from idlm.kernels.page_bounds.types import PageLayout

__all__ = [
    "NOT_LISTED",
    "PageLayout",
    "list_slots",
    "page_scores",
    "page_scores_reference",
    "write_bounds",
    "write_bounds_reference",
]
