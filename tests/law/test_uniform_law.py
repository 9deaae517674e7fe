"""Sampling law with random ids in place of masks (`noise_range`), of whole checkpoints and of R-ISD; faults
of the noise that must be seen.

By default few draws of one case; more draws of others:

    .venv/bin/python -m pytest tests/law/test_uniform_law.py -m "sweep or not sweep"
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from idlm.infer.engine import Engine
from idlm.infer.runtime.model_runner import Runner
from idlm.infer.state.batch import StepPlan, WantedRows
from idlm.kernels import sampling
from idlm.kernels.step_rows import Noise, RowTable, op
from idlm.semantics import Semantics
from tests.adapters import write_adapter
from tests.law.harness import NEUTRAL, NUM_TOKENS, PROMPT, VOCAB, build_engine, fits, misfits, sample
from tests.law.stored_q import store_q_of

LEVEL = 1e-6 / 128
"""The family's level divided by at least the number of chi-square tests of this file."""
SETTINGS = ((PROMPT, NEUTRAL), (PROMPT, replace(NEUTRAL, temperature=0.7, top_p=0.9)))
LOOKS = 1_000, 6_000
CASES = [(4, "tree"), (4, "alternate"), (2, "cold"), (3, "branch"), (4, "branch_2")]


@pytest.fixture(scope="module")
def whole(law_toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("uniform")
    shutil.copytree(law_toy, directory, dirs_exist_ok=True)
    Semantics(noise_range=(0, VOCAB), stride=NUM_TOKENS).save(directory)
    return directory


@pytest.fixture(scope="module")
def adapter(law_toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    options = {"noise_range": (1, VOCAB), "stride": NUM_TOKENS, "size": 0.7}
    return write_adapter(directory, law_toy, mask_token_id=None, **options)


def law_holds(law_toy: Path, engine: Engine, num_draws: int) -> bool:
    sampled = sample(engine, SETTINGS, num_draws, per_request=50)
    assert 0.2 < sampled.acceptance < 0.95, sampled.acceptance
    return not misfits(fits(law_toy, sampled), LEVEL)


@pytest.mark.sweep_but("3-branch")
@pytest.mark.parametrize(("stride", "strategy"), CASES)
def test_random_ids_leave_the_law(law_toy: Path, whole: Path, stride: int, strategy: str) -> None:
    engine = build_engine(whole, "isd", stride=stride, rejection_strategy=strategy)
    assert law_holds(law_toy, engine, 3_000)


@pytest.mark.sweep
@pytest.mark.parametrize(("stride", "strategy"), [(4, "tree"), (3, "branch"), (4, "branch_2")])
def test_an_adapter_with_random_ids_leaves_the_law_of_the_base(
    law_toy: Path, adapter: Path, stride: int, strategy: str
) -> None:
    engine = build_engine(adapter, "isd", stride=stride, rejection_strategy=strategy)
    assert law_holds(law_toy, engine, 3_000)


def _stream_at(noise: Noise, lane_R: Tensor, draws_R: Tensor | int, *, later: int = 0) -> Tensor:
    seeds_R, samples_R, steps_R = (numbers_Z[lane_R] for numbers_Z in noise[:3])
    return sampling.random_words(seeds_R, samples_R, steps_R + later, torch.as_tensor(draws_R))


def _ids(patch: pytest.MonkeyPatch, words: Callable[[Noise, Tensor, Tensor], Tensor]) -> None:
    """Give MASK rows ids by `words(noise, lane_R, depth_R)`."""

    def noise(noise: Noise, table: RowTable, lane_R: Tensor, index: tuple[Tensor, Tensor]) -> Tensor:
        depth_R = (index[1] - table.branch_YW[index]).clamp(min=0)
        return noise.low + (words(noise, lane_R, depth_R) * (noise.high - noise.low) >> 32)

    patch.setattr(op, "_noise", noise)


def from_the_numbers_that_draw_the_drafts(patch: pytest.MonkeyPatch) -> None:
    _ids(patch, lambda noise, lane_R, depth_R: _stream_at(noise, lane_R, 4 + depth_R))


def from_the_numbers_that_test_the_drafts(patch: pytest.MonkeyPatch) -> None:
    _ids(patch, lambda noise, lane_R, depth_R: _stream_at(noise, lane_R, depth_R, later=1))


def with_q_of_another_noise(patch: pytest.MonkeyPatch) -> None:
    """What is stored as q is that of the same rows with other ids, computed in a second pass."""
    plain, seen = Runner.forward, dict[str, Tensor]()

    def forward(self: Runner, plan: StepPlan) -> WantedRows:
        assert plan.is_mask_R is not None
        others_R = torch.where(plan.is_mask_R, (plan.token_ids_R + 1) % VOCAB, plan.token_ids_R)
        seen["logits"] = plain(self, replace(plan, token_ids_R=others_R)).logits().clone()
        return plain(self, plan)

    patch.setattr(Runner, "forward", forward)
    store_q_of(patch, seen)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "plant",
    [
        from_the_numbers_that_draw_the_drafts,
        from_the_numbers_that_test_the_drafts,
        with_q_of_another_noise,
    ],
)
def test_wrong_noise_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], law_toy: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    engine = build_engine(whole, "isd", num_lanes=512, stride=4, rejection_strategy="cold")
    assert not all(law_holds(law_toy, engine, num_draws) for num_draws in LOOKS)


def _answers(checkpoint: Path, order: list[int], **options: int) -> list[tuple[int, ...]]:
    """Answers of the same requests, submitted in another order, back in their own."""
    engine = build_engine(
        checkpoint, "isd", stride=4, rejection_strategy="tree", **{"num_lanes": 8, **options}
    )
    prompts = [[number % VOCAB, 2, 1][: 1 + number % 3] for number in order]
    params = [replace(NEUTRAL, seed=number) for number in order]
    found = dict(zip(order, engine.generate(prompts, params), strict=True))
    return [found[number].token_ids for number in sorted(order)]


def test_noise_does_not_depend_on_the_batch(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests together, in two orders, three and one at a time; a fault that numbers lanes is seen."""
    ascending, other = list(range(8)), [5, 2, 7, 0, 3, 6, 1, 4]
    expected = _answers(whole, ascending)
    assert _answers(whole, other) == expected
    assert _answers(whole, other, num_lanes=3) == _answers(whole, ascending, num_lanes=1) == expected

    def by_lane(noise: Noise, lane_R: Tensor, depth_R: Tensor) -> Tensor:
        return sampling.random_words(lane_R, depth_R, noise.steps_Z[lane_R], depth_R)

    _ids(monkeypatch, by_lane)
    assert _answers(whole, other) != _answers(whole, ascending)
