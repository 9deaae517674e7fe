"""Grammars that follow sequences as the device decodes them: logits of tokens that cannot follow become -inf,
and drafts are chosen that fit.

A forward pass needs no mask, so it runs while the host follows what the pass before emitted and computes
bits. What follows hidden states waits for the bits and runs outside of CUDA graphs. Temperature and filters
come after the masks, so that p is the AR law of the allowed tokens. q gets the mask of the drafts before it:
a pass draws several candidates for each of the next drafts, and the host takes the first that fits. That is a
draw from q without the tokens that do not fit, whose probabilities the next pass tests.

A token that the grammar forces is a draft without a draw: nothing else may follow, so the test accepts it.
Elsewhere a draft is the first of several independent draws from q that the grammar allows: its law is q
conditioned on the allowed tokens, which depend on earlier tokens alone. If no draw fits, it is the allowed
token with the highest id, which is certain then: whether the draws fit has no influence on the tokens to
come, so that the draft's law is known and the test of drafts stays exact. (Tokens of a BPE vocabulary with
high ids are long: it is mostly the usual spelling of a text that the grammar prescribes.)

The device waits for this choice. A question about tokens takes 1 to 4 us under the interpreter's lock, a
forced text 10, and a mask, in threads, 10 where few tokens may follow and hundreds within a text, where most
draws fit: masks answer only what is left. Shapes: X wanted rows, Y rows that get masks, V vocabulary, W words
of bits, B sequences, M those with a grammar, b followers, A tokens that a pass can emit, D drafts that it
tests, J drafts, C candidates."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from idlm.infer.state.batch import Schedule, lane_of, to_device, to_host
from idlm.infer.structured.grammar import WORD_BITS, Grammar, compute_bits, num_words
from idlm.kernels.sampling import Drafts, allowed_logits, restrict


class PassGrammars:
    """The grammars of the sequences that a pass decodes: followers by position in the batch, and lanes.
    `greedy`: numbers of greedy ones. `index_M`: the positions on the device, after `mask`."""

    index_M: Tensor

    def __init__(
        self, followers: Mapping[int, Follower], lanes: Sequence[int], greedy: Sequence[int]
    ) -> None:
        self._followers, self._lanes, self.greedy = followers, lanes, greedy
        self._num_drafts = 0

    def choose_drafts(self, num_drafts: int) -> list[list[int]]:
        """Wait for the readback of earlier passes, follow it, and choose drafts for this pass. Returns lane,
        position and token of each draft of sequences whose drafts are not all first candidates."""
        self._num_drafts = num_drafts
        lanes = zip(self._lanes, self._followers.values(), strict=True)
        open_ = [(lane, each) for lane, each in lanes if each.catch_up(num_drafts)]
        choose_drafts([follower for _, follower in open_])
        return [
            [lane, index, token_id]
            for lane, follower in open_
            for index, token_id in enumerate(follower.drafts)
        ]

    def bits(self, device: torch.device) -> Tensor:
        """The tokens that may follow each sequence, and then each of its drafts, int32 [M, A, W] on the host.
        All bits are set after the last draft that fits, and after the end of an answer."""
        followers, num_rows = list(self._followers.values()), 1 + self._num_drafts
        shape = len(followers), num_rows, num_words(followers[0].drafted)
        bits_MAW = torch.full(shape, -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        open_ = [(m, each) for m, each in enumerate(followers) if not each.is_over]
        for _, each in open_:
            each.drafted.matcher.rollback(len(each.drafts))
        rows = [(each, each.drafts[: num_rows - 1], m * num_rows) for m, each in open_]
        compute_masks(rows, bits_MAW.view(-1, shape[2]))
        for _, each in open_:
            each.advance()
        return bits_MAW

    @torch.inference_mode()
    def mask(self, logits_XV: Tensor, num_sequences: int, store: Drafts | None = None) -> None:
        """Write -inf for tokens that cannot follow into the first A of the X / B rows of each sequence with a
        grammar. The tested drafts in `store` lose the same tokens."""
        device, num_drafts, followers = logits_XV.device, self._num_drafts, self._followers.values()
        width = len(logits_XV) // num_sequences
        depths = range(min(1 + num_drafts, width))
        rows = [index * width + depth for index in self._followers for depth in depths]
        masks = [m * (1 + num_drafts) + depth for m in range(len(followers)) for depth in depths]
        only = [
            token_id
            for each in followers
            for token_id in (*each.only[:num_drafts], *[-1] * (num_drafts - len(each.only)))
        ]
        bits_MAW = _moved(self.bits(device), device)
        numbers = to_device([*self._followers, *self._lanes, *rows, *masks, *only], device)
        sizes = [len(followers), len(followers), len(rows), len(rows), len(only)]
        self.index_M, lanes_M, rows_Y, masks_Y, only_Q = numbers.split(sizes)
        if store is not None and num_drafts:
            restrict(store, lanes_M, bits_MAW, only_Q.view(-1, num_drafts))
        logits_XV[rows_Y] = allowed_logits(logits_XV, rows_Y, bits_MAW.flatten(0, 1), masks_Y)

    def start_readback(
        self, num_emitted_B: Tensor, token_ids_BA: Tensor, candidates_MJC: Tensor | None = None
    ) -> None:
        """Begin to copy to the host what the pass emits, and the candidates for the next drafts."""
        columns, num_drafts = [num_emitted_B[:, None], token_ids_BA], 0
        columns = [column[self.index_M] for column in columns]
        if candidates_MJC is not None:
            num_drafts = candidates_MJC.shape[1]
            # First candidates first: mostly nothing else is read.
            columns.append(candidates_MJC.transpose(1, 2).flatten(1))
        readback = PassReadback(torch.cat(columns, dim=1), token_ids_BA.shape[1], num_drafts)
        for m, follower in enumerate(self._followers.values()):
            follower.readback = readback, m


def pass_grammars(schedule: Schedule) -> PassGrammars:
    requests = [schedule.requests[index] for index in schedule.grammars]
    for grammar in schedule.grammars.values():
        # It begins where the answer is when the sequence gets its lane.
        grammar.follower = grammar.follower or Follower(grammar)
    return PassGrammars(
        {index: grammar.follower for index, grammar in schedule.grammars.items()},
        [lane_of(request) for request in requests],
        [m for m, request in enumerate(requests) if request.params.temperature == 0],
    )


def _moved(values: Tensor, device: torch.device) -> Tensor:
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


SLOW_BITS = 0.01
"""Seconds for bits of a pass, beyond which the next passes measure whose grammar is slow."""
USUAL_MASK = 0.001
"""Seconds of a row of bits that are no excess."""


class PassReadback:
    """Device results of a pass, copied to the host in the order of the stream: numbers of emitted tokens, the
    tokens, all first candidates for the next drafts, all second ones, and so on (-1: no such draft)."""

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
        found: list[list[int]] = self._array[:, : 1 + self._num_tokens + 2 * self._num_drafts].tolist()
        return found

    def read(self, index: int) -> tuple[list[int], list[int], list[int]]:
        """The emitted tokens of the sequence at this position, the first candidates, and the second ones."""
        num_emitted, *numbers = self._heads[index]
        candidates = numbers[self._num_tokens :]
        firsts, seconds = candidates[: self._num_drafts], candidates[self._num_drafts :]
        return numbers[:num_emitted], firsts[: firsts.index(-1)] if -1 in firsts else firsts, seconds

    def candidates(self, index: int, draft: int) -> Any:
        """All candidates for one of its next drafts, an array [C]."""
        return self._array[index, 1 + self._num_tokens + draft :: self._num_drafts]


class Follower:
    """The grammar of one sequence after the tokens that the host has read, which may be more than the answer
    has (`committed`). `drafts`: those that the next pass tests; `drafted` is after them. `only`: of each the
    token itself if it was certain, else -1. `readback`: that of the last pass, and the position in its batch.
    `is_over`: nothing can follow. `firsts`: the first candidates for the next drafts."""

    def __init__(self, committed: Grammar) -> None:
        self.committed, self._start = committed, committed.apart()
        self._token_ids = list(committed.token_ids)
        self.drafted = self._restart()
        self.drafts: list[int] = []
        self.only: list[int] = []
        self.firsts: list[int] = []
        self._seconds: list[int] = []
        self.readback: tuple[Any, int] | None = None
        self._read: tuple[Any, int] | None = None
        self.is_over = False

    def _restart(self) -> Grammar:
        drafted = self._start.branch()
        drafted.push(self._token_ids)
        return drafted

    def catch_up(self, num_drafts: int) -> bool:
        """Wait for the last readback and follow its tokens. Returns whether drafts, at most so many, have to
        be chosen: False if the first candidates fit, and become the drafts, or if there are none."""
        if self.readback is None:
            return False
        self._read, self.readback = self.readback, None
        readback, index = self._read
        drafts, self.drafts, self.only = self.drafts, [], []
        if self.is_over:
            return False
        emitted, firsts, self._seconds = readback.read(index)
        self.firsts = firsts[:num_drafts]
        self._token_ids += emitted
        matcher, num_accepted = self.drafted.matcher, max(0, len(emitted) - 1)
        if drafts[:num_accepted] != emitted[:-1]:
            num_accepted = 0
        if num_accepted < len(drafts):
            matcher.rollback(len(drafts) - num_accepted)
        self.is_over = not matcher.consume_tokens(emitted[num_accepted:]) or matcher.is_stopped()
        return not self.is_over and self.take(self.firsts) < len(self.firsts)

    def candidates(self) -> Any:
        """All candidates for the draft after those that were taken, an array [C]."""
        assert self._read is not None
        readback, index = self._read
        return readback.candidates(index, len(self.drafts))

    def extend(self) -> bool:
        """Take what the grammar forces, and candidates that fit. Returns whether a mask is needed next."""
        matcher, firsts, drafts = self.drafted.matcher, self.firsts, self.drafts
        while (index := len(drafts)) < len(firsts) and not matcher.is_stopped():
            if forced := matcher.compute_ff_tokens()[: len(firsts) - index]:
                if not self.take(forced, is_certain=True):
                    return False
            elif not self.take(firsts[index:]) and not self.take(self._seconds[index : index + 1]):
                return True
        return False

    def take(self, token_ids: list[int], *, is_certain: bool = False) -> int:
        num_taken: int = self.drafted.matcher.try_consume_tokens(token_ids)
        if num_taken:
            taken = token_ids[:num_taken]
            self.drafts += taken
            self.only += taken if is_certain else [-1] * num_taken
        return num_taken

    def advance(self) -> None:
        """Follow the drafts again. A matcher never leaves an error."""
        if self.drafted.matcher.is_error():
            self.drafted = self._restart()
        self.drafted.matcher.consume_tokens(self.drafts)


def compute_masks(rows: Sequence[tuple[Follower, Sequence[int], int]], bits_YW: Tensor) -> None:
    """`compute_bits` for the state of each follower and then its drafts; slow grammars are charged for it.
    All bits are set for a refused grammar, whose answer fails after this pass."""
    for follower, _, _ in rows:
        is_suspect = follower.committed.is_suspect or follower.committed.cost.is_on_trial
        if is_suspect and not follower.committed.cost.is_refused:
            follower.committed.charge(follower.drafted.mask_seconds())
    computed = []
    for follower, drafts, row in rows:
        if follower.committed.cost.is_refused:
            bits_YW[row : row + 1 + len(drafts)] = -1
        else:
            computed.append((follower.drafted, drafts, row))
    start = time.perf_counter()
    compute_bits(computed, bits_YW)
    seconds = time.perf_counter() - start
    if computed and seconds > SLOW_BITS:
        num_rows = sum(1 + len(drafts) for _, drafts, _ in computed)
        rows[0][0].committed.cost.budget.take(max(0.0, seconds - USUAL_MASK * num_rows))
        for follower, _, _ in rows:
            follower.committed.is_suspect = True
    else:
        for follower, _, _ in rows:
            follower.committed.cost.num_fast += 1


def choose_drafts(followers: Sequence[Follower]) -> None:
    """Choose drafts of followers among candidates, up to one after which nothing can follow."""
    open_ = [follower for follower in followers if follower.extend()]
    while open_:
        bits_bW = torch.empty(len(open_), num_words(open_[0].drafted), dtype=torch.int32)
        compute_masks([(follower, (), b) for b, follower in enumerate(open_)], bits_bW)
        found = _first_that_fits(bits_bW.numpy(), np.stack([follower.candidates() for follower in open_]))
        open_ = [
            follower
            for follower, (token_id, is_certain) in zip(open_, found, strict=True)
            if follower.take([token_id], is_certain=is_certain) and follower.extend()
        ]
    for follower in followers:
        if follower.drafted.matcher.is_error():
            follower.advance()


def _first_that_fits(bits_bW: Any, ids_bC: Any) -> list[tuple[int, bool]]:
    """The first candidate of each follower whose bit is set, and False; else the highest set token, True."""
    rows_b = np.arange(len(ids_bC))
    words_bC = bits_bW[rows_b[:, None], ids_bC // WORD_BITS].view(np.uint32)
    fits_bC = (words_bC >> (ids_bC % WORD_BITS).astype(np.uint32)) & 1
    firsts_b = np.where(fits_bC.any(1), ids_bC[rows_b, fits_bC.argmax(1)], -1).tolist()
    found = []
    for bits_W, first in zip(bits_bW, firsts_b, strict=True):
        if is_certain := first < 0:
            # Every mask has a bit.
            word = (bits_W != 0).tobytes().rfind(1)
            first = WORD_BITS * word + (int(bits_W[word]) & 0xFFFFFFFF).bit_length() - 1
        found.append((first, is_certain))
    return found
