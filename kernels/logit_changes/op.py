"""Penalties, biases and bans of rows of logits, in place: plain torch on a CPU, two launches on a GPU.

Contract in README.md. Z lanes, L columns of the token table, B sequences, X rows, M rows that change, I of
these, V vocabulary, K entries of a list, N drafts, H tokens of the longest history, W runs of S tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.backend import runs_kernels
from idlm.kernels.logit_changes.types import (
    ABSENT,
    FREQUENCY,
    PRESENCE,
    REPETITION,
    ChangedRows,
    ChangeLanes,
    KnownTokens,
)

NEW_TOKENS = 16
"""Known tokens that a program counts at a time."""
TILE = 256


@torch.inference_mode()
def change_logits(
    logits_XV: Tensor, lanes: ChangeLanes, known: KnownTokens, rows: ChangedRows, lanes_B: Tensor
) -> None:
    """Change rows by the settings of their lanes and the tokens before them, in place. First counts the
    tokens that lanes `lanes_B` of the pass got since the last call; a lane that occurs twice must not be
    active."""
    # The rows of one sequence are easily a view that repeats its lane.
    assert all(row_X is None or row_X.is_contiguous() for row_X in rows), f"{[*rows]=}"
    run = _launched if runs_kernels(logits_XV) else _plain
    run(logits_XV, lanes, known, rows, lanes_B)


def _launched(
    logits_XV: Tensor, lanes: ChangeLanes, known: KnownTokens, rows: ChangedRows, lanes_B: Tensor
) -> None:
    import triton

    from idlm.kernels.logit_changes import kernel

    num_tokens, drafts_ZN = logits_XV.shape[1], known.drafts_ZN
    num_drafts = 0 if drafts_ZN is None else drafts_ZN.shape[1]
    known = known if num_drafts else known._replace(drafts_ZN=None)
    assert logits_XV.stride(1) == 1 and (drafts_ZN is None or drafts_ZN.is_contiguous())
    if not len(logits_XV):
        return
    kernel.count_kernel[(len(lanes_B),)](
        *(lanes, known, lanes_B, known.tokens_ZL.shape[1]), NEW=NEW_TOKENS, TILE=TILE, num_warps=4
    )
    kernel.change_kernel[(len(logits_XV),)](
        *(logits_XV, lanes, known, rows),
        *(logits_XV.stride(0), num_tokens, known.tokens_ZL.shape[1], lanes.listed_ids_ZK.shape[1]),
        num_drafts,
        DRAFTS=triton.next_power_of_2(max(1, num_drafts)),
        LOWEST=torch.finfo(logits_XV.dtype).min,
        TILE=TILE,
        num_warps=4,
    )


def _plain(
    logits_XV: Tensor, lanes: ChangeLanes, known: KnownTokens, rows: ChangedRows, lanes_B: Tensor
) -> None:
    """The same without counts: every row looks at all tokens before it."""
    # Of an answer that went past its end the last tokens are not in the table.
    known = known._replace(num_known_Z=known.num_known_Z.clamp(max=known.tokens_ZL.shape[1] - 1))
    changing = torch.nonzero(lanes.is_active_Z[rows.lanes_X] & (rows.num_drafts_X >= 0))[:, 0]
    if not len(changing):
        return
    lanes_M, num_drafts_M, positions_M, own_M = (None if each is None else each[changing] for each in rows)
    assert lanes_M is not None and num_drafts_M is not None and positions_M is not None
    history_MH, is_answer_MH = _histories(lanes, known, lanes_M, num_drafts_M, own_M)
    values_MV, dtype = logits_XV[changing].float(), logits_XV.dtype
    num_tokens, num_listed_M = values_MV.shape[1], lanes.num_listed_Z[lanes_M]
    width = int(num_listed_M.max())
    is_listed_MK = torch.arange(width) < num_listed_M[:, None]
    ids_MK = lanes.listed_ids_ZK[lanes_M, :width].where(is_listed_MK, num_tokens)
    bias_MV = values_MV.new_zeros(len(changing), num_tokens + 1)
    bias_MV.scatter_(1, ids_MK, lanes.biases_ZK[lanes_M, :width])
    values_MV = (values_MV + bias_MV[:, :-1]).to(dtype).float()
    values_MV = _penalised(values_MV, lanes.penalties_Z3[lanes_M], history_MH, is_answer_MH)
    is_early_M = positions_M < lanes.free_from_Z[lanes_M]
    stops_MK = ids_MK.where(lanes.is_stop_ZK[lanes_M, :width] & is_early_M[:, None], num_tokens)
    is_closed_MV = torch.zeros(len(changing), num_tokens + 1, dtype=torch.bool).scatter_(1, stops_MK, True)
    ends_M, ngram_M = known.num_known_Z[lanes_M] + num_drafts_M, lanes.ngram_Z[lanes_M]
    for size in set(ngram_M.tolist()) - {0}:
        banning = torch.nonzero((ngram_M == size) & (positions_M == ends_M))[:, 0]
        is_closed_MV[banning] |= _repeating(history_MH[banning], ends_M[banning], size, num_tokens)
    lowest = torch.finfo(dtype).min
    logits_XV[changing] = values_MV.to(dtype).masked_fill(is_closed_MV[:, :-1], lowest)


def _histories(
    lanes: ChangeLanes, known: KnownTokens, lanes_M: Tensor, num_drafts_M: Tensor, own_M: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens before each row [M, H], or `ABSENT`, and whether they are the answer's."""
    num_known_M = known.num_known_Z[lanes_M]
    drafts_ZN = known.tokens_ZL[:, :0] if known.drafts_ZN is None else known.drafts_ZN
    num_drafts, width = drafts_ZN.shape[1], int(num_known_M.max())
    index_N, columns = torch.arange(num_drafts), torch.arange(width + num_drafts)
    is_draft_MN = index_N < num_drafts_M[:, None]
    if own_M is not None:
        is_draft_MN = is_draft_MN & (index_N != own_M[:, None])
    tokens_MH = torch.nn.functional.pad(known.tokens_ZL[lanes_M, :width], (0, num_drafts))
    history_MH = tokens_MH.where(columns < num_known_M[:, None], ABSENT)
    history_MH.scatter_(1, num_known_M[:, None] + index_N, drafts_ZN[lanes_M].where(is_draft_MN, ABSENT))
    return history_MH, columns >= lanes.num_prompt_Z[lanes_M, None]


