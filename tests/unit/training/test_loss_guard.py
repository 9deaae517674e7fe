"""A loss that is not finite stops the run before the optimizer changes a weight."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from idlm.errors import UserError
from idlm.train.step import LossGuard


def batch(item: int) -> dict[str, torch.Tensor]:
    return {"item_ids": torch.tensor([item])}


def guarded(run_dir: Path) -> tuple[LossGuard, torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    guard, optimizer = LossGuard(run_dir), torch.optim.AdamW([weight])
    guard.watch(optimizer)
    guard.watch(optimizer)
    return guard, weight, optimizer


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_bad_micro_batch_is_enough(value: str, index: int, tmp_path: Path) -> None:
    guard, weight, optimizer = guarded(tmp_path / "run")
    guard.begin(7, num_micro_batches=3)
    for number in range(3):
        guard.note(torch.tensor(float(value) if number == index else 1.0), batch(10 + number))
    with pytest.raises(UserError, match=rf"became {value} at step 7, data items \[{10 + index}\]"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(3))
    shown = json.loads((tmp_path / "run/bad-loss-step-7-rank-0.json").read_text())
    assert [part["item_ids"] for part in shown["micro_batches"]] == [[10], [11], [12]]
    assert shown["micro_batches"][index]["loss"] == value


def test_a_step_that_the_optimizer_skips_is_judged_too(tmp_path: Path) -> None:
    guard, _, _ = guarded(tmp_path)
    guard.begin(1, num_micro_batches=2)
    guard.note(torch.tensor(float("nan")), batch(0))
    guard.check()
    guard.note(torch.tensor(1.0), batch(1))
    with pytest.raises(UserError, match="IDLM-0503"):
        guard.check()


def test_a_step_that_deepspeed_left_out_ends_the_run(tmp_path: Path) -> None:
    guard, _, optimizer = guarded(tmp_path)
    guard.begin(3, num_micro_batches=1)
    guard.note(torch.tensor(1.0), batch(7))
    guard.check_skipped(optimizer)
    guard.check_skipped(SimpleNamespace(overflow=False))
    with pytest.raises(UserError, match=r"IDLM-0503.*gradients.*step 3.*\[7") as caught:
        guard.check_skipped(SimpleNamespace(overflow=True))
    assert str(tmp_path) in caught.value.fix


def test_finite_losses_pass_and_a_new_step_starts_afresh(tmp_path: Path) -> None:
    guard, weight, optimizer = guarded(tmp_path)
    guard.begin(1, num_micro_batches=1)
    guard.note(torch.tensor(float("nan")), batch(0))
    guard.begin(2, num_micro_batches=2)
    guard.note(torch.tensor(3.0), batch(1))
    guard.note(torch.tensor(-4.0), batch(2))
    optimizer.step()
    assert not torch.equal(weight, torch.ones(3))
    assert not list(tmp_path.iterdir())


def test_a_loss_is_kept_without_its_graph(tmp_path: Path) -> None:
    guard, weight, optimizer = guarded(tmp_path)
    guard.begin(1, num_micro_batches=1)
    guard.note((weight * 2).sum(), batch(0))
    assert not any(loss.requires_grad for loss in guard._losses)
    optimizer.step()
