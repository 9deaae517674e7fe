"""The benchmark of sparse attention, tiny and on a CPU: traces, floors, and all its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.engine import sparse_attention
from benchmarks.engine.decoding.harness import SAMPLING, Load, random_model
from benchmarks.engine.sparse_harness import ARMS, SparseArm, floor_of, step_ceiling, trace_of_passes
from benchmarks.figures import PARTS_OF_A_PASS
from benchmarks.results import read_rows
from idlm.errors import UserError

SMALL = ["model=tiny", "device=cpu", "dtype=float32", "block=8", "exact_layers=1", "rounds=1", "k=4"]


@pytest.mark.parametrize("num_passes", [32, 24, 16, 8])
def test_any_passes_in_a_row_decide_a_block(num_passes: int) -> None:
    decided = [1 + count for count in trace_of_passes(num_passes, 32).accepted]
    for start in range(num_passes):
        assert sum((decided * 2)[start : start + num_passes]) == 32
    assert min(decided) >= 1


def test_every_part_runs_and_leaves_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SMALL, "passes=4", f"results={tmp_path}"]
    assert sparse_attention.measure([*options, "cells=64x1,64xmax"]) == 0
    rows = read_rows("sparse_attention", results=tmp_path)
    blocks = [row for row in rows if row["metric"] == "tpob_ms"]
    assert {(row["case"]["arm"], row["case"]["batch"]) for row in blocks} == {
        (name, batch) for name in ARMS for batch in (1, 2)
    }
    assert {row["metric"] for row in rows} >= {
        "full_budget_error",
        "tpob_speedup_vs_exact",
        "tpob_speedup_vs_unsplit",
        "mage_over_quest",
        "mage_over_sparsed",
        "steps_per_host_sync",
        "gpu_idle_share",
    }
    assert all(row["gate_passed"] for row in rows if row["case"]["arm"] in ("mage", "quest", "sparsed"))
    assert {row["class"] for row in rows if row["case"]["arm"] == "mage"} == {"lossy"}

    profile = ["cells=64x1", "arms=exact,mage", "parts=profile", f"figures={tmp_path}"]
    assert sparse_attention.measure([*options, *profile]) == 0
    assert "profile of mage" in capsys.readouterr().out
    new = read_rows("sparse_attention", results=tmp_path)[len(rows) :]
    assert [(row["case"]["arm"], row["metric"]) for row in new] == [
        (arm, metric) for arm in ("exact", "mage") for metric in PARTS_OF_A_PASS
    ]
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn.keys() == {"sparse_speedup_k4_passes4.svg", "sparse_pass_k4_passes4.svg"}
    assert all(text in drawn["sparse_speedup_k4_passes4.svg"] for text in ("mage", "quest", "64 x 2"))
    assert all(text in drawn["sparse_pass_k4_passes4.svg"] for text in ("exact", "estimation", "64 x 1"))

    assert sparse_attention.measure(["parts=", f"results={tmp_path}", f"figures={tmp_path / 'again'}"]) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "again").iterdir()} == drawn


def test_a_model_that_routes_by_blocks_runs_with_its_ceiling(tmp_path: Path) -> None:
    options = [*SMALL, "model=tiny_llada22", "cells=64x1", "passes=4", f"results={tmp_path}"]
    assert sparse_attention.measure([*options, "arms=exact,mage", "parts=gate,share,blocks"]) == 0
    rows = {row["metric"]: row for row in read_rows("sparse_attention", results=tmp_path)}
    assert 0 <= rows["attention_share"]["value"] < 1
    assert rows["step_speedup_vs_exact"]["floor"] >= 1
    assert rows["full_budget_error"]["gate_passed"]
    assert {row["case"]["model"] for row in rows.values()} == {"tiny_llada22"}
    with pytest.raises(UserError, match="IDLM-0617"):
        sparse_attention.measure([*options, "block=4"])


def test_ceilings_follow_from_attentions_share() -> None:
    """An issue's: a third of a step, of which a fifteenth is left, makes 1.46."""
    model = random_model("tiny", device="cpu", dtype=torch.float32, block_size=32)
    load = Load(concurrency=1, context=15 * 1056 - 32, num_tokens=0, sampling=SAMPLING["greedy"])
    arm = SparseArm(name="mage", stride=32, exact_layers=0)
    assert step_ceiling(model, arm, load, 0.34) == pytest.approx(1 / (1 - 0.34 + 0.34 / 15))
    half = replace(arm, exact_layers=1)
    assert step_ceiling(model, half, load, 0.34) == pytest.approx(1 / (1 - 0.17 + 0.17 / 15))
    assert step_ceiling(model, arm, replace(load, context=512), 0.34) == 1


