"""Grammars that follow sequences as the device decodes them, and the choice of drafts that fit.

A draft that fits is the first of several independent draws from q that the grammar allows: its law is q
conditioned on the allowed tokens, because which tokens those are depends on earlier tokens alone. If no draw
fits, it is the allowed token with the highest id, which is certain then: whether the draws fit says nothing
about the tokens to come, so that either way the draft's law is known and the test of drafts stays exact. The
tokens of a BPE vocabulary with high ids are long, so that it is mostly the usual spelling of a text that the
grammar prescribes.
Shapes: J drafts, C candidates, b followers, W words of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from idlm.infer.structured.grammar import WORD_BITS, Grammar, compute_bits


class Follower:
    """The grammar of one sequence after the tokens that the device has emitted and the host has read, which
    may be more than the answer has (`committed`).

    `drafts`: those that the next pass tests, as far as they fit. `only`: of each the token itself if it was
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
        """Wait for what the last pass told and follow its tokens. The candidates for the next drafts, an array
        [J, C], if the first ones do not fit, else None: then they are the drafts.
        """
        if self.told is None:
            return None
        (told, place), self.told = self.told, None
        self.drafts, self.only = [], []
        if self.is_over:
            return None
        emitted = told.emitted(place)
        num_taken = self.ahead.matcher.try_consume_tokens(emitted)
        self._token_ids += emitted[:num_taken]
        self.is_over = num_taken < len(emitted) or self.ahead.is_finished
        candidates = told.candidates(place)
        firsts = candidates[:, 0].tolist()
        if self.is_over or self.ahead.matcher.validate_tokens(firsts) < len(firsts):
            return None if self.is_over else candidates
        self.drafts, self.only = firsts, [-1] * len(firsts)
        return None

    def add_draft(self, token_id: int, only: int, firsts: list[int]) -> bool:
        """Take a draft, and then of these candidates as many as fit; whether another draft has to be found
        after them. The grammar goes on after the drafts until `go_back`.
        """
        matcher = self.ahead.matcher
        matcher.consume_token(token_id)
        taken = firsts[: matcher.try_consume_tokens(firsts)]
        self.drafts += [token_id, *taken]
        self.only += [only, *[-1] * len(taken)]
        return len(taken) < len(firsts) and not self.ahead.is_finished

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
    """Choose the drafts of followers among candidates [J, C], up to one after which nothing can follow."""
    open_ = choices
    while open_:
        num_words = -(-open_[0][0].ahead.vocab_size // WORD_BITS)
        bits_bW = torch.zeros(len(open_), num_words, dtype=torch.int32)
        compute_bits([(follower.ahead, (), b) for b, (follower, _) in enumerate(open_)], bits_bW)
        found_b = _first_that_fits(
            bits_bW.numpy(), np.stack([candidates[len(one.drafts)] for one, candidates in open_])
        )
        open_ = [
            (follower, candidates)
            for (follower, candidates), (token_id, only) in zip(open_, found_b, strict=True)
            if token_id >= 0
            and follower.add_draft(token_id, only, candidates[len(follower.drafts) + 1 :, 0].tolist())
        ]
    for follower, _ in choices:
        follower.go_back()


def _first_that_fits(bits_bW: Any, ids_bC: Any) -> list[tuple[int, int]]:
    """The first candidate of each follower whose bit is set, and -1; else the highest token whose bit is set,
    twice; -1 if there is none.
    """
    rows_b = np.arange(len(ids_bC))
    words_bC = bits_bW[rows_b[:, None], ids_bC // WORD_BITS].view(np.uint32)
    fits_bC = (words_bC >> (ids_bC % WORD_BITS).astype(np.uint32)) & 1
    firsts_b, has_b = ids_bC[rows_b, fits_bC.argmax(1)].tolist(), fits_bC.any(1).tolist()
    return [
        (first, -1) if has else (_highest(bits_bW[b]),) * 2
        for b, (first, has) in enumerate(zip(firsts_b, has_b, strict=True))
    ]


def _highest(bits_W: Any) -> int:
    words = np.flatnonzero(bits_W)
    if not len(words):
        return -1
    return int(words[-1]) * WORD_BITS + (int(bits_W[words[-1]]) & 0xFFFFFFFF).bit_length() - 1
