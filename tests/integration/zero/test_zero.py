"""Several processes through DeepSpeed on a CPU: the same run as one process, whatever dies; and who is named.

`pytest tests/integration/zero/test_zero.py -m sweep` adds stages of ZeRO, offload, bfloat16, DDP, adapters, a
launcher, deaths, the watchdog, and that `shorten` leaves DeepSpeed's gradients, norms, clipping and skipped
steps as they are (IDLM_ZERO_DEVICE=cuda IDLM_ZERO_PROCESSES=2: over NCCL, with larger layers).
`python -m benchmarks.resume` runs the full counts of deaths."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "recipes" / "launch"
DEVICE = os.environ.get("IDLM_ZERO_DEVICE", "cpu")
PROCESSES = int(os.environ.get("IDLM_ZERO_PROCESSES", "2"))
STEPS, MICRO_BATCHES = 4, 3
"""As in `zero2_gradient_steps`, whose imports are slow."""


def reported_by(*parts: str) -> dict[str, Any]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="idlm-zero-", dir=memory)
    try:
        command = [sys.executable, "-m", "tests.integration.zero.zero_runs", folder, *parts]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return json.loads((Path(folder) / "results.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def parity() -> dict[str, Any]:
    return reported_by("parity")["parity"]


@pytest.fixture(scope="module")
def sweeps() -> dict[str, Any]:
    return reported_by("deaths", "stages", "adapters", "watchdog", "gradients")


@pytest.fixture
def deaths(sweeps: dict[str, Any]) -> dict[str, Any]:
    return sweeps["deaths"]


@pytest.fixture(scope="module")
def gradients(sweeps: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Optimizer steps of DeepSpeed with and without `shorten`."""
    if DEVICE == "cpu":
        return sweeps["gradients"]
    folder = tmp_path_factory.mktemp("steps")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(PROCESSES), "-m", "tests.integration.zero.zero2_gradient_steps", str(folder), DEVICE]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / "results.json").read_text())


def losses(results: dict[str, Any]) -> list[list[float]]:
    return [[value for key, value in record.items() if key.endswith("_loss")] for record in results["losses"]]


def norms(results: dict[str, Any]) -> list[float]:
    """Gradient norms of the steps: AdamW would hide gradients that are scaled."""
    return [record["gradient_norm"] for record in results["losses"]]


@pytest.mark.sweep
def test_two_zero_processes_are_one_with_two_micro_batches(deaths: dict[str, Any]) -> None:
    alone, together = losses(deaths["one"]), losses(deaths["two"])
    assert len(alone) == len(together) == 5
    for first, second in zip(alone, together, strict=True):
        assert second == pytest.approx(first, abs=1e-6, rel=0)
    assert norms(deaths["two"]) == pytest.approx(norms(deaths["one"]), rel=1e-4)


def test_two_plain_processes_are_one_with_two_micro_batches(parity: dict[str, Any]) -> None:
    """Counts, balance and gradients are global."""
    for alone, together in zip(parity["one"]["losses"], parity["plain"]["losses"], strict=True):
        assert together.keys() == alone.keys() >= {"clean_weight", "acceptance", "num_tokens"}
        for key, value in alone.items():
            assert together[key] == pytest.approx(value, abs=1e-5), key


def test_every_item_is_trained_once_and_in_order(parity: dict[str, Any]) -> None:
    shares = {
        "one": [(0, 0), (0, 1)],
        "plain": [(0, 0), (1, 0)],
    }
    for world, pairs in shares.items():
        results = parity[world]["items"]
        keys = [f"step {step} rank {r} micro-batch {m}" for step in range(1, 6) for r, m in pairs]
        assert [item for key in keys for item in results[key]] == list(range(10))
        assert not parity[world]["clashes"] and len(results) == 10


@pytest.mark.sweep
def test_a_rank_killed_while_saving_loses_nothing(deaths: dict[str, Any]) -> None:
    assert -9 in deaths["killed_status"]
    assert deaths["checkpoints"], "there was something to resume from"
    assert deaths["resumes"] == [2, 2], deaths["complaints"]


