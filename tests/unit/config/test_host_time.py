"""The time of a run on a CPU follows from rates that are measured there and from what its rows need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from idlm.config.compose import compose
from idlm.train.config.schema import TrainConfig
from idlm.train.planning import step_time as host_time
from idlm.train.planning.dry_run import meta_model
from idlm.train.planning.estimate import Estimate, estimate_run
from idlm.train.planning.step_time import HostRates
from idlm.train.prepare import make_objective, prepare_adapter, prepare_data, prepare_tokenizer

MASK = 170
RATES = HostRates(layers=1e9, head=2e9, gradients=1e7, optimizer=1e6, how="given")


def estimate(tmp_path: Path, *overrides: str, recipe: str = "tiny") -> Estimate:
    given = [f"recipe={recipe}", "train.steps=8", f"output_dir={tmp_path / 'out'}", *overrides]
    config = compose("train", TrainConfig, given)
    tokenizer = prepare_tokenizer(config)
    model = meta_model(config, tokenizer)
    prepare_adapter(config, model, None)
    data = prepare_data(config, tokenizer, make_objective(config, model, tokenizer, MASK), MASK, 1)
    found = estimate_run(config, model, data.dataset, data.curriculum, gpus=1, num_sampled=2, measures=True)
    assert found is not None and found.time is not None
    return found


def test_the_plan_is_the_rows_flops_over_the_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "measure", lambda *_: RATES)
    once, batch = estimate(tmp_path), estimate(tmp_path, "train.batch_size=12")
    assert once.time is not None and batch.time is not None and once.time.how == "given"
    parts, twice = once.time.parts, batch.time.parts
    assert twice["head"] == pytest.approx(2 * parts["head"], rel=0.1)
    assert twice["layers"] == pytest.approx(2 * parts["layers"], rel=0.1)
    assert twice["optimizer"] == parts["optimizer"] == once.shape.num_parameters / RATES.optimizer
    assert twice["gradients"] == parts["gradients"] == once.shape.num_parameters / RATES.gradients
    monkeypatch.setattr(host_time, "measure", lambda *_: replace(RATES, layers=5e8))
    slow = estimate(tmp_path).time
    assert slow is not None and slow.parts == pytest.approx(parts | {"layers": 2 * parts["layers"]})
    assert slow.seconds == 8 * sum(slow.parts.values())


@pytest.mark.sweep_but(override="train.threads=1")
@pytest.mark.parametrize(
    ("recipe", "override"),
    [("tiny", "train.bf16=true"), ("tiny_lora", "train.batch_size=1"), ("tiny_block", "train.threads=1")],
)
def test_a_layer_and_the_head_are_timed_in_every_kind_of_run(
    recipe: str, override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_time, "ENOUGH", 0.0)
    found = estimate(tmp_path, override, recipe=recipe)
    assert found.time is not None and "one decoder layer" in found.time.how
    assert all(seconds > 0 for seconds in found.time.parts.values())


def test_a_shape_that_memory_does_not_hold_is_planned_by_a_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_time, "ENOUGH", 0.0)
    monkeypatch.setattr(host_time, "host_memory", lambda: (0, 0))
    found = estimate(tmp_path).time
    assert found is not None and "a matrix product" in found.how and "assumed" in found.how
