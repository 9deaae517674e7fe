"""The study: equal FLOPs, processes that fail or are late, records of a toy run."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.studies import study, study_worker
from benchmarks.training.studies.study_arms import (
    ARMS,
    BASE,
    CHAINS,
    COLDS,
    CONTROL,
    DETERMINISTIC,
    FIXED,
    SIZES,
    chosen_arms,
    flops_per_step,
    train_arguments,
)
from benchmarks.training.studies.study_report import read_records
from benchmarks.training.studies.study_worker import Job, is_whole, record_path
from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.semantics import Semantics
from idlm.tasks import Task
from idlm.train.config.schema import TrainConfig
from idlm.train.loop.trainer import IdlmTrainer
from idlm.train.planning.dry_run import meta_model
from idlm.train.prepare import prepare_tokenizer


def job_of(folder: Path, name: str) -> Job:
    return Job(
        name=name,
        seed=0,
        size="toy",
        steps=4,
        flops=1.0,
        num=2,
        max_tokens=8,
        batch=4,
        device="cpu",
        workers=0,
        folder=str(folder / "0"),
        results=str(folder / "results"),
        keep=str(folder),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three arms on it, in this process."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "0").mkdir()
    study_worker.write_samples(folder / "0", 2)
    for name in (BASE, "idlm_4", "lora_4", "no_shift"):
        study_worker.run_arm(job_of(folder, name))
    return folder


def test_arms_are_trained_and_decoded_as_they_say(trained: Path) -> None:
    assert Semantics.load(trained / "0" / "idlm_4").stride == 4
    assert Semantics.load(trained / "0" / "lora_4").gated
    assert Semantics.load(trained / "0" / "no_shift").stride == 1
    records = read_records([trained / "results"])
    assert [record["name"] for record in records] == [BASE, "idlm_4", "lora_4", "no_shift"]
    assert [len(record["trained"]["acceptance"]) for record in records] == [0, 3, 3, 3]
    for record in records:
        found = [(cell["strategy"], cell["temperature"], cell["task"]) for cell in record["cells"]]
        cells = ARMS[record["name"]].cells
        assert found == [(cell.label, cell.temperature, chain) for cell in cells for chain in CHAINS]
        assert not any(cell["num_failed"] for cell in record["cells"])
        assert record["trained"]["tokens"] > 0


def test_greedy_answers_of_strategies_are_those_of_ar(trained: Path) -> None:
    """A gated adapter changes no answer of its base, and no strategy changes one of the model that drafts."""
    for record in read_records([trained / "results"]):
        shares = [cell["equal_to_ar"] for cell in record["cells"] if cell["temperature"] == 0]
        assert shares == [1.0] * len(shares)


def test_a_kept_base_is_taken_by_the_next_lease(trained: Path, tmp_path: Path) -> None:
    study.take_base(trained / "study_0_base.tar", tmp_path / BASE)
    for name in ("model.safetensors", "config.json", "manifest.json"):
        assert (tmp_path / BASE / name).read_bytes() == (trained / "0" / BASE / name).read_bytes()
    assert (tmp_path / BASE / study_worker.TRAINED).is_file()


def test_a_finished_arm_is_not_made_again(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "WORKER", ("-c", "raise SystemExit(3)"))
    words = [f"folder={trained}", f"known={trained / 'results'}", f"results={trained / 'results'}"]
    assert study.study([*words, "size=toy", "device=cpu", "num=2", "arms=base,idlm_4"]) == 0
    assert "idlm_4" in capsys.readouterr().out
    assert study.study([*words, "size=toy", "device=cpu", "num=2", "arms=base,idlm_4,ar"]) == 1
    assert "ar: status 3" in capsys.readouterr().out


def test_a_record_without_its_checkpoint_is_refused(trained: Path, tmp_path: Path) -> None:
    words = [f"folder={tmp_path}", f"known={trained / 'results'}", f"results={tmp_path}"]
    with pytest.raises(UserError, match="IDLM-0107"):
        study.study([*words, "size=toy", "device=cpu", "arms=base,ar"])


WORKER = """
import json, pathlib, sys, time
job = json.loads(sys.argv[1])
if job["name"] == "idlm_2": sys.exit("a fault")
if job["name"] == "idlm_3": time.sleep(600)
path = pathlib.Path(job["results"], "study", f"0_{job['name']}.json")
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text("{}")
"""


REHEARSED = """
import json, pathlib, sys
job = json.loads(sys.argv[1])
if job["folder"].endswith("/rehearsal"): sys.exit("no room")
output = pathlib.Path(job["folder"], job["name"])
output.mkdir(parents=True)
facts = {"seconds": 1.0, "step_seconds": 0.1, "tokens_per_second": 10.0}
(output / "trained.json").write_text(json.dumps(facts))
path = pathlib.Path(job["results"], "study", f"0_{job['name']}.json")
path.parent.mkdir(parents=True, exist_ok=True)
record = {key: job[key] for key in ("name", "seed", "size", "steps", "flops", "num")}
path.write_text(json.dumps(record | {"trained": facts, "is_whole": True, "cells": []}))
"""


def test_an_arm_that_fails_or_hangs_costs_only_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "WORKER", ("-c", WORKER))
    (tmp_path / "0").mkdir()
    processes = study.Processes(tmp_path / "0", math.inf)
    jobs = [job_of(tmp_path, name) for name in ("idlm_2", "idlm_3", "idlm_4", "ar")]
    records = [record_path(tmp_path / "results", 0, name) for name in ("idlm_4", "ar")]
    collected = processes._collect

    def collect_and_end() -> None:
        collected()
        if all(path.is_file() for path in records):
            processes.deadline = 0.0

    monkeypatch.setattr(processes, "_collect", collect_and_end)
    assert not processes.run(jobs, parallel=2)
    said = capsys.readouterr().out
    assert "idlm_2: status 1" in said and "a fault" in said
    assert "the time is over for idlm_3" in said
    assert not processes.running


def test_no_arm_begins_that_cannot_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processes = study.Processes(tmp_path, time.monotonic() + 40)
    processes.longest = 100.0
    assert not processes.run([job_of(tmp_path, "ar")], parallel=2)
    assert "ar: no time left" in capsys.readouterr().out


def test_an_arm_begins_that_fits_beside_fewer_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arm takes the longer the more share the GPU."""
    monkeypatch.setattr(study, "WORKER", ("-c", WORKER))
    (tmp_path / "0").mkdir()
    processes = study.Processes(tmp_path / "0", time.monotonic() + 70)
    processes.longest = 100.0
    starts: list[tuple[str, int]] = []
    begin = processes.begin

    def seen(job: Job, *, is_rehearsal: bool = False) -> None:
        starts.append((job.name, len(processes.running)))
        begin(job, is_rehearsal=is_rehearsal)

    monkeypatch.setattr(processes, "begin", seen)
    assert processes.run([job_of(tmp_path, name) for name in ("ar", "idlm_4")], parallel=2)
    assert starts == [("ar", 0), ("idlm_4", 0)]
    assert "no time left" not in capsys.readouterr().out


