"""Masks of a pass whose sequences have grammars: logits of tokens that cannot follow become -inf.

A forward pass needs tokens and drafts, which the device has, and no mask, so it runs while the host follows
what the pass before emitted and computes bits (`PassGrammars.begin`, in a thread). What follows hidden states
waits for the bits and runs outside of CUDA graphs. Temperature and filters come after the masks, so that p is
the AR law of the allowed tokens. q gets the mask of the drafts before it, because a draft outside of the
grammar is always rejected: a pass draws several candidates for each of the next drafts at once, and the host
takes the first that fits (`draft_choice.py`). That is a draw from q without the tokens that do not fit,
whose probabilities the next pass tests.
Shapes: X wanted rows, Y rows that get masks, V vocabulary, W words of bits, B sequences, M sequences with a
grammar, A tokens that a pass can emit, D drafts that it tests, J drafts, C candidates.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from idlm.infer.state.batch import Batch, Schedule, lane_of, to_device
from idlm.infer.structured.draft_choice import Follower, Told, choose_drafts
from idlm.infer.structured.grammar import WORD_BITS, Grammar, compute_bits
from idlm.kernels.sampling import Drafts, allowed_logits, restrict

SLOW_BITS = 0.05
"""Seconds for the bits of a pass, beyond which the next pass finds out whose grammar is slow."""


class PassGrammars:
    """The grammars of the sequences that a pass decodes: their followers by place in the batch, and their
    lanes. `has_greedy`: one of them takes the likeliest tokens.
    """

    def __init__(self, followers: Mapping[int, Follower], lanes: Sequence[int], *, has_greedy: bool) -> None:
        self._followers, self._lanes, self.has_greedy = followers, lanes, has_greedy
        self._begun: Future[Tensor] | None = None
        self._num_drafts = 0

    def choose_drafts(self) -> list[list[int]]:
        """Wait for what earlier passes told, follow it, and choose the drafts that this pass tests. Returns
        lane, place and token of each draft of sequences whose drafts are not all first candidates.
        """
        lanes = zip(self._lanes, self._followers.values(), strict=True)
        open_ = [(lane, each, found) for lane, each in lanes if (found := each.catch_up()) is not None]
        choose_drafts([(follower, candidates) for _, follower, candidates in open_])
        return [
            [lane, place, token_id]
            for lane, follower, _ in open_
            for place, token_id in enumerate(follower.drafts)
        ]

    def begin(self, num_drafts: int, device: torch.device) -> None:
        """Begin to compute the bits of a pass that tests so many drafts of a sequence at most; after
        `choose_drafts`.
        """
        self._num_drafts = num_drafts
        self._begun = _thread().submit(self._bits, 1 + num_drafts, device)

    def _bits(self, num_rows: int, device: torch.device) -> Tensor:
        """The tokens that may follow each sequence, and then each of its drafts, int32 [M, A, W] in memory of
        the host. All bits are set after the last draft that fits, after the end of an answer, and where
        nothing can follow.
        """
        followers = list(self._followers.values())
        for each in followers:
            if each.committed.is_suspect:
                each.committed.charge(each.ahead.mask_seconds())
        start = time.perf_counter()
        shape = len(followers), num_rows, -(-followers[0].ahead.vocab_size // WORD_BITS)
        bits_MAW = torch.full(shape, -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        compute_bits(
            [(each.ahead, each.drafts[: num_rows - 1], m * num_rows) for m, each in enumerate(followers)
             if not each.is_over],
            bits_MAW.view(-1, shape[2]),
        )  # fmt: skip
        bits_MAW[(bits_MAW == 0).all(2)] = -1
        for each in followers:
            each.repair()
        if time.perf_counter() - start > SLOW_BITS:
            for each in followers:
                each.committed.is_suspect = True
        return bits_MAW

    def allowed(self, logits_XV: Tensor, num_sequences: int, store: Drafts | None = None) -> Tensor:
        """The logits [B * A, V] of the first A of each sequence's X / B rows, in which those of tokens that
        cannot follow are -inf. In `store` the drafts that the pass tests lose the same tokens.
        """
        assert self._begun is not None
        bits_MAW, num_drafts = self._begun.result(), self._num_drafts
        num_rows, width, device = 1 + num_drafts, len(logits_XV) // num_sequences, logits_XV.device
        order = {place: m for m, place in enumerate(self._followers)}
        each_row = range(num_rows)
        rows = [b * width + min(depth, width - 1) for b in range(num_sequences) for depth in each_row]
        masks = [
            order[b] * num_rows + depth if b in order else -1
            for b in range(num_sequences)
            for depth in each_row
        ]
        only = [
            [*each.only[:num_drafts], *[-1] * (num_drafts - len(each.only))]
            for each in self._followers.values()
        ]
        numbers = to_device([*rows, *masks, *self._lanes, *(one for own in only for one in own)], device)
        rows_Y, masks_Y, lanes_M, only_Q = numbers.split(
            [len(rows), len(masks), len(only), len(only) * num_drafts]
        )
        bits_MAW = _beside(bits_MAW, device)
        if store is not None and num_drafts:
            restrict(store, lanes_M, bits_MAW, only_Q.view(-1, num_drafts))
        return allowed_logits(logits_XV, rows_Y, bits_MAW.flatten(0, 1), masks_Y)

    def tell(self, num_emitted_B: Tensor, token_ids_BA: Tensor, candidates_BJC: Tensor | None = None) -> None:
        """Begin to tell the host what the pass emits, and the candidates for the next drafts (-1: there is no
        such draft).
        """
        columns, num_drafts = [num_emitted_B[:, None], token_ids_BA], 0
        if candidates_BJC is not None:
            num_drafts = candidates_BJC.shape[1]
            # First candidates first: mostly nothing else is read.
            columns.append(candidates_BJC.transpose(1, 2).flatten(1))
        told = Told(torch.cat(columns, dim=1), token_ids_BA.shape[1], num_drafts)
        for place, follower in self._followers.items():
            follower.told = told, place


def with_grammars(batch: Batch, schedule: Schedule) -> Batch:
    """The batch of a schedule with the grammars of its requests, if they have any."""
    if not schedule.grammars:
        return batch
    requests = [schedule.requests[place] for place in schedule.grammars]
    grammars = PassGrammars(
        {place: follower_of(grammar) for place, grammar in schedule.grammars.items()},
        [lane_of(request) for request in requests],
        has_greedy=any(request.params.temperature == 0 for request in requests),
    )
    return replace(batch, grammars=grammars)


def follower_of(grammar: Grammar) -> Follower:
    """The follower of a grammar, which begins where the answer is when a sequence gets its lane."""
    if grammar.follower is None:
        grammar.follower = Follower(grammar)
    found: Follower = grammar.follower
    return found


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """It computes bits while the pass is launched."""
    return ThreadPoolExecutor(1, thread_name_prefix="grammars")


def _beside(values: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, which does not wait for what runs there; values of a GPU are pinned."""
    if device.type != "cuda":
        return values.to(device)
    here, stream = torch.cuda.current_stream(device), _copies(device)
    with torch.cuda.stream(stream):
        copied = values.to(device, non_blocking=True)
    here.wait_stream(stream)
    copied.record_stream(here)
    return copied


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
