"""Penalties, biases and bans of rows of logits, in place: plain torch on a CPU, two launches on a GPU.

Contract in README.md. Z lanes, L columns of the token table, B sequences, X rows, x rows that change, V
vocabulary, K entries of a list, N drafts, H tokens of the longest history."""

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
    """Change rows by the settings of their lanes and the tokens before them, in place. First counts what the
    lanes `lanes_B` of the pass got to know since the last call; a lane that occurs twice must not be
    active."""
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
        TILE=TILE,
        num_warps=4,
    )


def _plain(
    logits_XV: Tensor, lanes: ChangeLanes, known: KnownTokens, rows: ChangedRows, lanes_B: Tensor
) -> None:
    """The same without counts: every row looks at all tokens before it."""
    # Of an answer that went past its end the last tokens are not in the table.
    known = known._replace(num_known_Z=known.num_known_Z.clamp(max=known.tokens_ZL.shape[1] - 1))
    x = torch.nonzero(lanes.is_active_Z[rows.lanes_X] & (rows.num_drafts_X >= 0))[:, 0]
    if not len(x):
        return
    lanes_x, num_drafts_x, positions_x, own_x = (None if each is None else each[x] for each in rows)
    assert lanes_x is not None and num_drafts_x is not None and positions_x is not None
    history_xH, is_answer_xH = _histories(lanes, known, lanes_x, num_drafts_x, own_x)
    values_xV, dtype = logits_XV[x].float(), logits_XV.dtype
    num_tokens, num_listed_x = values_xV.shape[1], lanes.num_listed_Z[lanes_x]
    width = int(num_listed_x.max())
    is_listed_xK = torch.arange(width) < num_listed_x[:, None]
    ids_xK = lanes.listed_ids_ZK[lanes_x, :width].where(is_listed_xK, num_tokens)
    bias_xV = values_xV.new_zeros(len(x), num_tokens + 1)
    bias_xV.scatter_(1, ids_xK, lanes.biases_ZK[lanes_x, :width])
    values_xV = (values_xV + bias_xV[:, :-1]).to(dtype).float()
    values_xV = _penalised(values_xV, lanes.penalties_Z3[lanes_x], history_xH, is_answer_xH)
    is_early_x = positions_x < lanes.free_from_Z[lanes_x]
    stops_xK = ids_xK.where(lanes.is_stop_ZK[lanes_x, :width] & is_early_x[:, None], num_tokens)
    is_closed_xV = torch.zeros(len(x), num_tokens + 1, dtype=torch.bool).scatter_(1, stops_xK, True)
    ends_x, ngram_x = known.num_known_Z[lanes_x] + num_drafts_x, lanes.ngram_Z[lanes_x]
    for size in set(ngram_x.tolist()) - {0}:
        y = torch.nonzero((ngram_x == size) & (positions_x == ends_x))[:, 0]
        is_closed_xV[y] |= _repeating(history_xH[y], ends_x[y], size, num_tokens)
    logits_XV[x] = values_xV.masked_fill(is_closed_xV[:, :-1], -torch.inf).to(dtype)


def _histories(
    lanes: ChangeLanes, known: KnownTokens, lanes_x: Tensor, num_drafts_x: Tensor, own_x: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens before each row [x, H] and whether they are of the answer; `ABSENT` beside them."""
    num_known_x = known.num_known_Z[lanes_x]
    drafts_ZN = known.tokens_ZL[:, :0] if known.drafts_ZN is None else known.drafts_ZN
    width = int(num_known_x.max())
    columns = torch.arange(width + drafts_ZN.shape[1])
    tokens_xW = known.tokens_ZL[lanes_x, :width]
    tokens_xW = tokens_xW.where(columns[:width] < num_known_x[:, None], ABSENT)
    index_N = torch.arange(drafts_ZN.shape[1])
    is_draft_xN = index_N < num_drafts_x[:, None]
    if own_x is not None:
        is_draft_xN = is_draft_xN & (index_N != own_x[:, None])
    history_xH = torch.cat((tokens_xW, drafts_ZN[lanes_x].where(is_draft_xN, ABSENT)), dim=1)
    # Each history without a gap between known tokens and drafts.
    from_x1 = (columns - num_known_x[:, None]).clamp(min=0) + width
    from_xH = torch.where(columns < num_known_x[:, None], columns, from_x1)
    padded_xH = torch.nn.functional.pad(history_xH, (0, 1), value=ABSENT)
    history_xH = padded_xH.gather(1, from_xH.clamp(max=len(columns)))
    return history_xH, columns >= lanes.num_prompt_Z[lanes_x, None]


def _penalised(values_xV: Tensor, penalties_x3: Tensor, history_xH: Tensor, is_answer_xH: Tensor) -> Tensor:
    num_tokens = values_xV.shape[1]
    ids_xH = history_xH.where(history_xH != ABSENT, num_tokens)
    seen_xV = torch.zeros(len(ids_xH), num_tokens + 1).scatter_(1, ids_xH, 1.0)[:, :-1] > 0
    count_xV = torch.zeros(len(ids_xH), num_tokens + 1).scatter_add_(1, ids_xH, is_answer_xH.float())[:, :-1]
    repetition, presence, frequency = (penalties_x3[:, [at]] for at in (REPETITION, PRESENCE, FREQUENCY))
    repeated_xV = torch.where(values_xV > 0, values_xV / repetition, values_xV * repetition)
    values_xV = torch.where(seen_xV, repeated_xV, values_xV)
    # A product of infinity and zero is NaN.
    return torch.where(count_xV > 0, values_xV - frequency * count_xV - presence, values_xV)


def _repeating(history_yH: Tensor, ends_y: Tensor, size: int, num_tokens: int) -> Tensor:
    """Tokens, bool [y, V + 1], that end a run of `size` tokens which histories of `ends_y` tokens have."""
    is_banned_yV = torch.zeros(len(history_yH), num_tokens + 1, dtype=torch.bool)
    if history_yH.shape[1] < size or not len(history_yH):
        return is_banned_yV
    starts_y1 = (ends_y - size + 1)[:, None]
    last_yS = history_yH.gather(1, (starts_y1 + torch.arange(size - 1)).clamp(min=0))
    runs_yWS = history_yH.unfold(1, size, 1)
    is_same_yW = (runs_yWS[..., :-1] == last_yS[:, None]).all(-1)
    is_same_yW &= torch.arange(runs_yWS.shape[1]) < starts_y1
    return is_banned_yV.scatter_(1, runs_yWS[..., -1].where(is_same_yW, num_tokens), True)
