"""A watched run: held-out data, W&B, the report."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from idlm.train import cli
from idlm.train.config.schema import TensorboardConfig, TrainConfig
from idlm.train.data.packing import held_out_flags
from idlm.train.loop.progress import EVALUATION, read_metrics, training_records
from idlm.train.loop.trackers import open_trackers
from idlm.train.report import SampleReport
from tests.integration.training.stopped_runs import failing_after
from tests.integration.training.test_train_tiny import arguments

STAGES = "[{stride: 2, steps: 2}, {stride: 3, steps: 3}]"
WATCHED = {
    "train.stages": STAGES,
    "train.save_every": 2,
    "eval.every": 2,
    "eval.num_items": 3,
    "report.enabled": "true",
    "plan.tflops": 0.01,
}


class Service:
    """Stands in for wandb; `broken_at`: the record at which the service fails."""

    def __init__(self, *, broken_at: int | None = None) -> None:
        self.logged: list[tuple[int, dict]] = []
        self.exit_code: int | None = None
        self.broken_at = broken_at
        self.given: dict = {}

    def module(self) -> types.ModuleType:
        module = types.ModuleType("wandb")
        vars(module).update(init=self.init, Settings=lambda **values: values)
        return module

    def init(self, **given):
        self.given = given
        return self

    def log(self, values: dict, *, step: int) -> None:
        if len(self.logged) == self.broken_at:
            raise ConnectionError("the service is gone")
        self.logged.append((step, values))

    def finish(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


class Board:
    """Stands in for TensorBoard's SummaryWriter."""

    folders: ClassVar[dict[str, list[tuple[str, float, int]]]] = {}

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        self.written = self.folders.setdefault(folder, [])

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))

    def flush(self) -> None: ...

    def close(self) -> None:
        self.written.append(("closed", 0.0, 0))


def boards() -> types.ModuleType:
    module = types.ModuleType("torch.utils.tensorboard")
    vars(module).update(SummaryWriter=Board)
    return module


def nothing(directory: Path, num_samples: int) -> SampleReport:
    return SampleReport()


@pytest.fixture(scope="module")
def watched(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Service]:
    output, service = tmp_path_factory.mktemp("watched") / "out", Service()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", service.module())
        patch.setitem(sys.modules, "torch.utils.tensorboard", boards())
        changes = WATCHED | {"wandb.mode": "offline", "wandb.name": "a run", "tensorboard.enabled": "true"}
        assert cli.main(arguments(base, output, **changes), sampler=nothing) == 0
    return output, service


def records_of(output: Path) -> list[dict]:
    return read_metrics(output / "run" / "metrics.jsonl")


