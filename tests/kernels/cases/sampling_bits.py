"""Masks of tokens over rows of logits and stored drafts, checked against the definition on any device.

X, Y rows, V vocabulary, W words of bits, Z lanes, J drafts, M sequences with masks, A rows of each."""

from __future__ import annotations

import random

import torch

from idlm.kernels.sampling import Tuning, allowed_logits, draft_probs, put, restrict, row_probs
from tests.kernels.cases.sampling import SLACK, make_case, poisoned
from tests.kernels.cases.sampling_steps import stored_probs
from tests.kernels.references.sampling import restricted_reference


def _bits(draw: random.Random, num_masks: int, num_tokens: int) -> tuple[list[set[int]], torch.Tensor]:
    """Sets of tokens, some of them all, one or none, and their words, with bits beyond the vocabulary."""
    every = range(num_tokens)
    kinds = [draw.choice(["some", "some", "all", "one", "none"]) for _ in range(num_masks)]
    open_ = [
        {t for t in every if draw.random() < 0.4} if kind == "some"
        else set(every) if kind == "all" else {draw.randrange(num_tokens)} if kind == "one" else set()
        for kind in kinds
    ]  # fmt: skip
    words = torch.zeros(num_masks, -(-num_tokens // 32), dtype=torch.int64)
    for number, tokens in enumerate(open_):
        for token in tokens:
            words[number, token // 32] |= 1 << token % 32
    if num_tokens % 32:
        words[:, -1] |= 1 << 31
    return open_, (words - (words >> 31 << 32)).to(torch.int32)


def check_allowed(draw: random.Random, num_tokens: int, *, device: str = "cpu") -> None:
    """Rows in any order, some of them without a mask, within poisoned memory."""
    case = make_case(draw, 5, num_tokens, device=device)
    open_, bits_MW = _bits(draw, 3, num_tokens)
    rows = [draw.randrange(5) for _ in range(7)]
    masks = [draw.choice([-1, 0, 1, 2]) for _ in rows]
    rows_Y, masks_Y = torch.tensor([rows, masks], device=device)
    fed_XV = poisoned(case.logits_XV, padding_rows=1)
    found_YV = allowed_logits(fed_XV, rows_Y, bits_MW.to(device), masks_Y)
    for found_V, row, mask in zip(found_YV, rows, masks, strict=True):
        expected_V = case.logits_XV[row].clone()
        if mask >= 0:
            closed = [token for token in range(num_tokens) if token not in open_[mask]]
            expected_V[closed] = -torch.inf
        assert torch.equal(found_V, expected_V)


def check_restrict(
    draw: random.Random, num_tokens: int, *, device: str = "cpu", tuning: Tuning, num_drafts: int = 3
) -> None:
    """Of three lanes two lose tokens in all but the last stored draft; twice, which changes nothing more."""
    num_lanes, num_tested = 3, max(1, num_drafts - 1)
    case = make_case(draw, num_lanes * num_drafts, num_tokens, device=device)
    store = draft_probs(
        num_lanes, num_drafts, num_tokens, dtype=torch.float32, device=torch.device(device), tuning=tuning
    )
    probs = row_probs(case.logits_XV.float(), *case.settings, filters=True, tuning=tuning)
    rows_BJ = torch.arange(num_lanes * num_drafts, device=device).view(num_lanes, num_drafts)
    every_B = torch.arange(num_lanes, device=device)
    put(store, every_B, probs, rows_BJ, active_B=every_B >= 0)
    expected_ZJV = stored_probs(store, tuning)
    lanes, num_rows = [2, 0], num_tested + 1
    open_, bits = _bits(draw, len(lanes) * num_rows, num_tokens)
    only = [[draw.choice([-1, -1, draw.randrange(num_tokens)]) for _ in range(num_tested)] for _ in lanes]
    for m, lane in enumerate(lanes):
        for index in range(num_tested):
            allowed = open_[m * num_rows + index]
            q = restricted_reference(expected_ZJV[lane, index].tolist(), allowed, only[m][index])
            expected_ZJV[lane, index] = torch.tensor(q, dtype=torch.float64)
    for _ in range(2):
        restrict(
            store,
            torch.tensor(lanes, device=device),
            bits.view(len(lanes), num_rows, -1).to(device),
            torch.tensor(only, device=device),
            tuning=tuning,
        )
        found_ZJV = stored_probs(store, tuning)
        # A weight below 2^-126 of the largest one is lost, whatever is left beside it.
        assert float((found_ZJV - expected_ZJV).abs().max()) <= SLACK