def test_few_rehearsals_run_at_a_time_and_none_begins_beside_a_trained_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "WORKER", ("-c", "import time; time.sleep(600)"))
    processes, base = study.Processes(tmp_path, math.inf), tmp_path / "base"
    for name in ("idlm_2", "idlm_4"):
        assert processes.wait_for_room(2, until=base)
        processes.begin(job_of(tmp_path, name), is_rehearsal=True)
    monkeypatch.setattr(processes, "_collect", base.touch)
    assert not processes.wait_for_room(2, until=base)
    assert not processes.wait_for_room(3, until=base)
    processes.stop()


def test_only_a_gpu_decodes_deterministically_and_the_base_is_asked_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, str, Any]] = []

    def from_pretrained(path: Path, decoder: str, **settings: Any) -> None:
        asked.append((path, decoder, settings.get(DETERMINISTIC)))

    monkeypatch.setattr(study_worker.Engine, "from_pretrained", from_pretrained)
    own, base = tmp_path / "0" / "lora_4", tmp_path / "0" / BASE
    for device in ("cuda", "cpu"):
        job = replace(job_of(tmp_path, "lora_4"), device=device)
        for cell in (COLDS[0], *FIXED):
            study_worker.engine_of(job, cell)
    ways = [(own, "isd", None), (base, "ar", True), (own, "isd", True), (own, "isd", True)]
    assert asked == [*ways, *((path, decoder, None) for path, decoder, _ in ways)]


def test_arms_have_equal_flops(tmp_path: Path) -> None:
    words = {**study.OPTIONS, "size": "toy", "device": "cpu"}
    jobs = study.planned_jobs(words, [CONTROL, "idlm_4", "lora_4", "block_4", "no_shift"])
    for job in jobs:
        each = flops_per_step(job.name, SIZES["toy"], device="cpu")
        assert job.flops == pytest.approx(jobs[0].flops, abs=0.51 * each), job.name
    assert len({job.steps for job in jobs}) > 1


def test_cells_of_one_engine_are_neighbours() -> None:
    for name, arm in ARMS.items():
        engines = [repr((cell.decoder, cell.engine)) for cell in arm.cells]
        changes = sum(one != other for one, other in zip(engines, engines[1:], strict=False))
        assert changes + 1 == len(set(engines)), name


def test_a_record_without_all_cells_is_made_again(trained: Path, tmp_path: Path) -> None:
    """It is written after each cell, because a machine may be taken back."""
    known = record_path(trained / "results", 0, "idlm_4")
    assert is_whole(known)
    record = json.loads(known.read_text())
    partial = record_path(tmp_path, 0, "idlm_4")
    assert not is_whole(partial)
    partial.parent.mkdir()
    partial.write_text(json.dumps(record | {"cells": record["cells"][:3], "is_whole": False}))
    assert not is_whole(partial)
    [read] = read_records([tmp_path])
    assert len(read["cells"]) == 3


