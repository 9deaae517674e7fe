"""State of the running sequences as tensors on the device, which every decoder reads and commits to.

A lane is the index of one running sequence in all of these tensors, so that plans, sampling and commits are
tensor operations over the batch and can run inside a captured graph. Decoders have further tensors of their
own, indexed by the same lanes.
Shapes: Z lanes, L tokens of the longest sequence, B sequences of this pass, J tokens a pass can emit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from idlm.infer.request import Request
from idlm.infer.state.batch import lane_of, set_lanes, to_device
from idlm.infer.state.logit_changes import LogitChanges
from idlm.kernels.sampling import Probs, row_probs, uniforms
from idlm.kernels.step_rows import Lanes, Noise, commit

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
