"""LLaDA2.2's edits that delete and split positions: answers of the engine, alone, together, in static passes
and after a preemption, are those of a slow decoder; and the rebuilding of a block by itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.kernels.block_step import Held, Resizing
from idlm.semantics import Semantics
from tests.block_reference import Rules, Sampling
from tests.contracts.block.resizing_reference import SlowResizing
from tests.contracts.engines import assert_idle, build_engine
from tests.errors import refused
from tests.margins import NearTie
from tests.numerics.test_family_parity import BLOCK, MASK, Logits, SlowReference, draw, llada22

DELETE, SPLIT = EDIT_IDS = (91, 92)
MODES: dict[str, dict[str, Any]] = {
    "edits": {"strategy": "low_confidence_dynamic", "threshold": 0.5, "edit_threshold": 0.2},
    "sequential": {"strategy": "sequential", "max_edit_passes": 2},
    "one late pass": {"strategy": "low_confidence_dynamic", "edit_threshold": 0.2, "max_edit_passes": 1},
}
NAMES = {"edit_threshold": "edit", "max_edit_passes": "edit_passes"}
ENGINES: list[dict[str, Any]] = [
    {},
    {"graphs": "on", "num_inflight_steps": 2},
    {"num_pages": 12, "page_size": BLOCK},
    {"fused_commit": False},
]
MAX = 3 * BLOCK


class Slow(SlowResizing, SlowReference):
    """The slow decoder on the slow model."""

    edit_ids = EDIT_IDS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logits]:
    """A checkpoint that often deletes and splits."""
    directory = tmp_path_factory.mktemp("resizing")
    return directory, llada22(directory, likely=EDIT_IDS)


@pytest.mark.sweep
@pytest.mark.decides
@pytest.mark.parametrize("mode", MODES)
def test_an_engine_deletes_and_splits_as_a_slow_decoder_does(mode: str, model: tuple[Path, Logits]) -> None:
    directory, reference = model
    options = MODES[mode]
    rules = Rules(size=BLOCK, mask=MASK, **{NAMES.get(name, name): value for name, value in options.items()})
    slow, prompts, expected, params = Slow(reference, rules), [], [], []
    # Prompts on which rounding decides nothing.
    for seed in range(40):
        prompt, sampling = draw(1 + 3 * seed % 11, seed), {"temperature": 0.7 * (seed % 3 == 2), "seed": seed}
        try:
            answer = slow.answer(prompt, Sampling(max_tokens=MAX, **sampling))[0]
        except NearTie:
            continue
        prompts.append(prompt)
        expected.append(answer)
        params.append(SamplingParams(max_tokens=MAX, ignore_eos=True, **sampling))
        if len(prompts) == 6:
            break
    assert len(prompts) == 6 and min(slow.num_deleted, slow.num_split) > 0
    assert slow.num_last > 0 or mode != "one late pass"
    assert not {DELETE, SPLIT, MASK} & {token for answer in expected for token in answer}
    for way in ENGINES[:: 1 if mode == "edits" else 2]:
        engine = build_engine(directory, "block", **options, **way)
        found = [list(answer.token_ids) for answer in engine.generate(prompts, params)]
        assert found == expected, way
        assert_idle(engine)
    [alone] = engine.generate(prompts[:1], params[:1])
    assert list(alone.token_ids) == expected[0]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_rebuilt_as_lists_are(seed: int) -> None:
    rng, size = random.Random(seed), 7
    resizing = Resizing.empty(EDIT_IDS, 3, num_lanes=4, size=size, device=torch.device("cpu"))
    slow = object.__new__(Slow)
    rows, expected = [], []
    for _ in range(4):
        work = [rng.choice([None, *range(9)]) for _ in range(size)]
        is_new = [token is None and rng.random() < 0.5 for token in work]
        writes = {p: rng.choice([DELETE, SPLIT, 9, 10]) for p in range(size) if rng.random() < 0.6}
        rows.append((work, is_new, writes))
        expected.append(slow._rebuilt(work, is_new, dict(writes)))
    held = Held(
        tokens_BW=torch.tensor([[-1 if token is None else token for token in row[0]] for row in rows]),
        is_decided_BW=torch.tensor([[token is not None for token in row[0]] for row in rows]),
        is_new_BW=torch.tensor([row[1] for row in rows]),
    )
    written_BW = torch.tensor([[index in row[2] for index in range(size)] for row in rows])
    proposed_BW = torch.tensor([[row[2].get(index, 77) for index in range(size)] for row in rows])
    found = resizing.apply(held, written_BW, proposed_BW)
    for row, (work, is_new) in enumerate(expected):
        tokens = torch.where(found.is_decided_BW[row], found.tokens_BW[row], -1).tolist()
        assert tokens == [-1 if token is None else token for token in work]
        assert found.is_new_BW[row].tolist() == is_new


def test_parts_and_shifts_are_refused(model: tuple[Path, Logits]) -> None:
    refused(r"IDLM-0451.*sub_block_size=2", build_engine, model[0], "block", sub_block_size=2)
    for wrong in ({"edit_token_ids": (1,)}, {"edit_token_ids": (1, 2), "logit_shift": True}):
        meaning: dict[str, Any] = {"causality": "block", "block_size": 4, "logit_shift": False, **wrong}
        refused("IDLM-0304", Semantics, **meaning)
