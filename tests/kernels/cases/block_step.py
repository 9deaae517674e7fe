"""Random block-diffusion passes for the tests of block_step: lanes in any order, prompts, blocks that the
host does not know yet or still counts, full sequences, padding, and garbage in everything that must not be
read."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from idlm.infer.decoders.block import BlockDecoder
from idlm.infer.decoders.block_config import BlockConfig
from idlm.infer.decoders.block_rows import deciding
from idlm.infer.state.batch import Batch, BlockLimits, StepPlan
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.block_step import RULES, Proposed
from idlm.semantics import Semantics
from tests.kernels.references.block_step import Sequence

NUM_LANES, MASK_ID = 12, 999
SPARE = NUM_LANES - 1
PARTS: dict[int, tuple[int | None, ...]] = {
    1: (None,),
    4: (None, 2),
    5: (None,),
    6: (None, 3, 2),
    32: (None, 8),
}
NUM_KINDS = 40
"""Configurations that compile to different kernels; the seed selects one and the content of the pass."""
STATE = ("tokens_ZW", "is_decided_ZW", "num_passes_Z", "num_clean_passes_Z", "whole_part_Z", "num_waits_Z")


class Case:
    """`sequences`: (lane, known tokens that the host has counted, whether it decodes)."""

    def __init__(self, seed: int, device: str) -> None:
        self.rng, self.kinds = random.Random(seed), random.Random(seed % NUM_KINDS)
        self.device, self.generator = torch.device(device), torch.Generator().manual_seed(seed)
        rng, draw = self.rng, self.kinds
        self.size = size = draw.choice([1, 4, 5, 6, 6, 32, 32])
        part = draw.choice(PARTS[size])
        kind = draw.choice(["plain", "edits", "reuses"] if part else ["plain", "edits"])
        config = BlockConfig(
            strategy=RULES[seed % len(RULES)],
            sub_block_size=part,
            dual_cache=kind == "reuses",
            edit_threshold=0.5 if kind == "edits" else None,
            max_edit_passes=2,
            fused_commit=draw.random() < 0.7,
        )
        meaning = Semantics(
            causality="block", logit_shift=draw.random() < 0.3, block_size=size, mask_token_id=MASK_ID
        )
        self.decoder = BlockDecoder(config, meaning)
        self.decoder.allocate(NUM_LANES, 9 * size, 1000, dtype=torch.float32, device=self.device)
        self.table = SequenceState(NUM_LANES, 9 * size - rng.randint(0, 1), self.device)
        self._fill_lanes()
        self.sequences = [self._due(lane) for lane in rng.sample(range(SPARE), draw.randint(1, 7))]
        self.sequences += [(SPARE, 0, False)] * draw.choice([0, 3])

    def _ints(self, minimum: int, maximum: int, *shape: int) -> Tensor:
        return torch.randint(minimum, maximum, shape, generator=self.generator).to(self.device)

    def _fill_lanes(self) -> None:
        size, table, blocks = self.size, self.table, self.decoder.blocks
        known_Z = self._ints(1, 9 * size, NUM_LANES)
        table.tokens_ZL[:] = self._ints(0, 900, *table.tokens_ZL.shape)
        table.num_known_Z[:] = known_Z
        after_Z = self._ints(0, 3, NUM_LANES) * self._ints(0, 2, NUM_LANES)
        table.num_computed_Z[:] = (known_Z // size - after_Z).clamp(min=0) * size
        table.ends_Z[:] = known_Z + self._ints(0, 7, NUM_LANES)
        table.steps_Z[:] = self._ints(0, 9, NUM_LANES)
        blocks.tokens_ZW[:] = self._ints(0, 900, NUM_LANES, size)
        is_known_ZW = torch.arange(size, device=self.device) < (known_Z % size)[:, None]
        share_Z1 = self._ints(-2, 5, NUM_LANES)[:, None]
        blocks.is_decided_ZW[:] = (self._ints(0, 4, NUM_LANES, size) < share_Z1) & ~is_known_ZW
        blocks.num_passes_Z[:] = self._ints(0, 4, NUM_LANES)
        blocks.num_clean_passes_Z[:] = self._ints(0, 2, NUM_LANES)
        blocks.whole_part_Z[:] = self._ints(-1, 2, NUM_LANES)
        blocks.num_waits_Z[:] = self._ints(0, 3, NUM_LANES)
        options = self.decoder.options
        options.steps_Z[:] = self._ints(1, size + 1, NUM_LANES)
        for column_Z in (options.threshold_Z, options.edit_threshold_Z):
            column_Z[:] = self._ints(0, 5, NUM_LANES).double() / 4
        options.entropy_bound_Z[:] = self._ints(0, 9, NUM_LANES).double() / 4

    def _due(self, lane: int) -> tuple[int, int, bool]:
        """Tokens of a decoding sequence that the host counts: those due, none yet, or those stored by now."""
        num_computable = int(self.table.num_known_Z[lane]) // self.size * self.size
        num_left = num_computable - int(self.table.num_computed_Z[lane])
        if num_left > self.size and self.rng.random() < 0.6:
            return lane, self.rng.randrange(1, num_left // self.size) * self.size, False
        counted = [num_left] if num_left > self.size else [num_left, self.size, 0]
        return lane, self.rng.choice(counted), True

    def plan(self) -> StepPlan:
        """The pass, planned by kernels or plain torch."""
        lanes, num_counted, decodes = zip(*self.sequences, strict=True)
        spare = self.rng.choice([0, 0, 1, 4]) * self.size
        self.num_rows = (
            None if self.kinds.random() < 0.2 else len(lanes) * self.size + sum(num_counted) + spare
        )
        batch = Batch(
            lanes_B=torch.tensor(lanes, device=self.device),
            num_feed_B=torch.tensor(num_counted, device=self.device),
            samples_B=torch.tensor(decodes, device=self.device),
            max_feed=max(num_counted) + 1,
            max_known=9 * self.size,
            max_rows=self.size,
            num_rows=self.num_rows,
            filters=False,
            payload=BlockLimits(num_wanted=self.rng.choice([None, 0, len(lanes) * self.size // 2])),
        )
        plan = self.decoder.plan(self.table, batch)
        return plan

    def proposed(self, plan: StepPlan) -> tuple[StepPlan, Proposed]:
        """Tokens with few different probabilities, so that there are ties; sometimes without some logits."""
        shape = (len(self.sequences), self.size)
        if self.kinds.random() < 0.4:
            has_logits_BW = self._ints(0, 3, shape[0], shape[1]) > 0
            plan = replace(plan, payload=replace(deciding(plan), has_logits_BW=has_logits_BW))
        looked_BW = plan.samples_B[:, None].expand(shape)
        confidence_BW, entropy_BW = (self._ints(1, 4, *shape).double() / 4 for _ in range(2))
        garbage_BW = torch.full_like(confidence_BW, torch.nan)
        return plan, Proposed(
            token_ids_BW=self._ints(0, 900, *shape),
            confidence_BW=torch.where(looked_BW, confidence_BW, garbage_BW),
            entropy_BW=torch.where(looked_BW, entropy_BW, garbage_BW),
        )

    def state(self) -> dict[str, Tensor]:
        """The state that a commit changes; only decided positions of a lane's block are meaningful."""
        table, blocks = self.table, self.decoder.blocks
        columns = {name: getattr(blocks, name).clone() for name in STATE}
        columns["tokens_ZW"] *= columns["is_decided_ZW"]
        return columns | {
            "known": table.num_known_Z.clone(),
            "computed": table.num_computed_Z.clone(),
            "tokens": table.tokens_ZL[:, :-1].clone(),
            "steps": table.steps_Z.clone(),
        }

    def sequence(self, lane: int) -> Sequence:
        """The lane for the reference."""
        table, blocks, options = self.table, self.decoder.blocks, self.decoder.options
        known = int(table.num_known_Z[lane])
        decided, tokens = blocks.is_decided_ZW[lane].tolist(), blocks.tokens_ZW[lane].tolist()
        return Sequence(
            tokens=table.tokens_ZL[lane, :known].tolist(),
            num_computed=int(table.num_computed_Z[lane]),
            ends=int(table.ends_Z[lane]),
            decided=[token if is_in else None for token, is_in in zip(tokens, decided, strict=True)],
            num_passes=int(blocks.num_passes_Z[lane]),
            num_clean_passes=int(blocks.num_clean_passes_Z[lane]),
            whole_part=int(blocks.whole_part_Z[lane]),
            num_steps=int(options.steps_Z[lane]),
            threshold=float(options.threshold_Z[lane]),
            edit_threshold=float(options.edit_threshold_Z[lane]),
            entropy_bound=float(options.entropy_bound_Z[lane]),
        )


def run(case: Case) -> dict[str, Tensor]:
    """Rows of the pass, its emitted tokens, and all state after it."""
    plan, proposed = case.proposed(case.plan())
    emitted_BW, num_emitted_B = case.decoder._decide(case.table, plan, proposed)
    results: dict[str, Any] = {field.name: getattr(plan, field.name) for field in fields(plan)}
    active = deciding(plan)
    for part in (active, active.wanted):
        results |= {field.name: getattr(part, field.name) for field in fields(part)}
    is_emitted_BW = torch.arange(case.size, device=case.device) < num_emitted_B[:, None]
    results |= {"emitted": emitted_BW * is_emitted_BW, "num_emitted": num_emitted_B}
    tensors = {name: value for name, value in results.items() if isinstance(value, Tensor)}
    return tensors | case.state()