def _penalised(values_MV: Tensor, penalties_M3: Tensor, history_MH: Tensor, is_answer_MH: Tensor) -> Tensor:
    num_tokens = values_MV.shape[1]
    ids_MH = history_MH.where(history_MH != ABSENT, num_tokens)
    seen_MV = torch.zeros(len(ids_MH), num_tokens + 1).scatter_(1, ids_MH, 1.0)[:, :-1] > 0
    count_MV = torch.zeros(len(ids_MH), num_tokens + 1).scatter_add_(1, ids_MH, is_answer_MH.float())[:, :-1]
    repetition, presence, frequency = (penalties_M3[:, [at]] for at in (REPETITION, PRESENCE, FREQUENCY))
    repeated_MV = torch.where(values_MV > 0, values_MV / repetition, values_MV * repetition)
    values_MV = torch.where(seen_MV, repeated_MV, values_MV)
    # A product of infinity and zero is NaN.
    return torch.where(count_MV > 0, values_MV - frequency * count_MV - presence, values_MV)


def _repeating(history_IH: Tensor, ends_I: Tensor, size: int, num_tokens: int) -> Tensor:
    """Tokens, bool [I, V + 1], that end a run of `size` tokens which histories of `ends_I` tokens have."""
    is_banned_IV = torch.zeros(len(history_IH), num_tokens + 1, dtype=torch.bool)
    if history_IH.shape[1] < size or not len(history_IH):
        return is_banned_IV
    starts_I1 = (ends_I - size + 1)[:, None]
    last_IS = history_IH.gather(1, (starts_I1 + torch.arange(size - 1)).clamp(min=0))
    runs_IWS = history_IH.unfold(1, size, 1)
    is_same_IW = (runs_IWS[..., :-1] == last_IS[:, None]).all(-1)
    is_same_IW &= torch.arange(runs_IWS.shape[1]) < starts_I1
    return is_banned_IV.scatter_(1, runs_IWS[..., -1].where(is_same_IW, num_tokens), True)
