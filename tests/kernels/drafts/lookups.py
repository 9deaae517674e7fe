"""Random texts of few tokens for the tests of prompt_lookup: matches of all lengths, inactive lanes."""

from __future__ import annotations

import random

import torch

from idlm.kernels.prompt_lookup import LONGEST, look_up
from idlm.kernels.sampling import draft_probs
from idlm.kernels.sampling.types import Tuning
from tests.kernels.cases.sampling_steps import stored_probs
from tests.kernels.references.prompt_lookup import look_up_reference

LAYOUT, UNTOUCHED = 7, -5
NUM_TOKENS = 60


def check_lookups(
    seed: int, *, device: str = "cpu", columns: int = 90, dtype: torch.dtype = torch.float32
) -> int:
    """Compare one call with the definition; returns how many sequences had a match."""
    draw = random.Random(seed)
    num_lanes, num_drafts, minimum = 8, draw.choice([1, 3, 7]), draw.choice([1, 2, 3, LONGEST])
    tuning, texts = Tuning(chunk=32), []
    tokens_ZL = torch.full((num_lanes, columns), 3)
    for lane in range(num_lanes):
        words = [[draw.randrange(NUM_TOKENS) for _ in range(draw.randint(1, 20))] for _ in range(3)]
        text = [token for _ in range(columns) for token in draw.choice(words)]
        texts.append(text[: draw.choice([1, 2, minimum, draw.randint(1, columns), columns - 1])])
        tokens_ZL[lane, : len(texts[-1])] = torch.tensor(texts[-1])
    num_known_Z = torch.tensor([len(text) for text in texts])
    # Past the table, as at the end of a sequence.
    num_known_Z[0] = columns + 2
    lanes_B = torch.tensor(draw.sample(range(num_lanes), num_lanes - 1))
    active_B = torch.tensor([draw.random() < 0.8 for _ in lanes_B])
    shape = num_lanes, num_drafts
    store = draft_probs(*shape, NUM_TOKENS, dtype=dtype, device=torch.device(device), tuning=tuning)
    drafts_ZJ = torch.full(shape, UNTOUCHED, device=device)
    layout_Z = torch.full((num_lanes,), UNTOUCHED, device=device)
    is_found_B = look_up(
        tokens_ZL.to(device),
        num_known_Z.to(device),
        store,
        lanes_B=lanes_B.to(device),
        active_B=active_B.to(device),
        minimum=minimum,
        drafts_ZJ=drafts_ZJ,
        layout_Z=layout_Z,
        layout=LAYOUT,
        tuning=tuning,
    )
    q_ZJV = stored_probs(store, tuning).cpu()
    expected = {
        lane: look_up_reference(texts[lane], minimum, LONGEST, num_drafts)
        for lane, is_active in zip(lanes_B.tolist(), active_B.tolist(), strict=True)
        if is_active and lane
    }
    assert is_found_B.tolist() == [expected.get(lane) is not None for lane in lanes_B.tolist()]
    for lane in range(num_lanes):
        drafts = expected.get(lane)
        assert drafts_ZJ[lane].tolist() == (drafts or [UNTOUCHED] * num_drafts)
        assert int(layout_Z[lane]) == (UNTOUCHED if drafts is None else LAYOUT)
        one_JV = torch.zeros(num_drafts, NUM_TOKENS, dtype=torch.float64)
        if drafts is not None:
            one_JV.scatter_(1, torch.tensor(drafts)[:, None], 1.0)
        assert torch.equal(q_ZJV[lane].double(), one_JV)
    return int(is_found_B.sum())
