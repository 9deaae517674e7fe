"""Arguments of the op that changes logits by the tokens before them.

Z lanes, L columns of the token table, K entries of a list, N drafts, X rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

ABSENT = -1
"""A draft that is none, and the count of a token that occurs further left."""
REPETITION, PRESENCE, FREQUENCY = range(3)
"""Columns of `penalties_Z3`."""


class ChangeLanes(NamedTuple):
    """Settings by lane, and counts of its known tokens.

    `is_active_Z` (bool): the lane changes logits. `penalties_Z3` fp32; `ngram_Z` int64 (0: off); rows that
    predict a position (int64) below `free_from_Z` may draw no stop token. The first `num_listed_Z` entries of
    the lists: token ids (int64, distinct), biases (fp32), and whether they stop the answer (bool). The first
    `num_prompt_Z` known tokens are the prompt's. `counts_ZL` int32: how often the answer has the token there,
    or `ABSENT` if it occurs further left, for the first `num_counted_Z` known tokens."""

    is_active_Z: Tensor
    penalties_Z3: Tensor
    ngram_Z: Tensor
    free_from_Z: Tensor
    num_prompt_Z: Tensor
    num_listed_Z: Tensor
    listed_ids_ZK: Tensor
    biases_ZK: Tensor
    is_stop_ZK: Tensor
    counts_ZL: Tensor
    num_counted_Z: Tensor


class KnownTokens(NamedTuple):
    """The tokens of the lanes, int64: `num_known_Z` final ones, and `drafts_ZN` after these (`ABSENT`:
    none)."""

    num_known_Z: Tensor
    tokens_ZL: Tensor
    drafts_ZN: Tensor | None


class ChangedRows(NamedTuple):
    """Rows of logits, int64. Row x belongs to lane `lanes_X[x]`, follows the known tokens and the first
    `num_drafts_X[x]` drafts (negative: it predicts nothing), and predicts position `positions_X[x]`. Draft
    `own_X[x]` is not before it (None: there is no such draft)."""

    lanes_X: Tensor
    num_drafts_X: Tensor
    positions_X: Tensor
    own_X: Tensor | None = None
