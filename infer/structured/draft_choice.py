"""Grammars that follow sequences as the device decodes them, and the choice of drafts that fit.

A token that the grammar forces is a draft without a draw: nothing else may follow, so the test accepts it.
Elsewhere a draft that fits is the first of several independent draws from q that the grammar allows: its law
is q conditioned on the allowed tokens, because which tokens those are depends on earlier tokens alone. If no
draw fits, it is the allowed token with the highest id, which is certain then: whether the draws fit says
nothing about the tokens to come, so that either way the draft's law is known and the test of drafts stays
exact. The tokens of a BPE vocabulary with high ids are long, so that it is mostly the usual spelling of a
text that the grammar prescribes.

The device waits for this choice. A mask takes tens of microseconds, hundreds within a text, and a question
about one token or about a forced text one to three: masks answer only what is left.
Shapes: J drafts, C candidates, b followers, W words of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from idlm.infer.state.batch import to_host
from idlm.infer.structured.grammar import WORD_BITS, Grammar, compute_bits

NUM_ASKED = 4
"""First candidates for a draft that are asked about one by one."""


class Told:
    """What a pass tells of the sequences of its batch: numbers of emitted tokens, the tokens, the first
    candidates for the next drafts, all second ones, and so on (-1: there is no such draft). Copied in the
    order of the stream; who reads it waits for nothing later.
    """

    def __init__(self, values: Tensor, num_tokens: int, num_drafts: int) -> None:
        self._num_tokens, self._num_drafts = num_tokens, num_drafts
        self._values, self._event = to_host(values), None
        if values.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    @cached_property
    def _array(self) -> Any:
        if self._event is not None:
            self._event.synchronize()
        return self._values.numpy()

    @cached_property
    def _heads(self) -> list[list[int]]:
        found: list[list[int]] = self._array[:, : 1 + self._num_tokens + self._num_drafts].tolist()
        return found

    def read(self, place: int) -> tuple[list[int], list[int]]:
        """The tokens that the sequence at this place has emitted, and the first candidates."""
        num_emitted, *numbers = self._heads[place]
        firsts = numbers[self._num_tokens :]
        return numbers[:num_emitted], firsts[: firsts.index(-1)] if -1 in firsts else firsts

    def candidates(self, place: int) -> Any:
        """All candidates for its next drafts, an array [C, J]."""
        return self._array[place, 1 + self._num_tokens :].reshape(-1, self._num_drafts)


class Follower:
    """The grammar of one sequence after the tokens that the device has emitted and the host has read, which
    may be more than the answer has (`committed`).

    `drafts`: those that the next pass tests, all of which fit. `only`: of each the token itself if it was
    certain, else -1. `told`: what the last pass tells, and the place in its batch. `is_over`: nothing can
    follow.
    """

    def __init__(self, committed: Grammar) -> None:
        self.committed, self.ahead, self._root = committed, committed.branch(), committed.branch()
        self._token_ids: list[int] = []
        self.drafts: list[int] = []
        self.only: list[int] = []
        self.told: tuple[Any, int] | None = None
        self.is_over = False

    def catch_up(self) -> Any:
        """Wait for what the last pass told and follow its tokens. The candidates for the next drafts, an
        array [C, J], if the first ones do not fit, else None: then they are the drafts.
        """
        if self.told is None:
            return None
        (told, place), self.told = self.told, None
        self.drafts, self.only = [], []
        if self.is_over:
            return None
        emitted, firsts = told.read(place)
        num_taken = self.ahead.matcher.try_consume_tokens(emitted)
        self._token_ids += emitted[:num_taken]
        self.is_over = num_taken < len(emitted) or self.ahead.is_finished
        if self.is_over or not firsts:
            return None
        if self.ahead.matcher.validate_tokens(firsts) < len(firsts):
            return told.candidates(place)[:, : len(firsts)]
        self.drafts, self.only = firsts, [-1] * len(firsts)
        return None

    def take(self, token_ids: list[int], *, is_certain: bool = False) -> int:
        """Take as many drafts as fit, and return their number. The grammar goes on after them until
        `go_back`.
        """
        num_taken: int = self.ahead.matcher.try_consume_tokens(token_ids)
        taken = token_ids[:num_taken]
        self.drafts += taken
        self.only += taken if is_certain else [-1] * num_taken
        return num_taken

    def extend(self, candidates: Any) -> bool:
        """Take drafts: candidates [C, J], and what the grammar forces. Returns whether only a mask says what
        fits next.
        """
        firsts = candidates[0].tolist()
        while True:
            self.take(firsts[len(self.drafts) :])
            num_left = len(firsts) - len(self.drafts)
            if not num_left or self.ahead.is_finished:
                return False
            forced = self.ahead.matcher.compute_ff_tokens()[:num_left]
            others = candidates[1:NUM_ASKED, -num_left].tolist()
            if not self.take(forced, is_certain=True) and not any(self.take([one]) for one in others):
                return True

    def go_back(self) -> None:
        """Return to the state before the drafts."""
        self.ahead.matcher.rollback(len(self.drafts))
        self.repair()

    def repair(self) -> None:
        """Start again after drafts that led to an error: a matcher never leaves one."""
        if self.ahead.matcher.is_error():
            self.ahead = self._root.branch()
            self.ahead.push(self._token_ids)


def choose_drafts(choices: Sequence[tuple[Follower, Any]]) -> None:
    """Choose the drafts of followers among candidates [C, J], up to one after which nothing can follow."""
    open_ = [choice for choice in choices if choice[0].extend(choice[1])]
    while open_:
        num_words = -(-open_[0][0].ahead.vocab_size // WORD_BITS)
        bits_bW = torch.zeros(len(open_), num_words, dtype=torch.int32)
        compute_bits([(follower.ahead, (), b) for b, (follower, _) in enumerate(open_)], bits_bW)
        ids_bC = np.stack([candidates[:, len(follower.drafts)] for follower, candidates in open_])
        found_b = _first_that_fits(bits_bW.numpy(), ids_bC)
        open_ = [
            (follower, candidates)
            for (follower, candidates), (token_id, is_certain) in zip(open_, found_b, strict=True)
            if token_id >= 0
            and follower.take([token_id], is_certain=is_certain)
            and follower.extend(candidates)
        ]
    for follower, _ in choices:
        follower.go_back()


def _first_that_fits(bits_bW: Any, ids_bC: Any) -> list[tuple[int, bool]]:
    """The first candidate of each follower whose bit is set, and False; else the highest token whose bit is
    set, and True; -1 if there is none.
    """
    rows_b = np.arange(len(ids_bC))
    words_bC = bits_bW[rows_b[:, None], ids_bC // WORD_BITS].view(np.uint32)
    fits_bC = (words_bC >> (ids_bC % WORD_BITS).astype(np.uint32)) & 1
    firsts_b, has_b = ids_bC[rows_b, fits_bC.argmax(1)].tolist(), fits_bC.any(1).tolist()
    last_b = bits_bW.shape[1] - 1 - (bits_bW[:, ::-1] != 0).argmax(1)
    words_b = bits_bW[rows_b, last_b].view(np.uint32).tolist()
    # Without a bit in its last word a row has none: the argmax of nothing is the last word.
    highest_b = [
        int(last) * WORD_BITS + word.bit_length() - 1 if word else -1
        for last, word in zip(last_b, words_b, strict=True)
    ]
    found = zip(has_b, firsts_b, highest_b, strict=True)
    return [(first, False) if has else (highest, True) for has, first, highest in found]
