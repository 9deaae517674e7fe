"""Penalties, biases and bans of requests, by lane, and their application to the wanted rows of a pass.

Whatever changes the logits that a request draws from does so here or, for grammars, right after it
(`base.changed_logits`), before temperature and filters. So a draft is tested with p as the tokens and drafts
before it change it, and q is the row that it was drawn from, as it was changed then.
Shapes: Z lanes, L columns of the token table, K entries of a list, B sequences, X rows, N drafts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.request import Request
from idlm.infer.state.batch import lane_of, set_lanes, to_device
from idlm.kernels.logit_changes import ABSENT, ChangedRows, ChangeLanes, KnownTokens, change_logits

MAX_LISTED = 2560
"""Tokens of a request that have a bias or stop the answer."""


class LogitChanges:
    """The settings of `contracts.CHANGES` by lane."""

    def __init__(self, num_lanes: int, num_columns: int, device: torch.device) -> None:
        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_lanes, *shape, dtype=dtype, device=device)

        self._device, self._active = device, set[int]()
        self.lanes = ChangeLanes(
            is_active_Z=ints(dtype=torch.bool),
            penalties_Z3=ints(3, dtype=torch.float32),
            ngram_Z=ints(),
            free_from_Z=ints(),
            num_prompt_Z=ints(),
            num_listed_Z=ints(),
            listed_ids_ZK=ints(MAX_LISTED),
            biases_ZK=ints(MAX_LISTED, dtype=torch.float32),
            is_stop_ZK=ints(MAX_LISTED, dtype=torch.bool),
            counts_ZL=ints(num_columns, dtype=torch.int32),
            num_counted_Z=ints(),
        )

    def admit(self, requests: Sequence[Request]) -> None:
        """Take over the settings of requests on new lanes, and count their known tokens."""
        changing = [request for request in requests if request.params.changes]
        if not (self._active or changing):
            return
        self._active.difference_update(map(lane_of, requests))
        self._active.update(map(lane_of, changing))
        is_active = [request.params.changes for request in requests]
        set_lanes(self._lanes_of(requests), (self.lanes.is_active_Z, is_active))
        if changing:
            self._fill(changing)

    def recount(self, requests: Sequence[Request]) -> None:
        """Count the known tokens of requests again, some of which may have lost a part of them."""
        counts = [_counts(one.all_known_ids, len(one.prompt_ids)) for one in requests if one.params.changes]
        if counts:
            lanes_B = self._lanes_of([one for one in requests if one.params.changes])
            self._write(lanes_B, self.lanes.counts_ZL, counts)
            set_lanes(lanes_B, (self.lanes.num_counted_Z, list(map(len, counts))))

    def apply(self, logits_XV: Tensor, known: KnownTokens, rows: ChangedRows, lanes_B: Tensor) -> None:
        """Change rows of a pass over `lanes_B` in place."""
        change_logits(logits_XV, self.lanes, known, rows, lanes_B)

    def _fill(self, requests: Sequence[Request]) -> None:
        lanes, lanes_B = self.lanes, self._lanes_of(requests)
        params = [request.params for request in requests]
        num_prompts = [len(request.prompt_ids) for request in requests]
        listed = [_listed(request.params, request.stop_ids) for request in requests]
        penalties = [(one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in params]
        free_from = [num + one.min_tokens for num, one in zip(num_prompts, params, strict=True)]
        set_lanes(
            lanes_B,
            (lanes.penalties_Z3, penalties),
            (lanes.ngram_Z, [one.no_repeat_ngram_size for one in params]),
            (lanes.free_from_Z, free_from),
            (lanes.num_prompt_Z, num_prompts),
            (lanes.num_listed_Z, list(map(len, listed))),
        )
        for field, column in enumerate((lanes.listed_ids_ZK, lanes.biases_ZK, lanes.is_stop_ZK)):
            self._write(lanes_B, column, [[entry[field] for entry in one] for one in listed])
        self.recount(requests)

    def _lanes_of(self, requests: Sequence[Request]) -> Tensor:
        return to_device([lane_of(request) for request in requests], self._device)

    def _write(self, lanes_B: Tensor, column: Tensor, rows: Sequence[Sequence[float]]) -> None:
        """Write the first numbers of lanes, in the order of the stream."""
        width = max(map(len, rows))
        padded = [[*row, *[0] * (width - len(row))] for row in rows]
        column[lanes_B, :width] = to_device(padded, self._device, dtype=column.dtype)


def check_listed(params: SamplingParams, stop_ids: Collection[int]) -> None:
    """Raise UserError IDLM-0401 for more tokens with a bias, or that must not come yet, than a lane holds."""
    num_listed = len(_listed(params, stop_ids))
    if num_listed > MAX_LISTED:
        raise UserError(
            "IDLM-0401",
            f"logit_bias and, because of min_tokens, stop_token_ids name {num_listed} tokens, at most "
            f"{MAX_LISTED} are allowed",
            fix="give fewer of them",
        )


def _listed(params: SamplingParams, stop_ids: Collection[int]) -> list[tuple[int, float, bool]]:
    """Token id, bias, and whether it must not come yet, of all tokens of which either holds."""
    biases, stop_ids = params.logit_bias, stop_ids if params.min_tokens else ()
    return [
        (token_id, biases.get(token_id, 0.0), token_id in stop_ids)
        for token_id in dict.fromkeys((*biases, *sorted(stop_ids)))
    ]


def _counts(token_ids: Sequence[int], num_prompt: int) -> list[int]:
    """How often the answer has each token, where the token occurs first; `ABSENT` elsewhere."""
    counts, firsts = [ABSENT] * len(token_ids), dict[int, int]()
    for position, token_id in enumerate(token_ids):
        first = firsts.setdefault(token_id, position)
        if first == position:
            counts[first] = 0
        counts[first] += position >= num_prompt
    return counts
