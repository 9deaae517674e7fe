"""Which options of training become defaults: gains on the same base, seed by seed, and the rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import read_rows
from benchmarks.table import section
from benchmarks.training.studies import study
from benchmarks.training.studies.study_ablations import OPTIONS, chosen, decisions, drafted_greedily, gains
from benchmarks.training.studies.study_arms import ARMS, CHAINS, STRIDED
from benchmarks.training.studies.study_report import collect, report
from benchmarks.training.studies.study_worker import marks_text

NUM = 1000


def record_of(
    name: str, seed: int, forwards: float, *, right: int = NUM, base: str = "b", cells: int = 8
) -> dict[str, Any]:
    """An arm that decides so many tokens in each of 1,000 passes, and answers `right` problems."""
    found = [
        {
            "task": chain,
            "decoder": "isd",
            "strategy": cell.label,
            "temperature": cell.temperature,
            "stride": 4,
            "exactness": "exact",
            "marks": marks_text([True] * right + [False] * (NUM - right)),
            "num_tokens": round(1000 * forwards) + 10,
            "num_forwards": 1010,
            "num_prompt_passes": 10,
            "accepted": [900, 800, 700],
            "tested": [1000, 900, 800],
            "seconds": 1.0,
            "num_failed": 0,
            "equal_to_ar": None,
        }
        for cell in STRIDED
        for chain in CHAINS
    ]
    machine = {"gpu": "G", "num_gpus": 1, "torch": "2", "triton": None, "commit": None, "date": "2026-1-1"}
    return {
        "name": name,
        "seed": seed,
        "base": base,
        "size": "toy",
        "steps": 5,
        "flops": 1.0,
        "num": NUM,
        "trained": {"seconds": 1.5},
        "is_whole": True,
        "machine": machine,
        "cells": found[:cells],
    }


def pair(arm: str, forwards: tuple[float, ...], **changes: Any) -> list[dict[str, Any]]:
    """The arm with these tokens per forward by seed, and the one without its option with 3."""
    over = OPTIONS[arm]
    return [
        *(record_of(over, seed, 3.0) for seed in range(len(forwards))),
        *(record_of(arm, seed, each, **changes) for seed, each in enumerate(forwards)),
    ]


@pytest.mark.parametrize(
    ("forwards", "changes", "said"),
    [
        ((3.06, 3.09, 3.12), {}, "BECOMES THE DEFAULT"),
        ((3.006, 3.009, 3.012), {}, "no default: it gains less than 1%"),
        ((3.001, 3.001, 3.3), {}, "no default: the gain is within two standard errors"),
        ((2.997, 3.3, 3.3), {}, "within two standard errors, a seed loses"),
        ((3.06, 3.09, 3.12), {"right": NUM - 6}, "no default: it loses more than 0.5 points"),
        ((3.06, 3.09, 3.12), {"right": NUM - 4}, "BECOMES THE DEFAULT"),
        ((3.06, 3.09), {}, "no default: decoded in 2 seeds of 3"),
    ],
)
def test_an_option_becomes_the_default_by_the_rule(
    forwards: tuple[float, ...], changes: dict[str, Any], said: str
) -> None:
    line, *others = decisions(collect(pair("random_phase", forwards, **changes)))
    assert line.endswith(said)
    assert others == [f"{arm} over idlm_4: not run" for arm in ("no_balance", "no_curriculum", "no_shift")]


def test_the_gain_is_that_of_pairs_on_one_base() -> None:
    [gain] = gains(collect(pair("random_phase", (3.06, 3.12, 2.94), right=NUM - 1)))
    assert gain.forwards == pytest.approx((0.02, 0.04, -0.02))
    assert gain.matches == pytest.approx((-0.001,) * 3)
    assert not gains(collect(pair("random_phase", (3.06, 3.09, 3.12), base="another")))
    # An arm that was cut off says nothing yet.
    assert not gains(collect(pair("random_phase", (3.06, 3.09, 3.12), cells=7)))


def test_of_two_ways_of_distillation_the_better_one_is_chosen() -> None:
    better = pair("lora_overlap", (3.12, 3.15, 3.18))
    records = [*pair("lora_kl", (3.06, 3.09, 3.12)), *(one for one in better if one["name"] != "lora_4")]
    measured = collect(records)
    assert [gain.arm for gain in chosen(gains(measured)).values()] == ["lora_overlap"]
    first, second = decisions(measured)
    assert first.startswith("lora_kl") and first.endswith("no default: lora_overlap gains more")
    assert second.startswith("lora_overlap") and second.endswith("BECOMES THE DEFAULT")


def test_gains_are_rows_of_a_table(tmp_path: Path) -> None:
    text = report(pair("random_phase", (3.06, 3.09, 3.12)), results=tmp_path)
    assert "random_phase over idlm_4, 3 seeds: tokens per forward +3.00 +- 0.58 %" in text
    found = {row["metric"]: row["value"] for row in read_rows("study_ablations", results=tmp_path)}
    assert found["forward_gain"] == pytest.approx(3)
    assert found["forward_gain_least"] == pytest.approx(2)
    assert "3.00 %" in section("study_ablations", tmp_path)


def test_an_arm_that_was_trained_alone_decides_nothing(tmp_path: Path) -> None:
    records = pair("lora_kl", (3.06, 3.09, 3.12), cells=1)
    for record in records:
        gained = 0.01 * (1 + record["seed"]) if record["name"] == "lora_kl" else 0.0
        record["trained"]["acceptance"] = [0.9 + gained, 0.8 + gained]
    text = report(records, results=tmp_path)
    said = "lora_kl over lora_4, 3 trained: acceptance in training +2.00 +- 0.58 points; no default: decoded"
    assert f"{said} in 0 seeds of 3" in text
    found = {row["metric"]: row["value"] for row in read_rows("study_ablations", results=tmp_path)}
    assert found == {"training_gain": pytest.approx(2), "training_gain_se": pytest.approx(1 / 3**0.5)}


def test_drafts_without_the_shift_are_compared_at_equal_distances() -> None:
    """The first of them is as far as the clean row's own token; a last one of the other arm has no pair."""
    other, mine = record_of("idlm_4", 0, 3.0), record_of("no_shift", 0, 1.0, cells=1)
    other["trained"]["acceptance"] = [0.96, 0.93, 0.1]
    mine["trained"]["acceptance"] = [0.99, 0.90, 0.89]
    [gain] = gains(collect([other, mine]))
    assert (gain.arm, gain.forwards) == ("no_shift", ())
    assert gain.training == pytest.approx((-0.05,))


