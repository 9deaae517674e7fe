"""Masks of a pass whose sequences have grammars: logits of tokens that cannot follow become -inf.

A forward pass needs no mask, so it runs while the host follows what the pass before emitted and computes
bits. What follows hidden states waits for the bits and runs outside of CUDA graphs. Temperature and filters
come after the masks, so that p is the AR law of the allowed tokens. q gets the mask of the drafts before it:
a pass draws several candidates for each of the next drafts, and the host takes the first that fits
(`draft_choice.py`). That is a draw from q without the tokens that do not fit, whose probabilities the next
pass tests. Shapes: X wanted rows, Y rows that get masks, V vocabulary, W words of bits, B sequences, M
sequences with a grammar, A tokens that a pass can emit, D drafts that it tests, J drafts, C candidates."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from idlm.infer.state.batch import Schedule, lane_of, to_device
from idlm.infer.structured.draft_choice import Follower, PassReadback, choose_drafts, compute_masks
from idlm.infer.structured.grammar import num_words
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