def test_an_arm_that_was_cut_off_while_decoding_goes_on_with_the_next_cell(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained again, and later cells are compared with the answers of the first run."""
    job = job_of(trained, "idlm_4")
    whole = json.loads(job.record.read_text())
    job = replace(job, results=str(tmp_path))
    job.record.parent.mkdir()
    job.record.write_text(json.dumps(whole | {"cells": whole["cells"][:3], "is_whole": False}))
    asked: list[str] = []
    task_of = study_worker.task_of

    def seen(chain: str) -> Task:
        asked.append(chain)
        return task_of(chain)

    monkeypatch.setattr(study_worker, "train", None)
    monkeypatch.setattr(study_worker, "task_of", seen)
    study_worker.run_arm(job)
    made = json.loads(job.record.read_text())
    assert made["is_whole"] and len(asked) == len(whole["cells"]) - 3
    for mine, other in zip(made["cells"], whole["cells"], strict=True):
        assert mine | {"seconds": 0} == other | {"seconds": 0}
    # A record of other weights says nothing of these.
    asked.clear()
    job.record.write_text(json.dumps(made | {"base": "another"}))
    study_worker.run_arm(job)
    assert len(asked) == len(whole["cells"])


def test_a_base_that_was_cut_off_while_training_goes_on(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its last save, to the weights of a run that nothing cut off."""
    job, training_step, steps = replace(job_of(tmp_path, BASE), keep=""), IdlmTrainer.training_step, []

    def cut_off(trainer: IdlmTrainer, *words: Any, **named: Any) -> Any:
        steps.append(trainer.state.global_step)
        if steps == [0, 1, 2]:
            raise KeyboardInterrupt
        return training_step(trainer, *words, **named)

    monkeypatch.setattr(IdlmTrainer, "training_step", cut_off)
    with pytest.raises(UserError, match="IDLM-0108"):
        study_worker.train(job)
    assert not (job.output / study_worker.TRAINED).is_file()
    study_worker.train(job)
    assert steps == [0, 1, 2, 2, 3]
    weights = [path / BASE / "model.safetensors" for path in (tmp_path / "0", trained / "0")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    facts = [json.loads((path.parent / study_worker.TRAINED).read_text()) for path in weights]
    assert facts[0]["tokens"] == facts[1]["tokens"]


def test_where_the_study_continues_arms_begin_that_cannot_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "WORKER", ("-c", WORKER))
    (tmp_path / "0").mkdir()
    processes = study.Processes(tmp_path / "0", time.monotonic() + 70, continues=True)
    started = processes.begin

    def begin(job: Job, *, is_rehearsal: bool = False) -> None:
        started(job, is_rehearsal=is_rehearsal)
        processes.running[-1].start -= 1000

    monkeypatch.setattr(processes, "begin", begin)
    assert processes.run([job_of(tmp_path, name) for name in ("ar", "idlm_4")], parallel=1)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_has_the_parameters_that_it_says(name: str, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"seed": 0, "output": tmp_path, "steps": 20, "device": "cpu", "workers": 0}
    config = compose("train", TrainConfig, train_arguments(BASE, SIZES[name], base=None, **shared))
    model = meta_model(config, prepare_tokenizer(config))
    assert sum(weight.numel() for weight in model.parameters()) == SIZES[name].parameters


def test_rates_shrink_with_the_width(tmp_path: Path) -> None:
    def rate(arm: str, size: str, base: Path | None) -> float:
        shared: dict[str, Any] = {"seed": 0, "output": tmp_path, "steps": 20, "device": "cpu", "workers": 0}
        words = train_arguments(arm, SIZES[size], base=base, **shared)
        [given] = [word.partition("=")[2] for word in words if word.startswith("train.learning_rate=")]
        return float(given)

    small = [rate(BASE, "small", None), rate("idlm_4", "small", tmp_path), rate("lora_4", "small", tmp_path)]
    assert small == [2e-3, 7e-4, 3e-3]
    large = [rate(BASE, "large", None), rate("idlm_4", "large", tmp_path), rate("lora_4", "large", tmp_path)]
    assert large == pytest.approx([0.4 * one for one in small])


def test_rehearsals_change_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "WORKER", ("-c", REHEARSED))
    words = [f"folder={tmp_path}", f"known={tmp_path}", f"results={tmp_path}", "rehearse=true"]
    assert study.study([*words, "size=toy", "device=cpu", "num=2", "arms=base,ar,idlm_4"]) == 0
    said = capsys.readouterr().out
    assert "base (rehearsal): status 1" in said and "no room" in said
    assert sorted(path.name for path in (tmp_path / "study").iterdir()) == [
        "0_ar.json",
        "0_base.json",
        "0_idlm_4.json",
    ]


def test_unknown_arms_are_refused() -> None:
    with pytest.raises(UserError, match="IDLM-0107"):
        chosen_arms("ar,idlm4")