def test_greedy_answers_of_gated_lora_are_counted_against_its_base(tmp_path: Path) -> None:
    records = pair("lora_kl", (3.06, 3.09, 3.12))
    for record in records:
        record["cells"][0]["equal_to_ar"] = 0.999 if record["seed"] else 1.0
    assert list(drafted_greedily(collect(records))) == [(("lora_4", "cold", 0.0, "short"), 3 * NUM, 2)]
    text = report(records, results=tmp_path)
    assert "-    R-ISD equals its base, cold short: 2,998 of 3,000" in text
    assert "| cold | 3,000 | 2 |" in section("study_ablations", tmp_path)
    for record in records:
        record["cells"][0]["strategy"] = "cold_deterministic"
    assert "NOT  R-ISD equals its base, cold_deterministic short: 2,998 of 3,000" in report(records)


def test_ablations_have_bases_and_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They change no row of the study, whose arms they repeat."""
    monkeypatch.chdir(tmp_path)
    compared = pair("random_phase", (3.06, 3.09, 3.12), right=NUM // 2)
    write(tmp_path / "study", record_of("idlm_4", 0, 2.0, base="first"))
    for record in compared:
        write(tmp_path / study.ABLATIONS / "study", record | {"base": "another"})
    assert study.study(["part=table", f"results={tmp_path}"]) == 0
    assert "random_phase over idlm_4, 3 seeds" in capsys.readouterr().out
    rows = read_rows("study", results=tmp_path)
    assert {row["case"]["arm"] for row in rows} == {"idlm_4"}
    assert {row["value"] for row in rows if row["metric"] == "tokens_per_forward"} == {2.0}
    assert {row["case"]["arm"] for row in read_rows("study_ablations", results=tmp_path)} == {"random_phase"}


def write(folder: Path, record: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{record['seed']}_{record['name']}.json").write_text(json.dumps(record))


def test_arms_keep_their_options_when_defaults_change() -> None:
    """`idlm_4` and `lora_4` are without the options that the study may make defaults."""
    for name, arm in ARMS.items():
        if "objective=idlm" in arm.overrides:
            phase = "random" if name == "random_phase" else "response"
            assert f"train.phase={phase}" in arm.overrides, name
        if name.startswith("lora"):
            distill = {"lora_kl": "kl", "lora_overlap": "overlap"}.get(name, "none")
            assert f"train.distill={distill}" in arm.overrides, name
