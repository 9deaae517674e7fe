"""State of the running sequences as tensors on the device, which every decoder reads and commits to.

A lane is the index of one running sequence in all of these tensors, so that plans, sampling and commits are
tensor operations over the batch and can run inside a captured graph. Decoders have further tensors of their
own, indexed by the same lanes.
Whatever changes the logits that a request draws from does so here (`LogitChanges`) or, for grammars, right
after it (`base.changed_logits`), before temperature and filters. So a draft is tested with p as the tokens
and drafts before it change it, and q is the row that it was drawn from, as it was changed then.
Shapes: Z lanes, L columns of the token table, B sequences of this pass, J tokens a pass can emit, K entries
of a list, X rows, N drafts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.request import Request
from idlm.infer.state.batch import lane_of, set_lanes, to_device
from idlm.kernels.logit_changes import ABSENT, ChangedRows, ChangeLanes, KnownTokens, change_logits
from idlm.kernels.sampling import Probs, row_probs, uniforms
from idlm.kernels.step_rows import Lanes, Noise, commit

MAX_LISTED = 2560
"""Tokens of a request that have a bias or stop the answer."""


class LogitChanges:
    """Penalties, biases and bans of requests (`contracts.CHANGES`) by lane."""

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


MIN_TOP_P = 1e-9
"""In place of 0: kernels look for the tokens that reach a positive total."""


class SequenceState:
    """Known tokens, KV progress, sampling settings and random stream of each lane. `num_known_Z` tokens are
    final (the pending token included); the KV of the first `num_computed_Z` of them is in the cache.
    `gates_Z` (uint8): 1 plus the number of the adapter that drafts, 0 being the checkpoint's own; None
    without further `adapters`, their names in order."""

    def __init__(
        self, num_lanes: int, max_length: int, device: torch.device, *, adapters: tuple[str, ...] = ()
    ) -> None:
        def ints() -> Tensor:
            return torch.zeros(num_lanes, dtype=torch.int64, device=device)

        def floats(value: float) -> Tensor:
            return torch.full((num_lanes,), value, dtype=torch.float64, device=device)

        self.device = device
        self.max_length = max_length
        self.tokens_ZL = torch.zeros(num_lanes, max_length + 1, dtype=torch.int64, device=device)
        self.num_known_Z, self.num_computed_Z = ints(), ints()
        self.ends_Z = ints()
        self.seeds_Z, self.samples_Z, self.steps_Z, self.top_k_Z = ints(), ints(), ints(), ints()
        self.temperature_Z, self.top_p_Z = floats(1), floats(1)
        self.min_p_Z, self.tau_Z = floats(0), floats(0)
        self.changes = LogitChanges(num_lanes, max_length + 1, device)
        self._gates = {name: 1 + number for number, name in enumerate((None, *adapters))}
        self.gates_Z = torch.ones(num_lanes, dtype=torch.uint8, device=device) if adapters else None

    def admit(self, requests: Sequence[Request]) -> None:
        """Put requests on their lanes, of which it overwrites every field."""
        lanes_B = to_device([lane_of(request) for request in requests], self.device)
        width = max(request.num_known for request in requests)
        padded = [[*request.all_known_ids, *[0] * (width - request.num_known)] for request in requests]
        self.tokens_ZL[lanes_B, :width] = to_device(padded, self.device)
        set_lanes(
            lanes_B,
            (self.num_known_Z, [request.num_known for request in requests]),
            (self.num_computed_Z, [request.num_computed for request in requests]),
            (self.ends_Z, [request.max_length for request in requests]),
            (self.steps_Z, [request.num_steps for request in requests]),
            (self.samples_Z, [request.index for request in requests]),
            (self.seeds_Z, [request.params.seed for request in requests]),
            (self.temperature_Z, [request.params.temperature for request in requests]),
            (self.top_k_Z, [request.params.top_k for request in requests]),
            (self.top_p_Z, [max(request.params.top_p, MIN_TOP_P) for request in requests]),
            (self.min_p_Z, [request.params.min_p for request in requests]),
            (self.tau_Z, [request.params.tau for request in requests]),
        )
        if self.gates_Z is not None:
            set_lanes(lanes_B, (self.gates_Z, [self._gates[request.params.adapter] for request in requests]))
        self.changes.admit(requests)

    def lanes(self, draft_buffer_Z: Tensor | None = None, drafts_ZJ: Tensor | None = None) -> Lanes:
        """The tensors that planning and committing use, with a decoder's drafts."""
        return Lanes(
            num_known_Z=self.num_known_Z,
            num_computed_Z=self.num_computed_Z,
            ends_Z=self.ends_Z,
            tokens_ZL=self.tokens_ZL,
            draft_buffer_Z=draft_buffer_Z,
            drafts_ZJ=drafts_ZJ,
        )

    def noise(self, low: int, high: int) -> Noise:
        """Ids in [low, high) for rows without a token, by each lane's current sampling step."""
        return Noise(self.seeds_Z, self.samples_Z, self.steps_Z, low, high)

    def rewind(self, lane: int, num_computed: int = 0, num_known: int | None = None) -> None:
        """Set the KV pointer of a sequence that lost its pages, or got some back; tokens, drafts and random
        stream stay, or only the first `num_known` tokens."""
        # Not an assignment, which would wait for the device (`device.fill_lanes`).
        self.num_computed_Z[lane].fill_(num_computed)
        if num_known is not None:
            self.num_known_Z[lane].fill_(num_known)

    def probs(
        self, logits_XV: Tensor, lanes_B: Tensor, filters: bool, *, forbidden_id: int | None = None
    ) -> Probs:
        """The distribution of each row under its request's settings; each sequence has X / B consecutive
        rows. With a `forbidden_id`, also that at temperature 1 without filters (`own` of `row_probs`)."""
        return row_probs(
            logits_XV,
            *(self.temperature_Z, self.top_k_Z, self.top_p_Z, self.min_p_Z),
            filters=filters,
            lanes_B=lanes_B,
            forbidden_id=forbidden_id,
            own=forbidden_id is not None,
        )

    def uniforms(self, lanes_B: Tensor, num_draws: int, steps_B: Tensor | None = None) -> Tensor:
        """Random numbers [B, num_draws] (fp64) of each lane's current sampling step, or of `steps_B`."""
        by_lane = steps_B is None
        numbers = self.seeds_Z, self.samples_Z, self.steps_Z if steps_B is None else steps_B
        return uniforms(*numbers, num_draws, lanes_B=lanes_B, steps_by_lane=by_lane)

    def commit(
        self, lanes_B: Tensor, token_ids_BJ: Tensor, num_emitted_B: Tensor, num_computed_B: Tensor
    ) -> None:
        """Append each lane's emitted tokens, and advance its KV pointer and random stream."""
        commit(
            self.lanes(),
            self.steps_Z,
            lanes_B=lanes_B,
            token_ids_BA=token_ids_BJ,
            num_emitted_B=num_emitted_B,
            num_computed_B=num_computed_B,
        )
