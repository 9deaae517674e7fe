"""Masks of a pass whose sequences have grammars: logits of tokens that cannot follow become -inf.

Such a pass waits for the host, which reads drafts, follows them through the grammars, and sends bits; so it
runs outside of CUDA graphs and not ahead of earlier results. Temperature and filters come after the masks, so
that p is the AR law of the allowed tokens. q may be any distribution that is known when a draft is drawn; it
gets the mask of the drafts before it, because a draft outside of the grammar is always rejected.
Shapes: X wanted rows, Y rows with a mask, V vocabulary, C bytes of bits, B sequences.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from idlm.infer.state.batch import Batch, Schedule, to_device

if TYPE_CHECKING:
    from idlm.infer.structured.grammar import Grammar

WORD_BYTES = 4
"""llguidance writes whole words of bits."""


class PassGrammars:
    """The grammars of the sequences that a pass decodes, by place in the batch."""

    def __init__(self, grammars: Mapping[int, Grammar]) -> None:
        self._grammars = grammars

    @contextmanager
    def masked(
        self, logits_XV: Tensor, num_sequences: int, drafts: Sequence[Sequence[int]] | None
    ) -> Iterator[None]:
        """Within, logits of tokens that cannot follow are -inf: in the first of a sequence's X / B rows those
        of tokens that cannot follow its known ones, in the next row those that cannot follow the first of its
        `drafts`, and so on, up to a draft that does not fit. Afterwards the logits are what they were.
        """
        rows, branches = [], []
        width = len(logits_XV) // num_sequences
        for place, grammar in self._grammars.items():
            own = () if drafts is None else drafts[place]
            rows += [place * width + depth for depth in range(1 + len(own))]
            branches.append((grammar.branch(), own))
        bits_YC = _bits(branches, logits_XV)
        rows_Y = to_device(rows, logits_XV.device)
        with torch.inference_mode():
            before_YV = logits_XV[rows_Y]
            logits_XV[rows_Y] = _forbid(before_YV, bits_YC)
        try:
            yield
        finally:
            with torch.inference_mode():
                logits_XV[rows_Y] = before_YV

    def after(self, emitted: Sequence[Sequence[int]]) -> Branches:
        """The grammars after the tokens that each sequence of the batch emits in this pass."""
        found = {place: grammar.branch() for place, grammar in self._grammars.items()}
        return Branches(found).pushed({place: emitted[place] for place in found})


class Branches:
    """Grammars that follow tokens before they are known to be part of an answer, by place in the batch."""

    def __init__(self, grammars: Mapping[int, Grammar]) -> None:
        self._grammars = grammars

    @property
    def places(self) -> list[int]:
        """The places of its sequences."""
        return list(self._grammars)

    def among(self, places: Sequence[int]) -> Branches:
        """Those of these sequences."""
        return Branches({place: grammar for place, grammar in self._grammars.items() if place in places})

    def pushed(self, token_ids: Mapping[int, Sequence[int]]) -> Branches:
        """Those that can go on after further tokens."""
        going = {
            place: grammar
            for place, grammar in self._grammars.items()
            if grammar.push(token_ids[place]) and not grammar.is_finished
        }
        return Branches(going)

    def forbid(self, logits_YV: Tensor) -> Tensor:
        """The logits, a row for each sequence, with -inf for tokens that cannot follow."""
        return _forbid(logits_YV, _bits([(one, ()) for one in self._grammars.values()], logits_YV))


def masked(
    grammars: PassGrammars | None,
    logits_XV: Tensor,
    num_sequences: int,
    drafts: Sequence[Sequence[int]] | None = None,
) -> AbstractContextManager[None]:
    """See `PassGrammars.masked`; None changes nothing."""
    return nullcontext() if grammars is None else grammars.masked(logits_XV, num_sequences, drafts)


def with_grammars(batch: Batch, schedule: Schedule) -> Batch:
    """The batch of a schedule with the grammars of its requests, if they have any."""
    grammars = schedule.grammars
    return replace(batch, grammars=PassGrammars(grammars)) if grammars else batch


@functools.cache
def _executor() -> Any:
    """Threads that compute bits; the interpreter's lock is free meanwhile."""
    return importlib.import_module("llguidance").LLExecutor()


def _bits(branches: Sequence[tuple[Grammar, Sequence[int]]], logits_XV: Tensor) -> Tensor:
    """The tokens that may follow each grammar, and then each of its drafts, uint8 [Y, C] on the logits'
    device, the bit of the lowest id first. All bits are set after a draft that does not fit, after the end of
    an answer, and where nothing can follow.
    """
    num_words = -(-logits_XV.shape[1] // (8 * WORD_BYTES))
    bits_YC = torch.full(
        (sum(1 + len(drafts) for _, drafts in branches), num_words * WORD_BYTES), 255, dtype=torch.uint8
    )
    alone, drafting, row = [], [], 0
    for grammar, drafts in branches:
        if drafts:
            drafting.append((grammar.matcher, row, list(drafts)))
        else:
            alone.append((grammar.matcher, row))
        row += 1 + len(drafts)
    place = (bits_YC.data_ptr(), num_words * WORD_BYTES, len(bits_YC))
    if alone:
        _executor().unsafe_compute_mask_ptr(alone, *place)
    if drafting:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafting, *place)
    bits_YC[(bits_YC == 0).all(1)] = 255
    if logits_XV.is_cuda:
        bits_YC = bits_YC.pin_memory()
    return bits_YC.to(logits_XV.device, non_blocking=True)


def _forbid(logits_YV: Tensor, bits_YC: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits_YC.device)
    allowed_YV = ((bits_YC[:, :, None] >> shifts) & 1).flatten(1)[:, : logits_YV.shape[1]]
    return logits_YV.masked_fill(allowed_YV == 0, -torch.inf)
