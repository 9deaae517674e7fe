"""Lists of the slots before a block that its queries attend to most, for all sparse layers at once.

Contract and reasons in README.md. L sparse layers, B sequences, K KV heads, S slots of a sequence, C listed
slots, Z lanes."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.backend import computes, runs_kernels
from idlm.kernels.prefix_ranking import plain
from idlm.kernels.prefix_ranking.types import GROUP, RankingPass

MAX_SHARE_BYTES = 256 << 20
"""Most memory for the shares of a group of layers, unless one layer needs more."""


@torch.inference_mode()
def rank_prefix(ranking: RankingPass, lanes_B: Tensor, slots_LZKC: Tensor) -> None:
    """Write the lists of sequences that rank into `slots_LZKC[:, lanes_B]` (int32); others stay.

    A list has the C slots before the block with the largest `attention_share`, ascending, then -1. Of
    equal shares the lower slot is taken. Nothing waits for the device, and no shape depends on contents."""
    num_layers, num_sequences = len(ranking.q_LRNH), len(ranking.starts_B)
    assert len(slots_LZKC) == num_layers and slots_LZKC.dtype == torch.int32, f"{slots_LZKC.shape=}"
    most = layers_at_once(num_layers, num_sequences, ranking.num_kv_heads, ranking.max_slots)
    for first in range(0, num_layers, most):
        # In a function, so that the shares of a group are freed before those of the next are computed.
        _rank_layers(ranking, lanes_B, slots_LZKC, first, min(most, num_layers - first))


def _rank_layers(
    ranking: RankingPass, lanes_B: Tensor, slots_LZKC: Tensor, first_layer: int, num_layers: int
) -> None:
    shares_LBKS = attention_share(ranking, first_layer, num_layers)
    lists_LZKC = slots_LZKC[first_layer : first_layer + num_layers]
    select_largest(shares_LBKS, ranking.starts_B, ranking.ranks_B, lanes_B, lists_LZKC)


def attention_share(ranking: RankingPass, first_layer: int, num_layers: int) -> Tensor:
    """Mean attention [L, B, K, S] of a block's queries to the slots before it (fp32; fp64 of fp64).

    The mean is over the rows fed and the heads of a KV head, of 2 ** (x - max) / sum. S is at least
    `max_slots`. Entries from the block on, and those of sequences that do not rank, are undefined."""
    if computes(ranking.q_LRNH):
        from idlm.kernels.prefix_ranking import launch

        return launch.attention_share(ranking, first_layer, num_layers)
    return plain.attention_share(ranking, first_layer, num_layers)


def select_largest(
    scores_LBKS: Tensor, counts_B: Tensor, is_selected_B: Tensor, lanes_B: Tensor, places_LZKC: Tensor
) -> None:
    """Write the places of the C largest of the first `counts_B` scores, ascending, then -1, into
    `places_LZKC[:, lanes_B]` (int32), for the sequences selected (bool). Of equal scores the lower place is
    taken; NaN counts as the largest. Scores may be negative."""
    if runs_kernels(scores_LBKS) and scores_LBKS.dtype == torch.float32:
        from idlm.kernels.prefix_ranking import launch

        launch.select_largest(scores_LBKS, counts_B, is_selected_B, lanes_B, places_LZKC)
    else:
        plain.select_largest(scores_LBKS, counts_B, is_selected_B, lanes_B, places_LZKC)


def layers_at_once(num_layers: int, num_sequences: int, num_kv_heads: int, max_slots: int) -> int:
    """Layers of a group: few groups, of about equal size."""
    per_layer = layer_bytes(num_sequences, num_kv_heads, max_slots)
    most = max(1, MAX_SHARE_BYTES // max(1, per_layer))
    num_groups = max(1, -(-num_layers // most))
    return max(1, -(-num_layers // num_groups))


def layer_bytes(num_sequences: int, num_kv_heads: int, max_slots: int) -> int:
    """Bytes of one layer's shares, with those that its selection needs beside them."""
    num_groups = -(-max_slots // GROUP)
    return 4 * num_sequences * num_kv_heads * num_groups * (GROUP + 2)


def workspace_bytes(num_layers: int, num_sequences: int, num_kv_heads: int, max_slots: int) -> int:
    """Bytes that `rank_prefix` allocates at most; known before any page is allocated."""
    # A smaller pass takes more layers at once.
    per_layer = layer_bytes(num_sequences, num_kv_heads, max_slots)
    return min(num_layers * per_layer, max(MAX_SHARE_BYTES, per_layer))
