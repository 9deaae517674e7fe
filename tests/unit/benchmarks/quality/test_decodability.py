"""The decodability benchmark on an untrained checkpoint: arms, rows, percentiles, and the trace it writes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine.unmasking.record import NO_EVICTION, PassRecord
from benchmarks.engine.unmasking.rows import FULL_BLOCK, RowRules, rows_of
from benchmarks.engine.unmasking.trace import FOCUS, FULL, read_trace
from benchmarks.quality import decodability
from benchmarks.quality.decodability import Arm, Bench, Result, is_above, keeps_quality
from benchmarks.quality.decodability_selection import selecting
from benchmarks.quality.decodability_signal import bins_of, concentration
from benchmarks.results import read_rows
from idlm.errors import UserError
from idlm.infer.cli.evaluate import task_samples
from idlm.semantics import Semantics
from idlm.tasks import TASKS
from tests.unit.benchmarks.quality.evaluations import evaluation_of

BASE = Path(__file__).parents[4] / "recipes/assets/tiny_ar"
SIZE = 8


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    model = tmp_path / "model"
    shutil.copytree(BASE, model)
    Semantics(
        causality="block", logit_shift=False, block_size=SIZE, mask_token_id=165, stop_token_ids=(2,)
    ).save(model)
    small = ["device=cpu", "level=tiny", "num=3", "max_tokens=20", "batch=3"]
    return [f"model={model}", f"results={tmp_path}", *small]


def record(deltas: list[float], decided: tuple[int, ...]) -> PassRecord:
    places = tuple(range(len(deltas)))
    raw = tuple(-delta for delta in deltas)
    return PassRecord(masks=places, decided=decided, deltas=tuple(deltas), raw=raw)


def test_percentiles_are_those_of_the_masks_of_a_pass() -> None:
    passes = [record([0, 10, 20, 30, 40], (4,)), record([5, 4, 3, 2, 1, 0, -1, -2, -3, -4], (0, 2))]
    by_delta, by_raw = bins_of(passes, "delta"), bins_of(passes, "raw")
    assert [each.num_masks for each in by_delta] == [3] * 5
    assert [each.num_decided for each in by_delta] == [0, 0, 0, 1, 2]
    assert by_delta[-1].decoded_share == pytest.approx(2 / 3)
    assert [each.num_decided for each in by_raw] == [2, 1, 0, 0, 0]
    assert concentration(by_delta) == pytest.approx([0, 0, 0, 1 / 3, 2 / 3])
    assert [each.percentile for each in by_delta] == ["0-20", "20-40", "40-60", "60-80", "80-100"]


def test_few_masks_have_no_percentiles() -> None:
    assert sum(each.num_masks for each in bins_of([record([0, 1, 2, 3], (0,))], "delta")) == 0


def bench_of(arguments: list[str]) -> Bench:
    options = decodability.parse_options(arguments, decodability.OPTIONS)
    task = TASKS.get("ledger")(level="tiny")
    return Bench(options=options, task=task, samples=task_samples(task, "test", 3))


def result_of(marks: str, arm: Arm) -> Result:
    evaluation, right = evaluation_of(marks)
    return Result(arm=arm, evaluation=evaluation, marks=right, rows_per_token=1.0)


def test_what_is_judged() -> None:
    base, focus = Arm(name=FULL), Arm(name=FOCUS, accelerators={"focus": {}})
    full = result_of("+" * 96 + "-" * 4, base)
    assert keeps_quality(result_of("+" * 94 + "-" * 6, focus), full) is True
    assert keeps_quality(result_of("+" * 93 + "-" * 7, focus), full) is False
    assert keeps_quality(result_of("-" * 100, replace(focus, threshold=0.7)), full) is None
    assert (
        keeps_quality(result_of("-" * 100, replace(focus, accelerators={"focus": {"alpha": 2.0}})), full)
        is None
    )
    assert is_above(full, result_of("+" * 80 + "-" * 20, base))
    assert not is_above(full, result_of("+" * 95 + "-" * 5, base))


def test_cases_name_what_an_arm_is() -> None:
    focus = Arm(name=FOCUS, threshold=0.8, accelerators={"focus": {"commit": "unfrozen"}})
    assert focus.case() == {"arm": "focus", "k": "-", "threshold": 0.8, "alpha": 1.5, "commit": "unfrozen"}
    dc = Arm(name="dc", accelerators={"focus": NO_EVICTION | {"stability": "plain"}})
    assert (dc.case()["alpha"], dc.case()["commit"]) == ("-", "clean")
    top = Arm(name="top", accelerators={"focus": {}}, selection="top", k=4)
    assert (top.case()["alpha"], top.case()["k"]) == ("-", 4)
    assert Arm(name=FULL).case()["commit"] == "-"


def test_every_part_leaves_its_rows(arguments: list[str], tmp_path: Path) -> None:
    given = [*arguments, "k=1,2", "thresholds=0.9,0.7", "alphas=1.2", "mage_k=4", "record=true"]
    figures = tmp_path / "figures"
    decodability.measure([*given, f"figures={figures}"])
    drawn = {path.name for path in figures.iterdir()}
    assert drawn == {"decodability_signal.svg", "decodability_quality.svg"}
    rows = read_rows("decodability", results=tmp_path)
    metrics = {"exact_match", "standard_error", "standard_error_of_difference", "rows_per_token"}
    assert {row["metric"] for row in rows} >= metrics | {"decoded_share", "share_of_decoded"}
    cases = [row["case"] for row in rows if row["metric"] == "exact_match"]
    arms = {(case["arm"], case["k"]) for case in cases}
    assert arms == {
        *((name, k) for name in ("top", "random", "bottom", "left") for k in (1, 2)),
        *((name, "-") for name in ("full", "focus", "dc", "dc+", "focus_published")),
        *((name, 4) for name in ("mage", "focus+mage")),
    }
    assert {case["threshold"] for case in cases if case["arm"] == "focus"} == {0.9, 0.7}
    assert {case["commit"] for case in cases if case["arm"] == "focus"} == {"clean", "unfrozen"}
    signals = [row["case"]["signal"] for row in rows if row["metric"] == "decoded_share"]
    assert signals == ["delta"] * 5 + ["raw"] * 5


@pytest.mark.parametrize(("name", "commit"), [(FULL, "clean"), (FOCUS, "clean"), (FOCUS, "unfrozen")])
def test_the_trace_implies_the_rows_that_the_engine_computes(
    name: str, commit: str, arguments: list[str], tmp_path: Path
) -> None:
    """Of whole answers, row for row. With unfrozen commits keys differ, so that a block may take another way:
    then only the rules are compared, by the rows of the other commit.
    """
    path = tmp_path / "trace.jsonl"
    decodability.measure([*arguments, "parts=signal", f"trace={path}"])
    trace, bench = read_trace(path, SIZE), bench_of(arguments)
    options = {"focus": {"commit": commit}} if name == FOCUS else {}
    found = bench.result(Arm(name=name, accelerators=options))
    blocks = trace.blocks[name]
    rules = RowRules(alpha=trace.alpha, commit=commit) if name == FOCUS else FULL_BLOCK
    rows, num_passes = rows_of(blocks, SIZE, rules), sum(len(block.decided) for block in blocks)
    last = [max(block.start for block in blocks if block.prompt == number) for number in range(3)]
    never_stored = [block for block in blocks if block.start == last[block.prompt]]
    num_rows = num_passes * (rows.kept + rows.committed)
    num_rows -= sum(rows_of([block], SIZE, rules).committed * len(block.decided) for block in never_stored)
    num_tokens = found.evaluation.num_tokens
    tolerance = 0.1 if commit == "unfrozen" else 1e-9
    assert num_rows / num_tokens == pytest.approx(found.rows_per_token, rel=tolerance)


@pytest.mark.parametrize("name", decodability.SELECTIONS)
def test_a_selection_keeps_so_many_masks(name: str, arguments: list[str]) -> None:
    """With one mask a pass, at least every block takes as many passes as it has masks less placeholders."""
    bench = bench_of(arguments)
    rows = {
        k: bench.result(Arm(name=name, accelerators={"focus": {}}, selection=name, k=k)).rows_per_token
        for k in (1, SIZE)
    }
    full = bench.full()
    everything = bench.result(
        Arm(name=name, accelerators={"focus": {"stability": "off"}}, selection=name, k=SIZE)
    )
    assert everything.rows_per_token == pytest.approx(full.rows_per_token, rel=0.05)
    answers = [[done.token_ids for done in each.evaluation.completions] for each in (everything, full)]
    assert answers[0] == answers[1]
    assert rows[1] != rows[SIZE]


def test_selections_end() -> None:
    from idlm.infer.accelerators.focus import FocusPass

    before = FocusPass._select
    with selecting("top", 2):
        assert FocusPass._select is not before
    assert FocusPass._select is before


def test_unknown_parts_and_numbers_are_refused(arguments: list[str]) -> None:
    for option in ("parts=tables", "k=two"):
        with pytest.raises(UserError, match="IDLM-0107"):
            decodability.measure([*arguments, "parts=selection", option])
