"""`shorten` leaves DeepSpeed's gradients, norms, clipping and skipped steps as they are.

IDLM_ZERO_DEVICE=cuda IDLM_ZERO_PROCESSES=2 runs it over NCCL, with larger layers.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).resolve().parents[3]
DEVICE = os.environ.get("IDLM_ZERO_DEVICE", "cpu")
PROCESSES = int(os.environ.get("IDLM_ZERO_PROCESSES", "2"))
WIDTH = 13 if DEVICE == "cpu" else 4099
STEPS, MICRO_BATCHES = 4, 3
"""As in `zero2_gradient_steps`, whose imports are slow."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("steps")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(PROCESSES), "-m", "tests.integration.zero.zero2_gradient_steps"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(folder), DEVICE, str(WIDTH)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", ["zero2", "averaged", "clipped", "overlapped"])
def test_sums_are_equal_bit_for_bit_and_norms_to_1e_6(results: dict[str, Any], name: str) -> None:
    run = results[name]
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


def test_sums_that_end_later_are_waited_for(results: dict[str, Any]) -> None:
    run = results["overlapped"]
    assert "enter_backward" in run["replaced"] and "enter_backward" not in results["float32"]["replaced"]
    # Before the optimizer, or when the next backward pass starts: once for each micro-batch.
    assert DEVICE == "cuda" or run["waits"] == STEPS * MICRO_BATCHES
    assert DEVICE == "cuda" or run["starts"] == list(range(STEPS * MICRO_BATCHES))


@pytest.mark.skipif(PROCESSES & (PROCESSES - 1) != 0, reason="only powers of two divide without rounding")
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_added_gradients_are_the_averaged_ones_of_a_loss_times_ranks(
    results: dict[str, Any], name: str
) -> None:
    assert results[name]["is_averaged"] and results[name]["has_its_norms"]


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(results: dict[str, Any]) -> None:
    run = results["infinite"]
    assert run["overflows"] == [[False, True, False, False]] * 2
    assert run["norms"][1][1] == math.inf and run["stands_still"]


def test_whole_sums_give_the_same_weights(results: dict[str, Any]) -> None:
    run = results["zero1"]
    assert run["replaced"] == ["_update_hp_grad", "get_grads_for_norm"]
    own, ours = run["norms"]
    # Weights of later steps differ in their last bits, because the first is clipped by another rounding.
    assert ours[0] == pytest.approx(own[0], rel=1e-6, abs=0) and ours == pytest.approx(own, rel=0.02)
    assert run["far"][0] <= 1e-6
    assert results["zero1_infinite"]["overflows"] == [[False, True, False, False]] * 2


@pytest.mark.parametrize("name", ["offload", "float32"])
def test_other_optimizers_keep_their_own(results: dict[str, Any], name: str) -> None:
    assert results[name]["replaced"] == [] and all(results[name]["weights"])