def test_watching_changes_no_weight(watched: tuple[Path, Service], base: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    assert cli.main(arguments(base, plain, **{"train.stages": STAGES})) == 0
    with_eyes, without = (load_file(path / "model.safetensors") for path in (watched[0], plain))
    assert all(torch.equal(value, with_eyes[name]) for name, value in without.items())


def test_held_out_data_is_measured_at_every_stage_end(watched: tuple[Path, Service]) -> None:
    evaluations = [record for record in records_of(watched[0]) if EVALUATION in record]
    assert [(record["step"], record["stride"]) for record in evaluations] == [(2, 2), (4, 3), (5, 3)]
    for record in evaluations:
        assert len(record["acceptance"]) == record["stride"] - 1
        assert all(0 < value <= 1 for value in record["acceptance"])
        assert record["mask_loss"] > 0 and record["clean_loss"] > 0


def test_metrics_hold_token_counts_and_speed(watched: tuple[Path, Service]) -> None:
    records = training_records(records_of(watched[0]))
    assert [(record["first_item"], record["last_item"]) for record in records] == [
        (2 * step, 2 * step + 1) for step in range(5)
    ]
    for record in records:
        assert record["gradient_norm"] > 0
        assert record["tokens_per_second"] == pytest.approx(record["num_tokens"] / record["seconds"])
        assert record["tflops_per_gpu"] > 0
        assert "mfu" not in record, "the peak of a CPU is not known"


def test_tracking_mirrors_the_metrics(watched: tuple[Path, Service]) -> None:
    output, service = watched
    assert service.given["mode"] == "offline" and service.given["name"] == "a run"
    assert service.given["config"]["train"]["batch_size"] == 2
    assert service.exit_code == 0
    expected = [(r["step"], r["mask_loss"]) for r in records_of(output)]
    logged = [(step, v.get("mask_loss", v.get("held_out/mask_loss"))) for step, v in service.logged]
    assert logged == expected
    assert service.logged[-1][1]["held_out/acceptance/2"] == records_of(output)[-1]["acceptance"][1]


@pytest.mark.sweep
def test_a_service_that_fails_costs_its_curves_only(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(broken_at=1)
    monkeypatch.setitem(sys.modules, "wandb", service.module())
    changes = {"train.stages": "[{stride: 2, steps: 4}]", "wandb.mode": "online"}
    assert cli.main(arguments(base, tmp_path / "out", **changes)) == 0
    assert len(service.logged) == 1
    assert len(records_of(tmp_path / "out")) == 4


def test_tensorboard_gets_the_curves_of_every_record(watched: tuple[Path, Service]) -> None:
    written = Board.folders[str(watched[0] / "run" / "tensorboard")]
    sent = [(name, value, step) for step, values in watched[1].logged for name, value in values.items()]
    assert written == [*sent, ("closed", 0.0, 0)] and len(sent) > 50


def test_a_tracker_that_is_new_gets_the_records_before_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", boards())
    records = [{"step": step, "mask_loss": 1.0 / step, "acceptance": [0.5, 0.25]} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records[:2]))
    config = TrainConfig(tensorboard=TensorboardConfig(enabled=True))
    for _ in range(2):
        [tracker] = open_trackers(config, tmp_path)
        for record in records[1:]:
            tracker.log(record)
    written = Board.folders[str(tmp_path / "tensorboard")]
    assert [step for name, _, step in written if name == "mask_loss"] == [1, 2, 3, 3]
    assert [value for name, value, _ in written if name == "acceptance/2"] == [0.25] * 4


@pytest.mark.sweep
def test_a_resumed_run_goes_on_in_the_same_run_of_the_service(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save every second step and a death in step 4: steps 3 and 4 are trained again, and are sent once."""
    changes = WATCHED | {"wandb.mode": "offline", "report.enabled": "false"}
    sessions = [Service(), Service()]
    monkeypatch.setitem(sys.modules, "wandb", sessions[0].module())
    with failing_after(3), pytest.raises(RuntimeError, match="power cut"):
        cli.main(arguments(base, tmp_path / "out", **changes))
    monkeypatch.setitem(sys.modules, "wandb", sessions[1].module())
    assert cli.main(arguments(base, tmp_path / "out", **changes)) == 0
    first, second = (session.given for session in sessions)
    assert first["id"] == second["id"] and first["resume"] == second["resume"] == "allow"
    assert (sessions[0].exit_code, sessions[1].exit_code) == (1, 0)
    sent = [
        (step, name)
        for one in sessions
        for step, values in one.logged
        for name in values
        if "mask_loss" in name
    ]
    expected = [
        (record["step"], "held_out/mask_loss" if EVALUATION in record else "mask_loss")
        for record in records_of(tmp_path / "out")
    ]
    assert sent == expected and len(sessions[0].logged) == 4, "three steps and an evaluation"
    other = Service()
    monkeypatch.setitem(sys.modules, "wandb", other.module())
    assert cli.main(arguments(base, tmp_path / "out", **changes, resume="never")) == 0
    assert other.given["id"] != first["id"] and len(other.logged) == len(expected)


def test_tracking_that_cannot_start_is_refused_before_training(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    changes = {"wandb.mode": "offline", "tensorboard.enabled": "true"}
    for dry_run in ("true", "false"):
        assert cli.main(arguments(base, tmp_path / "out", **changes, dry_run=dry_run)) == 2
        shown = capsys.readouterr().err
        assert "IDLM-0504" in shown and "pip install wandb" in shown and "[tensorboard]" in shown


def test_the_report_compares_with_the_plan(watched: tuple[Path, Service]) -> None:
    text = (watched[0] / "report.md").read_text()
    for part in (
        "| 1 | 2 | 2 |",
        "| 2 | 3 | 5 |",
        "stages/1-stride-2",
        "(estimated",
    ):
        assert part in text


def test_a_share_of_a_file_is_held_out_and_never_trained(base: Path, tmp_path: Path) -> None:
    from idlm.config.compose import compose
    from idlm.train.config.schema import TrainConfig
    from idlm.train.objectives.idlm import IntrospectiveConsistency
    from idlm.train.prepare import prepare_data, prepare_tokenizer

    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"prompt": f"Sam has {n}", "response": f"{n} and {n * n}"}) for n in range(40)]
    path.write_text("\n".join(lines))
    changes = {"data.source": "jsonl", "data.path": path, "eval.every": 1, "eval.holdout": 0.2}
    config = compose("train", TrainConfig, arguments(base, tmp_path / "out", **changes))
    objective = IntrospectiveConsistency(mask_token_id=165, mask_region="response")
    data = prepare_data(config, prepare_tokenizer(config), objective, 165, 1)
    flags = held_out_flags(config.eval, data.dataset.source, seed=config.data.seed)
    assert flags is not None and 1 <= flags.sum() < 20
    assert data.held_out is not None
    trained = {i for row in range(data.dataset.rows_per_epoch() or 0) for i in data.dataset.rows.members(row)}
    held_out = {
        i for row in range(data.held_out.rows_per_epoch() or 0) for i in data.held_out.rows.members(row)
    }
    assert not trained & held_out
    assert trained | held_out == set(range(40))
    assert data.dataset.rows.num_dropped == data.held_out.rows.num_dropped == 0


@pytest.mark.sweep
def test_a_file_of_the_run_that_cannot_be_written_is_named(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Path.open

    def full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if self.name == f"report.{os.getpid()}.tmp" and mode[0] in "aw":
            raise OSError(27, "File too large")
        return plain(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Path, "write_text", lambda self, text, **_: open_text(full, self, text))
    changes = WATCHED | {"train.stages": "[{stride: 2, steps: 2}]"}
    assert cli.main(arguments(base, tmp_path / "out", **changes), sampler=nothing) == 2
    shown = capsys.readouterr().err
    assert "IDLM-0301" in shown and "report" in shown and "File too large" in shown


def open_text(opened: Any, path: Path, text: str) -> None:
    with opened(path, "w") as file:
        file.write(text)