def test_a_failed_gate_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "parity_error", lambda *given: 0.5)
    options = [*SMALL, "cells=64x1", "passes=4", "arms=exact,mage", f"results={tmp_path}"]
    assert sparse_attention.measure(options) == 1
    assert {row["metric"] for row in read_rows("sparse_attention", results=tmp_path)} == {"full_budget_error"}


def test_an_arm_that_fails_and_an_early_end_leave_the_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = sparse_attention._blocks

    def limited(bench: sparse_attention.Bench, arm: SparseArm, load: Load) -> float:
        if arm.name == "quest":
            raise torch.OutOfMemoryError("tried to allocate 7 GiB\nof 3")
        if load.context == 128:
            raise KeyboardInterrupt
        return blocks(bench, arm, load)

    monkeypatch.setattr(sparse_attention, "_blocks", limited)
    options = [*SMALL, "passes=4", "parts=blocks", "arms=exact,quest,mage"]
    ended, whole = tmp_path / "ended", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        sparse_attention.measure([*options, "cells=64x1,128x1", f"results={ended}"])
    assert sparse_attention.measure([*options, "cells=64x1", f"results={whole}"]) == 1
    assert "quest is left out: OutOfMemoryError: tried to allocate 7 GiB\n" in capsys.readouterr().out
    for results in (ended, whole):
        rows = read_rows("sparse_attention", results=results)
        assert {row["case"]["arm"] for row in rows if row["metric"] == "tpob_ms"} == {"exact", "mage"}
        assert [row["case"]["arm"] for row in rows if row["metric"] == "tpob_speedup_vs_exact"] == ["mage"]


def test_floors_are_those_of_the_issue() -> None:
    """Its table, in which the head counts as well: 128K and six sequences, k 1024, two exact layers."""
    model = random_model("tiny", device="cpu", dtype=torch.float32, block_size=32)
    load = Load(concurrency=6, context=1 << 17, num_tokens=0, sampling=SAMPLING["greedy"])
    arm = SparseArm(name="mage", stride=32, exact_layers=1)
    floor = floor_of(model, arm, load, stream=1e9, product=1e30)
    slots = 6 * 2 * 2 * 16 * 4  # Bytes of a slot of all sequences: keys and values, 2 heads of 16, a layer.
    everything, listed = slots * ((1 << 17) + 32), slots * (1024 + 32)
    weights = 1e6 * floor.exact_ms - 2 * everything
    assert weights == pytest.approx(1e6 * floor.sparse_ms - everything - listed)
    assert floor.rank_ms == pytest.approx(slots / 2 * (1 << 17) / 1e6)
    assert floor.block_ms(arm) == floor.exact_ms + floor.rank_ms + 31 * floor.sparse_ms
    assert floor.block_ms(replace(arm, name="exact")) == 32 * floor.exact_ms
    assert floor.block_ms(replace(arm, name="quest")) is None


def test_unknown_arms_and_parts_are_refused() -> None:
    for option in ("arms=mago", "parts=gates"):
        with pytest.raises(UserError, match="IDLM-0107"):
            sparse_attention.measure([*SMALL, option])
