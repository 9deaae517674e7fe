"""Rows of lanes with all kinds of changes, over passes that emit tokens, against the definition.

Z lanes, L columns of the token table, X rows, V vocabulary, N drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.infer.request import Request
from idlm.infer.state.sequence_state import LogitChanges
from idlm.kernels.logit_changes import ABSENT, ChangedRows, KnownTokens
from tests.kernels.cases.sampling import poisoned
from tests.kernels.references.logit_changes import Settings, changed_reference

LANES, MAX_LENGTH, VOCAB = 5, 400, 61
SLACK = {torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Two roundings to the dtype, of sums up to ten."""


class Passes:
    """Lanes that get new tokens, or new requests, between checks of the rows of a pass. `has_holes`: drafts
    are positions of a block, some of them absent, and one is not before its own row."""

    def __init__(self, seed: int, device: str, *, num_drafts: int, has_holes: bool) -> None:
        self.draw, self.device = random.Random(seed), torch.device(device)
        self.num_drafts, self.has_holes = num_drafts, has_holes
        self.changes = LogitChanges(LANES + 1, MAX_LENGTH + 1, self.device)
        self.requests = [self._request(lane) for lane in range(LANES)]
        self.changes.admit(self.requests)

    def _request(self, lane: int) -> Request:
        draw = self.draw
        # Few different tokens, so that they repeat.
        kinds = draw.sample(range(VOCAB), draw.choice([3, 40]))
        return Request(
            request_id="r",
            index=0,
            lane=lane,
            prompt_ids=draw.choices(kinds, k=draw.choice([1, 3, 20, 280])),
            token_ids=draw.choices(kinds, k=draw.choice([0, 5])),
            params=self._params(),
            stop_ids=frozenset(draw.sample(range(VOCAB), 2)),
            max_length=MAX_LENGTH,
        )

    def _params(self) -> SamplingParams:
        """Some of the changes, rarely none."""
        draw = self.draw
        biased = draw.sample(range(VOCAB), draw.choice([1, 4, VOCAB]))
        some = {
            "presence_penalty": draw.choice([1.5, -2.0, 0.25]),
            "frequency_penalty": draw.choice([0.5, -0.5, 2.0]),
            "repetition_penalty": draw.choice([1.3, 0.7]),
            "logit_bias": {token: draw.uniform(-5, 5) for token in biased},
            "no_repeat_ngram_size": 0 if self.has_holes else draw.choice([1, 2, 3]),
            "min_tokens": draw.choice([3, 12, 40]),
        }
        kept = {name: value for name, value in some.items() if draw.random() < 0.6}
        return SamplingParams(max_tokens=100, **kept)

    def emit(self) -> None:
        """Add tokens to every answer, as many as a pass emits at most."""
        draw = self.draw
        for request in self.requests:
            known, count = request.all_known_ids, draw.randrange(self.num_drafts + 2)
            request.token_ids += draw.choices([*known, draw.randrange(VOCAB)], k=count)
            request.num_known += count

    def admit(self) -> None:
        """Put a new request on one lane."""
        lane = self.draw.randrange(LANES)
        self.requests[lane] = self._request(lane)
        self.changes.admit([self.requests[lane]])

    def known(self, drafts: Sequence[Sequence[int]]) -> KnownTokens:
        tokens_ZL = torch.zeros(LANES + 1, MAX_LENGTH + 1, dtype=torch.int64)
        for lane, request in enumerate(self.requests):
            tokens_ZL[lane, : request.num_known] = torch.tensor(request.all_known_ids)
        num_known_Z = torch.tensor([*(request.num_known for request in self.requests), 0], device=self.device)
        return KnownTokens(num_known_Z, tokens_ZL.to(self.device), torch.tensor(drafts, device=self.device))

    def check(self) -> None:
        """Rows in any order, of all numbers of drafts, in poisoned memory, with a lane of padding."""
        draw, num_drafts, device = self.draw, self.num_drafts, self.device
        near = [[*request.all_known_ids[-4:], draw.randrange(VOCAB)] for request in self.requests] + [[0]]
        drafts = [draw.choices(tokens, k=num_drafts) for tokens in near]
        if self.has_holes:
            drafts = [[draw.choice([one, ABSENT]) for one in row] for row in drafts]
        rows = [(lane, count) for lane in range(LANES) for count in range(-1, num_drafts + 1)]
        rows = [*draw.sample(rows, len(rows)), (LANES, 0)]
        own = [draw.randrange(num_drafts) if self.has_holes else ABSENT for _ in rows]
        known = self.known(drafts)
        ends = [int(known.num_known_Z[lane]) + count for lane, count in rows]
        positions = [end + draw.choice([0, 0, 1, 30]) for end in ends]
        logits_XV = 4 * torch.randn(len(rows), VOCAB, generator=torch.manual_seed(draw.randrange(1 << 30)))
        logits_XV = logits_XV.to(draw.choice(list(SLACK)))
        fed_XV = poisoned(logits_XV.to(device), padding_rows=1)
        numbers = [*zip(*rows, strict=True), positions, own]
        lanes_X, num_drafts_X, positions_X, own_X = torch.tensor(numbers, device=device)
        changed = ChangedRows(lanes_X, num_drafts_X, positions_X, own_X if self.has_holes else None)
        lanes_B = torch.tensor([*draw.sample(range(LANES), LANES), LANES, LANES], device=device)
        self.changes.apply(fed_XV[: len(rows)], known, changed, lanes_B)
        for x, (lane, count) in enumerate(rows):
            before = [one for at, one in enumerate(drafts[lane][: max(count, 0)]) if at != own[x]]
            before = [one for one in before if one != ABSENT]
            expected_V = logits_XV[x]
            if lane < LANES and count >= 0:
                expected_V = _expected(logits_XV[x], self.requests[lane], before, positions[x])
            slack = SLACK[logits_XV.dtype]
            torch.testing.assert_close(fed_XV[x].cpu(), expected_V, rtol=slack, atol=slack)


def _expected(logits_V: Tensor, request: Request, before: list[int], position: int) -> Tensor:
    params, num_prompt = request.params, len(request.prompt_ids)
    settings = Settings(
        num_prompt=num_prompt,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        ngram=params.no_repeat_ngram_size,
        free_from=num_prompt + params.min_tokens,
        biases=params.logit_bias,
        stops=request.stop_ids if params.min_tokens else frozenset(),
    )

    def rounded(numbers: list[float]) -> list[float]:
        found: list[float] = torch.tensor(numbers, dtype=logits_V.dtype).tolist()
        return found

    known = request.all_known_ids
    options: dict[str, Any] = {"rounded": rounded, "lowest": torch.finfo(logits_V.dtype).min}
    row = changed_reference(logits_V.tolist(), settings, known, before, position, **options)
    return torch.tensor(row, dtype=logits_V.dtype)


def check_passes(seed: int, device: str, *, num_drafts: int, has_holes: bool = False) -> None:
    """Three passes, between which tokens are emitted."""
    passes = Passes(seed, device, num_drafts=num_drafts, has_holes=has_holes)
    for _ in range(3):
        passes.check()
        passes.emit()
        passes.admit()
