"""Candidates of rows of logits, and drafts drawn one after the other; contract in README.md."""

from idlm.kernels.draft_walk.op import Candidates, Walk, path_scores, top_candidates, walk
