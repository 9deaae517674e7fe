"""Benchmarks of attention without a GPU: FlashAttention as a baseline, and arms that are absent or fail."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels import flash_attention, train_attention
from benchmarks.kernels.attention_step import launch_of
from benchmarks.kernels.blocks import block_attention, block_attention_sweep
from benchmarks.optional_arms import print_absent, run_arms
from benchmarks.table import section
from idlm.errors import UserError
from idlm.kernels.paged_attention import HeadShape
from tests.kernels.cases.paged_attention import build, causal

QWEN3_8B = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
SMALL = HeadShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
CASE = {"stride": 4, "length": 4096, "packed": True}
TIMES = {"split": 2.0, "flex": 4.0, "flash": 3.0, "dense": 12.0, "cudnn": 1.0}


def fail(_: str) -> str:
    raise RuntimeError("cannot compile\nbecause of this and that")


def test_an_arm_that_fails_is_left_out_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    arms = {"ours": str.upper, "library": fail}
    absent = {"other": "is not installed"}
    assert run_arms(arms, lambda arm: arm("x"), required={"ours"}, absent=absent) == {"ours": "X"}
    print_absent(absent)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "not measured: other: is not installed",
        "not measured: library: RuntimeError: cannot compile",
    ]
    with pytest.raises(RuntimeError, match="cannot compile"):
        run_arms(arms, lambda arm: arm("x"), required={"ours", "library"}, absent={})


def over_flash(times: dict[str, float], gates: dict[str, float]) -> list[dict[str, Any]]:
    rows = train_attention._rows(CASE, times, gates)
    return [row for row in rows if row["case"].get("flex") == "fa4"]


def test_our_training_attention_is_measured_against_flex_with_flash_attention_4() -> None:
    [row] = over_flash(TIMES, {"split": 1.0, "flex": 1.0, "flash": 1.5})
    assert (row["bench"], row["metric"], row["value"]) == ("train_attention", "speedup_vs_flex", 1.5)
    assert row["case"] == CASE | {"arm": "split", "flex": "fa4"}
    assert row["gate_passed"]
    assert not over_flash(TIMES, {"split": 1.0, "flex": 1.0, "flash": 2.5}), "a wrong result is no baseline"
    assert not over_flash(TIMES, {"split": 1.0, "flex": 1.0, "flash": float("nan")})
    assert not over_flash(TIMES | {"split": 1.0}, {"split": 3.0, "flex": 1.0, "flash": 1.0})[0]["gate_passed"]


def test_without_flash_attention_4_todays_rows_stay() -> None:
    gates, times = {"split": 1.0, "flex": 1.0}, {name: TIMES[name] for name in ("split", "flex", "cudnn")}
    rows = train_attention._rows(CASE, times, gates)
    assert [(row["metric"], row["value"]) for row in rows] == [("speedup_vs_flex", 2.0), ("ms", 2.0)]
    assert all(row["case"] == CASE | {"arm": "split"} for row in rows)
    assert "2.00x - 1.00" in train_attention._line(CASE, 3, times, gates)
    assert "2.00x 1.50x 1.00" in train_attention._line(CASE, 3, TIMES, gates | {"flash": 1.0})


def test_a_table_shows_both_baselines(tmp_path: Path) -> None:
    rows = train_attention._rows(CASE, TIMES, {"split": 1.0, "flex": 1.0, "flash": 1.5})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "train_attention.jsonl").write_text(lines)
    table = section("train_attention", tmp_path)
    assert "2 x" in table
    assert "1.50 x" in table


def test_cases_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gates = {"split": 1.0, "flex": 1.0}
    monkeypatch.setattr(train_attention, "_errors", lambda *_: gates)

    def times(documents: list[int], stride: int, *_: Any) -> dict[str, float]:
        chosen.append((len(documents) > 1, stride))
        return {name: TIMES[name] for name in ("split", "flex", "cudnn")}

    monkeypatch.setattr(train_attention, "_times", times)
    assert train_attention.measure(["strides=4,8", "packed=true"]) == 0
    assert chosen == [(True, 4), (True, 8)]
    with pytest.raises(UserError):
        train_attention.measure(["stride=4"])


@pytest.mark.parametrize(
    ("installed", "page_size", "head_dim", "serving"),
    [
        ({"flash_attn_interface", "flash_attn", "flash_attn.cute"}, 16, 128, 3),
        ({"flash_attn", "flash_attn.cute"}, 16, 128, 4),
        ({"flash_attn", "flash_attn.cute", "flash_attn.flash_attn_interface"}, 256, 128, 4),
        ({"flash_attn", "flash_attn.cute", "flash_attn.flash_attn_interface"}, 256, 256, 2),
        ({"flash_attn", "flash_attn.flash_attn_interface"}, 256, 128, 2),
        ({"flash_attn", "flash_attn.flash_attn_interface"}, 16, 128, None),
        ({"flash_attn", "flash_attn.cute"}, 16, 256, None),
        (set(), 256, 128, None),
    ],
)
def test_the_preferred_installed_version_of_flash_attention_is_used(
    installed: set[str],
    page_size: int,
    head_dim: int,
    serving: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_attention, "is_installed", installed.__contains__)
    shape = replace(QWEN3_8B, head_dim=head_dim)
    where: dict[str, Any] = {"page_size": page_size, "device": torch.device("cuda")}
    assert flash_attention.version(shape, **where) == serving
    if not installed:
        found = str(flash_attention.obstacles(shape, **where))
        assert all(part in found for part in ("version 3", ".[flash-attn]", "version 2"))


def test_flash_attention_4_is_called_with_pages_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        given.update(options, k_shape=k.shape)
        return torch.full_like(q, 7), None

    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    case = build([causal(5, 2), [], causal(20, 1)], SMALL)
    attend = flash_attention.make_attend(case.rows, 4, 0.5)
    o_RNH = attend(case.q_RNH, case.k_cache_SKH, case.v_cache_SKH)
    assert given["seqused_k"].tolist() == [7, 0, 21]
    assert given["cu_seqlens_q"].tolist() == [0, 2, 2, 3]
    assert given["causal"] is True
    assert given["softmax_scale"] == 0.5
    assert given["page_table"].shape[0] == 3
    assert given["k_shape"][1] == case.rows.page_size
    assert (o_RNH == 7).all()


@pytest.mark.parametrize("case", ["131072x6", "1024x128", "32768x1", "1024x64x1"])
def test_launches_of_the_sweep_are_those_that_were_checked(case: str) -> None:
    """The checks of `benchmarks.block_attention sweep=true` run over one short sequence of as many rows."""
    ((name, (context, batch, options)),) = block_attention_sweep._cases(
        block_attention.DEFAULTS | {"exact": case}
    )
    num_rows = int(options["rows"])
    assert name == case and num_rows == (1 if case.count("x") == 2 else 32)

    def block(context: int, batch: int) -> SimpleNamespace:
        rows = SimpleNamespace(
            max_rows=num_rows, max_slots=context, num_listed=0, block_table=torch.zeros(batch, 1)
        )
        q_RNH = torch.zeros(batch * num_rows, 1, 1)
        return SimpleNamespace(step=SimpleNamespace(shape=QWEN3_8B, rows=rows, q_RNH=q_RNH))

    chosen = block_attention_sweep._chosen(block(4072, 1), batch, context)
    assert chosen == replace(launch_of(block(context, batch).step, fixed=False), pdl=True)
    found = list(block_attention_sweep.variants(chosen, short=False))
    assert found[0] == chosen
    assert all(each.combine_rows * each.combine_parts <= 32 * each.combine_warps for each in found)
