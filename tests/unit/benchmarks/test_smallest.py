"""Benchmarks that a CPU can run, in their smallest form: they end well and leave rows of their figures."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.results import read_rows
from idlm.semantics import Semantics

TINY_AR = Path(__file__).parents[3] / "recipes/assets/tiny_ar"
TINY = "model=tiny device=cpu dtype=float32 "
RUNS = {
    "engine.decode": (
        TINY + "loads=2x24 tokens=12 least=12 arms=cold/4,adaptive/4 parts=sweep,deterministic "
        "penalties=true several=2",
        {"step_ms", "isd_over_ar", "adapter_over_plain_step", "adapters_over_one", "tokens_per_forward"}
        | {"deterministic_over_plain_step", "penalties_over_plain_step"},
    ),
    "engine.block": (
        TINY + "block=8 context=16 rounds=1 passes=6 blocks=2 traces=p0.53 batch=1,3",
        {"step_ms", "full_block_share_of_matmul", "fused_commit_tpf_gain", "tokens_per_second"},
    ),
    "engine.sparse_attention": (
        TINY + "block=8 exact_layers=1 rounds=1 k=4 passes=4 cells=64x1,64xmax",
        {"full_budget_error", "tpob_ms", "tpob_speedup_vs_exact", "mage_over_quest", "mage_over_sparsed"},
    ),
    "engine.eviction": (
        TINY + "context=64 rounds=1 passes=10 block=8 batch=1 parts=gate,throughput",
        {"full_budget_error", "throughput_over_full_block", "rows_per_token"},
    ),
    "engine.selector": (
        "shape=tiny loads=2x32 tokens=8 rounds=1 stride=4 strategies=cold device=cpu record=true",
        {"step_share"},
    ),
    "engine.canvas_cache": (
        TINY + "canvas=48 answer=24 block=8 passes=3 blocks=2 rounds=1 caches=dual,prefix,delayed",
        {"step_ms", "refresh_ms", "speedup_over_none", "agreement_with_none"},
    ),
    "engine.prompt_lookup": (
        f"model={TINY_AR.parent}/tiny_idlm device=cpu prompts=ledger num=2 minimums=0,2 temperatures=0 "
        "max_tokens=12 record=true",
        {"tokens_per_forward", "first_draft_acceptance"},
    ),
    "serving.answers": (TINY + "concurrency=2 tokens=4 rounds=2 top_p=0.9", {"output_tokens_per_s"}),
    "engine.tensor_parallel": (
        "model=tiny device=cpu sizes=1 concurrency=2 context=8 strides=2 layers=1 passes=3 rounds=1",
        {"step_ms", "isd_over_ar"},
    ),
    "serving.serve": (
        TINY + "concurrency=4,2 requests=6 parts=mixed,steady",
        {"ready_s", "output_tokens_per_s", "isd_over_ar", "itl_p99_over_median", "ttft_ms", "prefill_s"},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_leaves_its_rows(name: str, tmp_path: Path) -> None:
    arguments, metrics = RUNS[name]
    module = import_module(f"benchmarks.{name}")
    assert module.measure([*arguments.split(), f"results={tmp_path}"]) == 0
    bench = name.rpartition(".")[2]
    rows = read_rows("serve" if bench == "answers" else bench, results=tmp_path)
    assert {row["metric"] for row in rows} >= metrics
    assert all(row["gate_passed"] is not False for row in rows)


@pytest.mark.parametrize(
    ("name", "meaning", "options"),
    [
        ("decodability", {"causality": "block", "block_size": 8}, "level=tiny thresholds=0.9,0.7"),
        (
            "full_quality",
            {"causality": "full"},
            "orders=low_confidence,random block_lengths=4 thresholds=0.0",
        ),
    ],
)
def test_quality_is_measured_on_any_checkpoint(
    name: str, meaning: dict[str, object], options: str, tmp_path: Path
) -> None:
    """One that was not trained answers nothing, which may be status 1."""
    model = tmp_path / "model"
    shutil.copytree(TINY_AR, model)
    Semantics(logit_shift=False, mask_token_id=165, stop_token_ids=(2,), **meaning).save(model)  # type: ignore[arg-type]
    small = f"model={model} results={tmp_path} device=cpu num=2 batch=2 max_tokens=8 record=true {options}"
    import_module(f"benchmarks.quality.{name}").measure(small.split())
    metrics = {row["metric"] for row in read_rows(name, results=tmp_path)}
    assert metrics >= {"exact_match", "standard_error", "tokens_per_forward", "tokens_per_second"}
