"""Masks of a pass whose sequences have grammars: logits of tokens that cannot follow become -inf.

The host reads the drafts that such a pass tests, follows them through the grammars and sends bits, all in a
thread beside the forward pass (`PassGrammars.begin`). What follows hidden states waits for the host and runs
outside of CUDA graphs, and no such pass runs ahead of earlier results. Temperature and filters come after the
masks, so that p is the AR law of the allowed tokens. q may be any distribution that is known when a draft is
drawn; it gets the mask of the drafts before it, because a draft outside of the grammar is always rejected.
Shapes: X wanted rows, Y rows with a mask, V vocabulary, C bytes of bits, B sequences.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from idlm.infer.state.batch import Batch, Schedule, to_device, to_host

if TYPE_CHECKING:
    from idlm.infer.structured.grammar import Grammar

WORD_BYTES = 4
"""llguidance writes whole words of bits."""
SLOW_BITS = 0.05
"""Seconds for the bits of a pass, beyond which the next pass finds out whose grammar is slow."""


class PassGrammars:
    """The grammars of the sequences that a pass decodes, by place in the batch."""

    def __init__(self, grammars: Mapping[int, Grammar]) -> None:
        self._grammars = grammars
        self._branches: dict[int, Grammar] = {}
        self._begun: Future[tuple[list[tuple[int, int]], Tensor]] | None = None

    def begin(self, drafts_BD: Tensor | None, device: torch.device) -> None:
        """Begin to compute bits, before the pass is launched. `drafts_BD`: numbers of drafts, and the drafts,
        that the pass tests, int64, on the device; None: it tests none.
        """
        told = None if drafts_BD is None else ToHost(drafts_BD)
        self._begun = _thread().submit(self._follow, told, device)

    def _follow(self, told: ToHost | None, device: torch.device) -> tuple[list[tuple[int, int]], Tensor]:
        """Place and depth of each row with a mask, and the bits of these rows."""
        drafts = None if told is None else [row[1 : 1 + row[0]] for row in told.read()]
        self._branches = {place: grammar.branch() for place, grammar in self._grammars.items()}
        pairs = [(branch, drafts[place] if drafts else ()) for place, branch in self._branches.items()]
        depths = [(b, depth) for b, (_, own) in zip(self._branches, pairs) for depth in range(1 + len(own))]
        for place, branch in self._branches.items():
            if self._grammars[place].is_suspect:
                self._grammars[place].charge(branch.mask_seconds())
        start = time.perf_counter()
        bits_YC = _bits(pairs, device)
        if time.perf_counter() - start > SLOW_BITS:
            for grammar in self._grammars.values():
                grammar.is_suspect = True
        return depths, bits_YC

    @contextmanager
    def masked(self, logits_XV: Tensor, num_sequences: int) -> Iterator[None]:
        """Within, logits of tokens that cannot follow are -inf: in the first of a sequence's X / B rows those
        of tokens that cannot follow its known ones, in the next row those that cannot follow the first of its
        drafts (`begin`), and so on, up to a draft that does not fit. Afterwards the logits are what they
        were.
        """
        assert self._begun is not None
        depths, bits_YC = self._begun.result()
        width = len(logits_XV) // num_sequences
        rows_Y = to_device([place * width + depth for place, depth in depths], logits_XV.device)
        with torch.inference_mode():
            before_YV = logits_XV[rows_Y]
            logits_XV[rows_Y] = _forbid(before_YV, bits_YC)
        try:
            yield
        finally:
            with torch.inference_mode():
                logits_XV[rows_Y] = before_YV

    def after(self, emitted: Sequence[Sequence[int]]) -> Branches:
        """The grammars after the tokens that each sequence of the batch emits in this pass; once."""
        assert self._begun is not None
        self._begun.result()
        return Branches(self._branches).pushed(dict(enumerate(emitted)))


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
        branches = [(one, ()) for one in self._grammars.values()]
        return _forbid(logits_YV, _bits(branches, logits_YV.device))


class ToHost:
    """The values of a tensor, copied in the order of the stream; who reads them waits for nothing later."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = to_host(values), None
        if values.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[list[int]]:
        """Wait for the copy."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._values.tolist()
        return rows


def masked(
    grammars: PassGrammars | None, logits_XV: Tensor, num_sequences: int
) -> AbstractContextManager[None]:
    """See `PassGrammars.masked`; None changes nothing."""
    return nullcontext() if grammars is None else grammars.masked(logits_XV, num_sequences)


def with_grammars(batch: Batch, schedule: Schedule) -> Batch:
    """The batch of a schedule with the grammars of its requests, if they have any."""
    grammars = schedule.grammars
    return replace(batch, grammars=PassGrammars(grammars)) if grammars else batch


@functools.cache
def _executor() -> Any:
    """Threads that compute bits; the interpreter's lock is free meanwhile."""
    return importlib.import_module("llguidance").LLExecutor()


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """It follows grammars while the pass is launched."""
    return ThreadPoolExecutor(1, thread_name_prefix="grammars")


def _bits(branches: Sequence[tuple[Grammar, Sequence[int]]], device: torch.device) -> Tensor:
    """The tokens that may follow each grammar, and then each of its drafts, uint8 [Y, C] on the device or, of
    a GPU, in pinned memory, the bit of the lowest id first. All bits are set after a draft that does not fit,
    after the end of an answer, and where nothing can follow.
    """
    num_words = -(-branches[0][0].vocab_size // (8 * WORD_BYTES))
    shape = sum(1 + len(drafts) for _, drafts in branches), num_words * WORD_BYTES
    bits_YC = torch.full(shape, 255, dtype=torch.uint8, pin_memory=device.type == "cuda")
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
    return bits_YC


def _forbid(logits_YV: Tensor, bits_YC: Tensor) -> Tensor:
    num_bits = 8 * bits_YC.shape[1]
    bits_YC = bits_YC.to(logits_YV.device, non_blocking=True)
    is_out_YV = (bits_YC[:, :, None] & _powers(bits_YC.device)).view(-1, num_bits) == 0
    return logits_YV.masked_fill(is_out_YV[:, : logits_YV.shape[1]], -torch.inf)


@functools.cache
def _powers(device: torch.device) -> Tensor:
    """The value of each bit of a byte."""
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
