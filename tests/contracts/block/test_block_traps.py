"""Traps of block decoding that fail silently, each with a number.

Those of loading are in tests/unit/models/test_family_loading.py; test_trap_numbers.py beside it finds numbers
without a test."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from idlm.contracts import SamplingParams
from idlm.infer.decoders.block_config import MODES, UNMASKINGS, BlockConfig, Masks
from tests.block_reference import Rules, Sampling, SlowBlocks
from tests.contracts.block.blocks import Slow, assert_answers
from tests.contracts.engines import MASK_ID, build_engine, greedy, prompts_of

pytestmark = pytest.mark.decides

SIZE = 4
MAX = 3 * SIZE


@pytest.fixture(scope="module")
def toy(toys: dict[bool, Path]) -> Path:
    return toys[False]


def masks_of(confidence: list[float], *, open_: list[bool], quota: int, threshold: float) -> Masks:
    numbers = torch.tensor([confidence], dtype=torch.float64)
    return Masks(
        is_maskable_BW=torch.tensor([open_]),
        confidence_BW=numbers,
        entropy_BW=-numbers.log(),
        quota_B=torch.tensor([quota]),
        threshold_B=torch.tensor([threshold], dtype=torch.float64),
        entropy_bound_B=torch.tensor([0.3], dtype=torch.float64),
    )


def test_every_stop_id_of_the_checkpoint_stops(toy: Path, tmp_path: Path) -> None:
    """SDAR: the tokenizer's eos never comes, the end of a turn does."""
    prompt = prompts_of([6])[0]
    [long] = build_engine(toy, "block").generate([prompt], greedy(max_tokens=MAX))
    turn_end = long.token_ids[5]
    absent = next(token for token in range(MASK_ID) if token not in long.token_ids)
    directory = tmp_path / "toy"
    shutil.copytree(toy, directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn_end, absent]}))
    [found] = build_engine(directory, "block").generate(
        [prompt], SamplingParams(temperature=0, max_tokens=MAX)
    )
    assert found.finish_reason == "stop"
    assert found.token_ids == long.token_ids[: long.token_ids.index(turn_end) + 1]


def test_thresholds_are_strict_and_modes_are_the_cards(toy: Path) -> None:
    everything = [True] * 4
    equal = masks_of([0.5, 0.7, 0.7, 0.2], open_=everything, quota=1, threshold=0.7)
    dynamic = UNMASKINGS.get("low_confidence_dynamic")()
    assert dynamic.choose(equal).tolist() == [[False, True, False, False]]
    below = masks_of([0.5, 0.7, 0.7, 0.2], open_=everything, quota=1, threshold=0.69)
    assert dynamic.choose(below).tolist() == [[False, True, True, False]]
    assert MODES == {"quality": (0.7, 0.5), "speed": (0.5, 0.0)}
    assert (BlockConfig().sure, BlockConfig().sure_edit) == (0.9, 1.0)
    assert (BlockConfig(mode="speed").sure, BlockConfig(mode="speed").sure_edit) == (0.5, 0.0)
    # Threshold 1: one token a pass, even where all confidences are 1.
    one = SamplingParams(temperature=1.0, top_k=1, max_tokens=MAX, ignore_eos=True)
    [found] = build_engine(toy, "block", threshold=1.0).generate(prompts_of([SIZE]), one)
    assert found.num_forwards == MAX


def test_confidence_after_top_k_1_is_constant(toy: Path) -> None:
    """As published, a block is then decided at once. Greedy requests, and confidence=model, are judged by the
    model's own law."""
    prompts, num_blocks = prompts_of([SIZE]), MAX // SIZE
    one = SamplingParams(temperature=1.0, top_k=1, max_tokens=MAX, ignore_eos=True)
    [at_once] = build_engine(toy, "block").generate(prompts, one)
    assert at_once.num_forwards == num_blocks
    [judged] = build_engine(toy, "block", confidence="model").generate(prompts, one)
    [greedily] = build_engine(toy, "block").generate(prompts, greedy(max_tokens=MAX))
    assert judged.num_forwards > num_blocks
    assert (judged.token_ids, judged.num_forwards) == (greedily.token_ids, greedily.num_forwards)


@pytest.fixture(scope="module")
def mask_lover(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose likeliest token is the MASK wherever token 8 is likely."""
    directory = tmp_path_factory.mktemp("lover") / "toy"
    shutil.copytree(toy, directory)
    stored = load_file(directory / "model.safetensors")
    head = stored["lm_head.weight"]
    head[MASK_ID] = 4 * head[8]
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("options", [{}, {"threshold": 0.0}], ids=str)
def test_the_mask_is_never_decided(mask_lover: Path, options: dict[str, Any]) -> None:
    prompts = prompts_of((1, SIZE, 7, 9))
    slow = SlowBlocks(mask_lover, Rules(size=SIZE, mask=MASK_ID))
    with torch.no_grad():
        best = slow.model(torch.tensor([prompts[-1]])).logits[0].argmax(-1).tolist()
    assert MASK_ID in best
    engine = build_engine(mask_lover, "block", **options)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=MAX, ignore_eos=True)
        for answer in engine.generate(prompts, params):
            assert len(answer.token_ids) == MAX
            assert MASK_ID not in answer.token_ids


def test_a_mask_in_a_prompt_is_text_and_in_no_answer(toy: Path, slow: Slow) -> None:
    """Text may be tokenised to the MASK's id: it is read as a token like another, and none is left over.

    After nothing but MASKs all positions are equally confident up to rounding: there, decide from left to
    right."""
    prompts = [[3, MASK_ID], [9, *[MASK_ID] * SIZE], [5, 6, MASK_ID, 7, 8, MASK_ID]]
    mere_masks = [[MASK_ID], [MASK_ID] * SIZE, [MASK_ID] * (SIZE + 1)]
    for strategy, cases in (("low_confidence_dynamic", prompts), ("sequential", [*prompts, *mere_masks])):
        found = build_engine(toy, "block", strategy=strategy).generate(cases, greedy(max_tokens=2 * SIZE))
        sampling = Sampling(temperature=0, max_tokens=2 * SIZE)
        assert_answers(found, [slow.answer({"strategy": strategy}, prompt, sampling) for prompt in cases])
        assert all(MASK_ID not in answer.token_ids for answer in found)