@pytest.mark.sweep
def test_ranks_save_and_end_when_their_launcher_is_killed(deaths: dict[str, Any]) -> None:
    results = deaths["orphans"]
    assert not results["left"] and results["num_checkpoints"] == 1, results["log"]
    assert results["log"].count("has ended: this rank saves and ends") >= 1
    assert "stopped and saved at step" in results["log"]


@pytest.mark.sweep
def test_the_engine_of_the_report_finds_no_memory_of_zero(deaths: dict[str, Any]) -> None:
    """Gradient buckets alone are 200M elements, and DeepSpeed's engine outlives all references to it."""
    assert deaths["floats_left"] < 1000


def test_every_stage_is_published(parity: dict[str, Any]) -> None:
    for world in ("one", "plain"):
        assert set(parity[world]["weights"]) == {"model.safetensors", "stages/1-stride-2/model.safetensors"}
        assert not parity[world]["left"], "no staging directory is left behind"


def check_resharded(results: dict[str, Any], expected: list[list[float]], *, tolerance: float) -> None:
    for way, run in results.items():
        assert set(run["status"].values()) == {0}, (way, run["log"])
        assert "resharded" not in run["left"], "its own checkpoint replaces the resharded one"
        found = losses(run)
        assert len(found) == len(expected)
        for first, second in zip(expected, found, strict=True):
            assert second == pytest.approx(first, abs=tolerance, rel=0), way


@pytest.mark.sweep
def test_a_run_goes_on_with_another_number_of_processes(deaths: dict[str, Any]) -> None:
    check_resharded(deaths["resharded"], losses(deaths["one"]), tolerance=1e-6)


@pytest.mark.sweep
def test_another_number_of_rows_is_refused_with_numbers(deaths: dict[str, Any]) -> None:
    refusals = deaths["refusals"]
    assert all(text.startswith("[2]") for text in refusals.values()), refusals
    assert "IDLM-0512" in refusals["batch"]
    assert "set train.accumulation=2" in refusals["batch"]
    assert "IDLM-0512" in refusals["uneven"]
    assert "3 does not" in refusals["uneven"]


@pytest.mark.sweep
def test_every_zero_stage_trains_resumes_and_exports(sweeps: dict[str, Any]) -> None:
    one = sweeps["deaths"]["one"]
    alone = losses(one)
    for name, run in sweeps["stages"].items():
        assert run["resumes"] == [1, 1], (name, run["complaints"])
        tolerance = 5e-2 if name == "bf16" else 1e-6
        for first, second in zip(alone, losses(run), strict=True):
            assert second == pytest.approx(first, abs=tolerance, rel=0), name
        assert norms(run) == pytest.approx(norms(one), rel=max(tolerance, 1e-4)), name
        assert len(run["weights"]) == 2, name
        assert run.get("floats_left", 0) < 1000
        if "resharded" in run:
            check_resharded(run["resharded"], losses(run), tolerance=tolerance)


@pytest.mark.sweep
@pytest.mark.parametrize("zero_stage", ["2", "3"])
def test_two_ranks_train_the_adapter_of_one(sweeps: dict[str, Any], zero_stage: str) -> None:
    one, two = sweeps["adapters"]["one"], sweeps["adapters"][zero_stage]
    assert two["resumes"] == [1, 1], two["complaints"]
    for first, second in zip(losses(one), losses(two), strict=True):
        assert second == pytest.approx(first, abs=1e-6, rel=0)
    assert norms(two) == pytest.approx(norms(one), rel=1e-4)
    assert two["farthest"] < 1e-4


@pytest.mark.sweep
def test_a_killed_or_stopped_rank_ends_the_others_and_is_named(sweeps: dict[str, Any]) -> None:
    for name, words in (("killed", "died without a word"), ("stopped", "silent for")):
        run = sweeps["watchdog"][name]
        assert run["status"] == 75, run
        assert f"rank 1 (pid {run['pid']}" in run["log"]
        assert words in run["log"]
        assert run["seconds"] < 60, run["seconds"]


