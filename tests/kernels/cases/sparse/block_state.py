"""Random passes over blocks for the tests of their state: the op against the reference, pass by pass."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from idlm.kernels.block_eviction import BlockState, FedBlocks, StateRules, begin_blocks, finish_blocks
from tests.kernels.references.sparse.block_eviction import LaneState, begin_reference, finish_reference

MASK, NUM_LANES, NUM_STEPS, NUM_TOKENS = 99, 6, 10, 3


@dataclass
class Sequence:
    """What a lane decodes. Its tokens are few, so that some edits change nothing."""

    start: int
    tokens: list[int]
    before: list[int]
    state: LaneState = field(default_factory=LaneState)
    fed: dict[int, int] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    masks: set[int] = field(default_factory=set)
    evicts: bool = False

    def layout(self, rng: random.Random, size: int) -> tuple[list[int], list[int]]:
        """Slots and tokens that this pass feeds: some before the block, and mostly all of it."""
        num_before = rng.choice([0, 0, 0, size, size, 2 * size, size // 2])
        num_before = min(num_before, self.start)
        num_fed = rng.choice([size] * 6 + [0, size - 1])
        texts = [7] * self.start
        texts[self.start - size :] = self.before
        texts += self.tokens
        slots = list(range(self.start - num_before, self.start + num_fed))
        if not num_fed and num_before == 2 * size:
            slots = slots[:size]
        self.fed = dict(enumerate(self.tokens[:num_fed]))
        self.masks = {index for index, token in self.fed.items() if token == MASK}
        indices = {slot: slot - self.start + size for slot in slots if self.start - size <= slot < self.start}
        self.stored = {index: texts[slot] for slot, index in indices.items()}
        return slots, [texts[slot] for slot in slots]

    def advance(self, rng: random.Random, size: int) -> None:
        """Decide and edit some positions, or begin the next block."""
        if MASK not in self.tokens or rng.random() < 0.1:
            known = [rng.randrange(NUM_TOKENS) if token == MASK else token for token in self.tokens]
            self.before, self.tokens, self.start = known, [MASK] * size, self.start + size
        for index, token in enumerate(self.tokens):
            if (token == MASK and rng.random() < 0.3) or (token != MASK and rng.random() < 0.1):
                self.tokens[index] = rng.randrange(NUM_TOKENS)


def check_state(seed: int, device: str = "cpu") -> None:
    """Everything that the passes say and leave behind equals the reference."""
    rng = random.Random(seed)
    size = (2, 4, 7, 32)[seed % 4]
    rules = StateRules(
        of_request=seed % 2 == 1,
        retains_stored=seed % 3 > 0,
        shifted=seed % 5 == 0,
        prefills=seed % 7 == 0,
        stability=("neighbour", "plain", "off", "neighbour")[seed // 4 % 4],
    )
    state = BlockState.empty(NUM_LANES, size, torch.device(device))
    lanes = [Sequence(size, [MASK] * size, [1] * size) for _ in range(NUM_LANES)]
    for _ in range(NUM_STEPS):
        chosen = rng.sample(range(NUM_LANES), rng.randrange(1, NUM_LANES))
        _check_pass(rng, state, [lanes[lane] for lane in chosen], chosen, rules, size, device)
        for lane in chosen:
            lanes[lane].advance(rng, size)
            _check_lane(state, lane, lanes[lane].state, rules)


def _check_pass(
    rng: random.Random,
    state: BlockState,
    sequences: list[Sequence],
    lanes: list[int],
    rules: StateRules,
    size: int,
    device: str,
) -> None:
    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    laid_out = [one.layout(rng, size) for one in sequences]
    slots = [slot for some, _ in laid_out for slot in some]
    ends = [sum(len(some) for some, _ in laid_out[:number]) for number in range(len(laid_out) + 1)]
    rows = [[-1] * size for _ in sequences]
    stored = [{} for _ in sequences]
    for number, (one, (some, _)) in enumerate(zip(sequences, laid_out, strict=True)):
        for row, slot in enumerate(some, start=ends[number]):
            if slot >= one.start:
                rows[number][slot - one.start] = row
            elif slot >= one.start - size:
                stored[number][slot - one.start + size] = row
    padding = rng.randrange(4) + (not slots)
    fed = FedBlocks(
        lanes_B=ints(lanes),
        starts_B=ints([one.start for one in sequences]),
        rows_BW=ints(rows),
        is_mask_BW=ints([[index in one.masks for index in range(size)] for one in sequences]) > 0,
        cu_rows_B1=ints(ends),
        slots_R=ints(slots + [0] * padding),
        token_ids_R=ints([token for _, some in laid_out for token in some] + [0] * padding),
    )
    started = begin_blocks(state, fed, rules)
    options = {name: value for name, value in asdict(rules).items() if name != "stability"}
    waits, computed = [rng.random() < 0.2 for _ in sequences], []
    for b, one in enumerate(sequences):
        mine, one.evicts, mean, dropped, stays = begin_reference(
            one.state, one.start, size, one.fed, one.masks, one.stored, **options
        )
        assert (bool(started.mine_B[b]), bool(started.evicts_B[b])) == (mine, one.evicts)
        assert not mine or float(started.mean_decoded_B[b]) == mean
        kept = {index for index in one.fed if started.keep_R[rows[b][index]]}
        assert kept == one.fed.keys() - dropped
        if rules.retains_stored:
            num_before = ends[b + 1] - ends[b] - len(one.fed)
            last = range(ends[b] + max(0, num_before - size), ends[b] + num_before)
            dropped_rows = {stored[b][index] for index in stays}
            assert {row for row in last if not started.keep_R[row]} == dropped_rows
        computed.append({index for index in kept if rng.random() < 0.7})
        if mine and not waits[b]:
            finish_reference(
                one.state, one.fed, one.masks, computed[b], evicts=one.evicts, stability=rules.stability
            )
    left = [[0 if index in some else -1 for index in range(size)] for some in computed]
    waits_B = torch.tensor(waits, device=device)
    finish_blocks(state, fed, started, rules, rows_BW=ints(left), waits_B=waits_B)


def _check_lane(state: BlockState, lane: int, expected: LaneState, rules: StateRules) -> None:
    def frozen(flags_ZW: torch.Tensor, ids_ZW: torch.Tensor) -> dict[int, int]:
        indices = flags_ZW[lane].nonzero()[:, 0].tolist()
        return {index: int(ids_ZW[lane, index]) for index in indices}

    assert int(state.starts_Z[lane]) == expected.start
    assert frozen(state.frozen_ZW, state.frozen_ids_ZW) == expected.frozen
    assert set(state.processed_ZW[lane].nonzero()[:, 0].tolist()) == expected.processed
    numbers = (expected.num_masks, expected.num_passes, expected.num_decoded, expected.num_earlier)
    assert tuple(state.counts_Z4[lane].tolist()) == numbers
    if rules.prefills:
        assert bool(state.is_new_Z[lane]) == expected.is_new
    if rules.retains_stored:
        assert int(state.before_starts_Z[lane]) == expected.before_start
        assert frozen(state.before_frozen_ZW, state.before_ids_ZW) == expected.before
