"""The study: equal FLOPs, processes that fail or are late, records of a toy run, means over seeds."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import read_rows
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
)
from benchmarks.training.studies.study_paper import efficiency
from benchmarks.training.studies.study_report import collect, read_records, report
from benchmarks.training.studies.study_worker import Job, is_whole, marks_of, marks_text, record_path
from idlm.errors import UserError
from idlm.semantics import Semantics


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
    """A base and two arms on it, in this process."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "0").mkdir()
    study_worker.write_samples(folder / "0", 2)
    for name in (BASE, "idlm_4", "lora_4"):
        study_worker.run_arm(job_of(folder, name))
    return folder


def test_arms_are_trained_and_decoded_as_they_say(trained: Path) -> None:
    assert Semantics.load(trained / "0" / "idlm_4").stride == 4
    assert Semantics.load(trained / "0" / "lora_4").gated
    records = read_records([trained / "results"])
    assert [record["name"] for record in records] == [BASE, "idlm_4", "lora_4"]
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
    jobs = study.planned_jobs(words, [CONTROL, "idlm_4", "lora_4", "block_4"])
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


def test_marks_survive_a_record() -> None:
    marks = [True, False, False, True, False]
    assert marks_of(marks_text(marks), 5) == marks


def record_of(name: str, seed: int, marks: str, **changes: Any) -> dict[str, Any]:
    cell = {
        "task": "long",
        "decoder": "isd" if name.startswith("idlm") else "ar",
        "strategy": "cold" if name.startswith("idlm") else "ar",
        "temperature": 1.0,
        "stride": 3 if name.startswith("idlm") else 1,
        "exactness": "exact",
        "marks": marks_text([mark == "+" for mark in marks]),
        "num_tokens": 170,
        "num_forwards": 110,
        "num_prompt_passes": 10,
        "accepted": [40, 30] if name.startswith("idlm") else [],
        "tested": [50, 40] if name.startswith("idlm") else [],
        "seconds": 1.0,
        "num_failed": 0,
        "equal_to_ar": None,
    }
    machine = {
        "gpu": None,
        "num_gpus": 0,
        "torch": "2",
        "triton": None,
        "commit": None,
        "date": f"2026-1-{seed}",
    }
    return {
        "name": name,
        "seed": seed,
        "size": "toy",
        "steps": 5,
        "flops": 1.0,
        "num": len(marks),
        "trained": {"seconds": 1.5},
        "is_whole": True,
        "machine": machine,
        "cells": [cell | changes],
    }


def test_rows_are_means_over_seeds_beside_the_control(tmp_path: Path) -> None:
    records = [
        *(record_of(CONTROL, seed, marks) for seed, marks in enumerate(("++++", "+++-", "++--"))),
        *(record_of("idlm_3", seed, marks) for seed, marks in enumerate(("+++-", "++--", "++--"))),
    ]
    text = report(records, results=tmp_path, plots=tmp_path)
    found = {
        (row["case"]["arm"], row["metric"]): (row["value"], row["baseline"], row["case"]["seeds"])
        for row in read_rows("study", results=tmp_path)
    }
    assert found["idlm_3", "exact_match"] == (pytest.approx(7 / 12), pytest.approx(9 / 12), 3)
    shares = (3 / 4, 2 / 4, 2 / 4)
    deviation = math.sqrt(sum((share - 7 / 12) ** 2 for share in shares) / 2)
    assert found["idlm_3", "exact_match_se"][0] == pytest.approx(deviation / math.sqrt(3))
    assert found["idlm_3", "paired_difference"][0] == pytest.approx(-2 / 12)
    assert found["idlm_3", "acceptance_2"][0] == pytest.approx(0.75)
    assert found["idlm_3", "tokens_per_forward"][0] == pytest.approx(1.6)
    # Eq. 3 with P_1 = 0.8, P_2 = 0.6: (2 + 0.8) / (2 - 0.6) = 2.
    assert found["idlm_3", "eq3_ratio"][0] == pytest.approx(0.8)
    assert ("ar", "paired_difference") not in found
    assert "NOT  eq. 3: off by 0.200 at most, idlm_3 cold long T=1" in text
    assert "| 3 |  | 1.60 |  | 58.3 +- 8.3 |" in text and "Table 4: relaxed" not in text
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "study_efficiency.svg",
        "study_quality.svg",
        "study_tokens_per_forward.svg",
    }


def test_efficiency_is_that_of_the_paper() -> None:
    """Table 5: TPF / OH with one rate p for all drafts; it crosses 1 near p = 0.83 at N = 4 (section 2)."""
    for stride, p in ((2, 0.7), (4, 0.9), (8, 0.95)):
        tokens = 2 + sum(p**k for k in range(1, stride - 1))
        overhead = (3 * stride - 1 - stride * p ** (stride - 1)) / tokens
        assert efficiency([p] * (stride - 1)) == pytest.approx(tokens / (2 - p ** (stride - 1)) / overhead)
    assert efficiency([0.82] * 3) < 1 < efficiency([0.84] * 3)


def test_one_seed_has_the_error_of_its_problems() -> None:
    cells = collect([record_of(CONTROL, 0, "+++-")])
    [cell] = cells.values()
    assert cell.exact_match_se == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert cell.tokens_per_forward == pytest.approx(1.6)