@pytest.mark.sweep
def test_a_launcher_runs_a_recipe_on_two_processes(tmp_path: Path) -> None:
    base = tmp_path / "out"
    arguments = [
        "recipe=tiny",
        f"output_dir={base}",
        "train.steps=3",
        "train.batch_size=1",
        "train.threads=1",
    ]
    arguments += ["report.enabled=false", "train.zero_stage=null"]
    environment = os.environ | {"PYTHON": sys.executable, "GPUS": "2", "PYTHONPATH": str(ROOT)}
    command = [str(LAUNCH / "torchrun.sh"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (base / "model.safetensors").is_file()
    assert len(list((base / "launch").glob("config-*.yaml"))) == 1
    assert (base / "stages" / "2-stride-3" / "manifest.json").is_file()


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["zero2", "averaged", "clipped", "overlapped"])
def test_sums_are_equal_bit_for_bit_and_norms_to_1e_6(gradients: dict[str, Any], name: str) -> None:
    run = gradients[name]
    assert {"_add_to_grad_partition_buffer", "check_overflow", "get_grad_norm_direct"} <= set(run["replaced"])
    assert run["num_sums"] == 2 * STEPS
    padding = [value for rank in run["padding"] for value in rank]
    assert padding and not any(padding)
    own, ours = run["norms"]
    assert ours[0] == pytest.approx(own[0], rel=1e-6, abs=0) and all(norm > 0 for norm in own)
    assert run["overflows"] == [[False] * STEPS] * 2
    if name == "clipped":
        assert max(run["far"][:2]) <= 1e-6
        assert DEVICE == "cuda" or (own[0] > 2 and own[-1] < 1.3 and max(run["far"]) <= 1e-6)
    else:
        assert ours == pytest.approx(own, rel=1e-6, abs=0)
        assert run["sums"] and run["given"] and run["weights"] == [True] * STEPS


@pytest.mark.sweep
def test_sums_that_end_later_are_waited_for(gradients: dict[str, Any]) -> None:
    run = gradients["overlapped"]
    assert "enter_backward" in run["replaced"] and "enter_backward" not in gradients["float32"]["replaced"]
    # Before the optimizer, or when the next backward pass starts: once for each micro-batch.
    assert DEVICE == "cuda" or run["waits"] == STEPS * MICRO_BATCHES
    assert DEVICE == "cuda" or run["starts"] == list(range(STEPS * MICRO_BATCHES))


@pytest.mark.sweep
@pytest.mark.skipif(PROCESSES & (PROCESSES - 1) != 0, reason="only powers of two divide without rounding")
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_added_gradients_are_the_averaged_ones_of_a_loss_times_ranks(
    gradients: dict[str, Any], name: str
) -> None:
    assert gradients[name]["is_averaged"] and gradients[name]["has_its_norms"]


@pytest.mark.sweep
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(gradients: dict[str, Any]) -> None:
    run = gradients["infinite"]
    assert run["overflows"] == [[False, True, False, False]] * 2
    assert run["norms"][1][1] == math.inf and run["stands_still"]


@pytest.mark.sweep
def test_whole_sums_give_the_same_weights(gradients: dict[str, Any]) -> None:
    run = gradients["zero1"]
    assert run["replaced"] == ["_update_hp_grad", "get_grads_for_norm"]
    own, ours = run["norms"]
    # Weights of later steps differ in their last bits, because the first is clipped by another rounding.
    assert ours[0] == pytest.approx(own[0], rel=1e-6, abs=0) and ours == pytest.approx(own, rel=0.02)
    assert run["far"][0] <= 1e-6
    assert gradients["zero1_infinite"]["overflows"] == [[False, True, False, False]] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["offload", "float32"])
def test_other_optimizers_keep_their_own(gradients: dict[str, Any], name: str) -> None:
    assert gradients[name]["replaced"] == [] and all(gradients[name]["weights"])
