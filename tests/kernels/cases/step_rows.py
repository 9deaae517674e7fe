"""Random passes for the tests of step_rows: lanes in any order, prompts, full sequences, padding."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from idlm.infer.decoders.rejection import STRATEGIES, DraftLayout, layouts
from idlm.kernels.step_rows import Lanes, Noise, RowTable, StepRows, commit, map_slots, pack_rows

NUM_LANES, LENGTH, MASK_ID = 12, 90, 999
SPARE = NUM_LANES - 1


class Case:
    """A batch of `sequences` (lane, tokens to feed, whether it wants to decode) over random lanes."""

    def __init__(self, seed: int, device: str) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.device = device

        def ints(minimum: int, maximum: int, *shape: int) -> Tensor:
            return torch.randint(minimum, maximum, shape, generator=generator).to(device)

        stride = rng.choice([1, 2, 4, 16])
        maximum = stride - 1 + rng.choice([0, 2]) * (stride > 1)
        mode_layouts = layouts(rng.choice(STRATEGIES.names()), num_masks=stride - 1, max_drafts=maximum)
        self.table: RowTable = DraftLayout(mode_layouts, torch.device(device)).rows
        known_Z = ints(1, LENGTH - 20, NUM_LANES)
        computed_Z = (known_Z * torch.rand(NUM_LANES, generator=generator).to(device)).long()
        ends_Z = known_Z + ints(0, 6, NUM_LANES)
        has_drafts = stride > 1
        self.lanes = Lanes(
            num_known_Z=known_Z,
            num_computed_Z=computed_Z,
            ends_Z=ends_Z,
            tokens_ZL=ints(0, 900, NUM_LANES, LENGTH + 1),
            draft_buffer_Z=ints(0, len(mode_layouts), NUM_LANES) if has_drafts else None,
            drafts_ZJ=ints(0, 900, NUM_LANES, maximum) if has_drafts else None,
        )
        self.steps_Z = ints(0, 9, NUM_LANES)
        wide = rng.choice([0, 1 << 40])
        numbers = ints(0, 1 << 62, NUM_LANES), ints(0, 9, NUM_LANES), self.steps_Z.clone() + wide
        self.mask_token_id = rng.choice([MASK_ID, Noise(*numbers, low=1, high=151_669)])
        chosen = rng.sample(range(SPARE), rng.randint(1, SPARE))
        self.sequences: list[tuple[int, int, bool]] = []
        for lane in chosen:
            left = int(known_Z[lane] - computed_Z[lane])
            num_feed = rng.choice([left, rng.randint(1, left)])
            self.sequences.append((lane, num_feed, num_feed == left))
        self.sequences += [(SPARE, 0, False)] * rng.choice([0, 3])
        self.padding = rng.choice([0, 1, 45])
        self.num_emitted = [rng.randint(0, stride) * wants for _, _, wants in self.sequences]
        self.num_computed = [min(feed, 5) for _, feed, _ in self.sequences]
        self.emitted_BA = ints(0, 900, len(self.sequences), stride)
        self.block_table_BP = ints(0, 50, len(self.sequences), 20)

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        lanes, feed, wants = zip(*self.sequences, strict=True)
        return tuple(torch.tensor(column, device=self.device) for column in (lanes, feed, wants))  # type: ignore[return-value]

    def pack(self, num_rows: int | None) -> StepRows:
        lanes_B, feed_B, wants_B = self.columns()
        return pack_rows(
            self.lanes,
            self.table,
            lanes_B=lanes_B,
            num_feed_B=feed_B,
            wants_B=wants_B,
            num_rows=num_rows,
            mask_token_id=self.mask_token_id,
        )

    def run(self) -> dict[str, Tensor]:
        """All three ops: rows, physical slots and the tables after the commit."""
        num_rows = len(self.pack(None).slots_R) + self.padding
        packed = self.pack(num_rows)
        results = {name: getattr(packed, name) for name in StepRows.__dataclass_fields__}
        results["slot_mapping_R"] = map_slots(
            self.block_table_BP, packed.sequence_R, packed.slots_R, packed.cu_rows_B1, page_size=4
        )
        commit(
            self.lanes,
            self.steps_Z,
            lanes_B=self.columns()[0],
            token_ids_BA=self.emitted_BA,
            num_emitted_B=torch.tensor(self.num_emitted, device=self.device),
            num_computed_B=torch.tensor(self.num_computed, device=self.device),
        )
        known = (
            self.lanes.num_known_Z,
            self.lanes.num_computed_Z,
            self.lanes.tokens_ZL[:, :-1],
            self.steps_Z,
        )
        return results | dict(zip(("known", "computed", "tokens", "steps"), known, strict=True))


def commit_many(device: str) -> dict[str, Tensor]:
    """The state of lanes after commits of many tokens, of none, and of more than a lane holds."""
    num_tokens, length = 600, 700
    known_Z = torch.tensor([50, 0, 300, 7], device=device)
    steps_Z, computed_Z = torch.zeros_like(known_Z), torch.zeros_like(known_Z)
    tokens_ZL = torch.zeros(4, length + 1, dtype=torch.int64, device=device)
    lanes = Lanes(
        num_known_Z=known_Z,
        num_computed_Z=computed_Z,
        ends_Z=known_Z + num_tokens,
        tokens_ZL=tokens_ZL,
        draft_buffer_Z=None,
        drafts_ZJ=None,
    )
    lanes_B = torch.tensor([2, 0, 1], device=device)
    commit(
        lanes,
        steps_Z,
        lanes_B=lanes_B,
        token_ids_BA=torch.arange(1, 3 * num_tokens + 1, device=device).view(3, num_tokens),
        num_emitted_B=torch.tensor([num_tokens, num_tokens, 0], device=device),
        num_computed_B=torch.tensor([5, 0, 0], device=device),
    )
    return {"known": known_Z, "computed": computed_Z, "tokens": tokens_ZL[:, :-1], "steps": steps_Z}
