"""A run continues from its own intact checkpoint, configuration and rows per step, or says why it cannot."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from idlm.checkpoint import FOR_PEOPLE, verify
from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.publish import clear_stale, publish
from idlm.train.check import check_config
from idlm.train.checkpoint import save as reshard
from idlm.train.checkpoint.resume import (
    SHAPE_FILE,
    RunShape,
    choose_checkpoint,
    config_hash,
    config_text,
    needs_resharding,
    store_config,
)
from idlm.train.config.schema import TrainConfig, with_accumulation
from idlm.train.loop.progress import read_metrics
from idlm.train.loop.trainer import StopRequests
from idlm.train.prepare import remember_base
from tests.errors import refused

SHAPE = RunShape(world_size=8, batch_size=1, accumulation=4, zero_stage=2)


def config_of(folder: Path, **changes: object) -> TrainConfig:
    values = {"output_dir": folder / "out", "objective": "ar", "train.steps": 9} | changes
    return compose("train", TrainConfig, [f"{key}={value}" for key, value in values.items()])


def save(folder: Path, step: int, shape: RunShape = SHAPE) -> Path:
    target = folder / "out" / "run" / f"checkpoint-{step}"
    with publish(target) as staging:
        (staging / SHAPE_FILE).write_text(json.dumps(asdict(shape)))
        (staging / "global_step").mkdir()
        (staging / "global_step" / "optim_states.pt").write_bytes(bytes(range(256)) * step)
    return target


def test_the_newest_intact_checkpoint_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newer = save(tmp_path, 4), save(tmp_path, 10)
    assert choose_checkpoint(config_of(tmp_path), SHAPE) == newer
    (newer / "global_step" / "optim_states.pt").write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        assert choose_checkpoint(config_of(tmp_path), SHAPE) == older
    assert "checkpoint-10" in caplog.text and "optim_states.pt" in caplog.text
    assert not newer.exists() and (newer.parent / "damaged-checkpoint-10-1").is_dir()
    save(tmp_path, 10)
    assert choose_checkpoint(config_of(tmp_path), SHAPE) == newer, "its place is free again"


def test_a_file_not_in_the_manifest_is_refused(tmp_path: Path) -> None:
    target = save(tmp_path, 4)
    verify(target, sealed=True)
    (target / "global_step" / "mp_rank_00x_model_states.pt").write_bytes(b"")
    verify(target)
    refused("mp_rank_00x_model_states", verify, target, sealed=True)
    refused("IDLM-0302", choose_checkpoint, config_of(tmp_path, resume=target), SHAPE)


def test_what_dead_publishers_left_is_cleared(tmp_path: Path) -> None:
    run = save(tmp_path, 4).parent
    stale = run / ".checkpoint-8.staging-00000000"
    (stale / "files").mkdir(parents=True)
    ready = run / ".checkpoint-12.staging-00000000"
    ready.mkdir()
    shutil.copytree(run / "checkpoint-4", ready / "ready")
    with publish(run / "checkpoint-6") as alive:
        clear_stale(run)
        assert alive.is_dir(), "a living publisher is left alone"
        assert not stale.exists() and not ready.exists()
        (alive / "a").write_text("")
    verify(run / "checkpoint-12")


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"world_size": 4}, "IDLM-0512", ("8 processes x 1 rows x 4", "= 16 rows", "train.accumulation=8")),
        ({"world_size": 5}, "IDLM-0512", ("5 does not",)),
        ({"world_size": 4, "accumulation": 8}, None, ()),
        ({"batch_size": 2, "accumulation": 2}, None, ()),
    ],
)
def test_the_rows_of_a_step_stay(
    tmp_path: Path, changes: dict[str, int], code: str | None, words: tuple[str, ...]
) -> None:
    target = save(tmp_path, 4)
    now = replace(SHAPE, **changes)
    if code is None:
        assert choose_checkpoint(config_of(tmp_path), now) == target
        return
    error = refused(code, choose_checkpoint, config_of(tmp_path), now)
    assert all(word in str(error) for word in words), str(error)


def test_zero_parts_of_other_processes_are_cut_anew_and_a_damaged_cut_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = save(tmp_path, 4)
    now = replace(SHAPE, world_size=4, accumulation=8)
    assert needs_resharding(now, target) and not needs_resharding(SHAPE, target)
    assert not needs_resharding(now, save(tmp_path, 5, replace(SHAPE, zero_stage=None)))
    made: list[Path] = []

    def convert(checkpoint: Path, staging: Path) -> None:
        made.append(checkpoint)
        (staging / "part.pt").write_bytes(b"abc")

    monkeypatch.setattr(reshard, "_convert", convert)
    resharded = reshard.reshard(target)
    assert resharded == reshard.reshard(target) and made == [target], "an intact one is kept"
    (resharded / "part.pt").write_bytes(b"abd")
    reshard.reshard(target)
    assert made == [target, target] and (resharded / "part.pt").read_bytes() == b"abc"
    assert "part.pt" in caplog.text
    reshard.remove_resharded(target.parent)
    assert not resharded.exists() and target.exists()


def test_what_deepspeed_cannot_convert_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    target = save(tmp_path, 4)
    refused(r"IDLM-0513.*checkpoint-4", reshard.reshard, target)
    assert not (target.parent / "resharded" / target.name).exists()


def test_a_run_begun_anew_moves_the_stages_of_the_old_one_aside_too(tmp_path: Path) -> None:
    save(tmp_path, 4)
    stage = tmp_path / "out" / "stages" / "1-stride-2"
    stage.mkdir(parents=True)
    assert choose_checkpoint(config_of(tmp_path, resume="never"), SHAPE) is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run.old-1", "stages.old-1"]


def test_the_stored_configuration_is_compared_and_read_back(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    save(tmp_path, 4)
    store_config(config)
    stored = tmp_path / "out" / "run" / "config.yaml"
    again = compose("train", TrainConfig, [f"config={stored}"])
    assert again == config and config_hash(again) == config_hash(config)
    assert choose_checkpoint(config_of(tmp_path, **{"train.log_every": 3}), SHAPE) is not None
    other = config_of(tmp_path, **{"train.learning_rate": 0.5})
    assert config_hash(other) != config_hash(config)
    refused(r"learning_rate: 1e-05 -> 0.5", choose_checkpoint, other, SHAPE)
    with pytest.raises(UserError, match=r"schedule: 'cosine' -> 'wsd'"):
        choose_checkpoint(config_of(tmp_path, **{"train.schedule": "wsd"}), SHAPE)
    # A run of a version without the option goes on.
    content = yaml.safe_load(stored.read_text())
    del content["train"]["schedule"]
    stored.write_text(yaml.safe_dump(content))
    assert choose_checkpoint(config, SHAPE) is not None
    stored.write_text("a: [")
    refused("IDLM-0303", choose_checkpoint, config, SHAPE)


@pytest.mark.sweep_but(message="IDLM-0303")
@pytest.mark.sweep_but(message="IDLM-0303.*month")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"1: 2", "IDLM-0507.*1: 2"),
        (b"a: 2026-13-45", "IDLM-0303.*month"),
        (b"[" * 3000, "IDLM-0303.*RecursionError"),
        (b"\xff", "IDLM-0303"),
    ],
)
def test_a_damaged_configuration_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    config = config_of(tmp_path)
    save(tmp_path, 4)
    store_config(config)
    (tmp_path / "out" / "run" / "config.yaml").write_bytes(text)
    refused(f"(?s){message}", choose_checkpoint, config, SHAPE)


def test_an_adapter_goes_on_with_the_base_that_it_was_started_on(tmp_path: Path) -> None:
    remember_base(tmp_path, "a", is_continued=False)
    remember_base(tmp_path, "a", is_continued=True)
    refused("IDLM-0518", remember_base, tmp_path, "b", is_continued=True)
    remember_base(tmp_path, "b", is_continued=False)
    remember_base(tmp_path, "b", is_continued=True)


def test_damaged_metrics_do_not_stop_a_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1}\n{"step": 9}\n'
    path.write_bytes(b'\xff\n3\n{}\n{"step": "x"}\n' + b"[" * 100_000 + b"\n" + good + b'{"step"')
    assert read_metrics(path) == [{"step": 1}, {"step": 9}]
    assert read_metrics(path, up_to_step=4) == [{"step": 1}]
    assert read_metrics(tmp_path) == []


NOT_ALLOWED = (
    *(f"{key}={value}" for key in ("train.learning_rate",) for value in ("nan", "inf")),
    *("train.row_length=0", "train.epochs=nan", "train.max_grad_norm=nan", "output_dir=''"),
)


@pytest.mark.parametrize("argument", NOT_ALLOWED)
def test_numbers_that_are_none_are_refused_by_name(tmp_path: Path, argument: str) -> None:
    key = argument.partition("=")[0]
    values = {"output_dir": tmp_path / "out", "objective": "ar", "train.steps": 9}
    arguments = [f"{name}={value}" for name, value in values.items() if name != key]
    refused(f"(?s)IDLM-0504.*{key}", check_config, compose("train", TrainConfig, [*arguments, argument]))


@pytest.mark.parametrize("key", ["output_dir", "model.path", "data.path", "train.deepspeed"])
def test_an_empty_path_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "private.jsonl"):
        Path(name).write_text("{}\n")
    values = {"output_dir": "out", "objective": "ar", "train.steps": 9} | {key: ""}
    with pytest.raises(UserError, match=f"(?s)IDLM-0504.*{key} is empty"):
        check_config(compose("train", TrainConfig, [f"{name}={value}" for name, value in values.items()]))


def test_held_out_data_is_looked_for_before_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{}\n")
    changes = {"data.source": "jsonl", "data.path": tmp_path / "data.jsonl", "eval.every": 1}
    with pytest.raises(UserError, match=r"(?s)IDLM-0504.*eval\.path.*/nope"):
        check_config(config_of(tmp_path, **changes, **{"eval.path": "/nope"}))
    for path in ("data.jsonl", "*.jsonl"):
        error = refused(
            "IDLM-0504", check_config, config_of(tmp_path, **changes, **{"eval.path": tmp_path / path})
        )
        assert "eval.path" not in error.message


@pytest.mark.parametrize("name", ["vocab.json", "idlm_config.json", "generation_config.json", "README.md"])
def test_files_of_somebody_else_are_refused_before_training(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}\n")
    shown = {}
    for adapter in ("null", "{rank: 2}"):
        error = refused("IDLM-0504", check_config, config_of(tmp_path, adapter=adapter))
        shown[adapter] = f"has a {name} that idlm did not write" in error.message
    is_refused = name not in FOR_PEOPLE
    assert shown == {"null": is_refused, "{rank: 2}": is_refused}


def test_a_frozen_configuration_is_whole_and_has_no_unknown_key(tmp_path: Path) -> None:
    frozen = tmp_path / "frozen.yaml"
    frozen.write_text(config_text(config_of(tmp_path)))
    taken = compose("train", TrainConfig, [f"config={frozen}", "resume=never"])
    assert taken == replace(config_of(tmp_path), resume="never")
    refused("whole configuration", compose, "train", TrainConfig, [f"config={frozen}", "recipe=tiny"])
    frozen.write_text(config_text(config_of(tmp_path)).replace("accumulation:", "acumulation:"))
    refused("acumulation", compose, "train", TrainConfig, [f"config={frozen}"])
    for content, code in (("[1]", "IDLM-0105"), ("a: [", "IDLM-0105")):
        frozen.write_text(content)
        refused(code, compose, "train", TrainConfig, [f"config={frozen}"])
    refused("IDLM-0104", compose, "train", TrainConfig, ["config=/nowhere.yaml"])


@pytest.mark.parametrize(
    ("world_size", "batch_size", "accumulation"), [(8, 1, 4), (4, 1, 8), (1, 2, 16), (32, 1, 1)]
)
def test_the_rows_of_a_step_settle_the_accumulation(
    tmp_path: Path, world_size: int, batch_size: int, accumulation: int
) -> None:
    config = config_of(tmp_path, **{"train.global_batch": 32, "train.batch_size": batch_size})
    settled = with_accumulation(config, world_size=world_size)
    assert settled.train.accumulation == accumulation
    assert with_accumulation(settled, world_size=world_size) == settled


def test_a_number_of_processes_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, **{"train.global_batch": 32})
    for world_size in (5, 64):
        error = refused("IDLM-0516", with_accumulation, config, world_size=world_size)
        assert f"{world_size} processes" in error.message
        assert "1, 2, 4, 8, 16, 32 processes" in error.fix
    assert "train.global_batch=30" in _fix(config, 5)
    other = config_of(tmp_path, **{"train.global_batch": 32, "train.accumulation": 3})
    assert "give one of them" in _fix(other, 8)


def _fix(config: TrainConfig, world_size: int) -> str:
    error = refused("IDLM-0516", with_accumulation, config, world_size=world_size)
    return error.fix


def test_a_background_job_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """Without job control a shell starts `idlm-train ... &` with SIGINT ignored; SIGTERM still stops it."""
    stop, before = StopRequests(), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop.listening():
            signal.raise_signal(signal.SIGINT)
            assert stop.received is None
            signal.raise_signal(signal.SIGTERM)
            assert stop.received == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop = StopRequests()
        with stop.listening():
            signal.raise_signal(signal.SIGINT)
        assert stop.received == signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)


def test_one_keystroke_that_arrives_twice_saves_and_a_second_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stop = StopRequests()
    stop._note(signal.SIGINT, None)
    now += 0.5
    stop._note(signal.SIGTERM, None)
    assert stop.received == signal.SIGINT, "the launcher passed the same keystroke on"
    now += 5.0
    with pytest.raises(KeyboardInterrupt):
        stop._note(signal.SIGINT, None)
