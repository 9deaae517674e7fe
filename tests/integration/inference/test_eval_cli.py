"""`idlm-eval` in process on the bundled base: figures, records, refusals before anything is computed."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.demo import decode_tokens_per_forward
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import evaluate, run_evaluation, task_samples
from idlm.infer.runtime.model_runner import Runner
from idlm.semantics import Semantics
from idlm.tasks import TASKS
from tests.contracts.engines import wanted_of
from tests.errors import refused
from tests.integration.inference.command_lines import (
    ISD,
    MODEL,
    SPARE_ROW,
    TINY,
    interrupt_after,
    read_lines,
    reference,
)

BASE = [*MODEL, "sampling.temperature=0", "sampling.max_tokens=100", "num=3"]


def _rows(out: str) -> dict[str, list[str]]:
    """The printed table by decoder."""
    head, *lines = [line.split() for line in out.splitlines()]
    assert head == ["decoder", "exactness", "exact-match", "95%-interval", "acceptance", "TPF", "tokens/s"]
    return {line[0]: line[1:3] + line[4:] for line in lines if line[1] != "-" and line[0][-1] != ":"}


@pytest.mark.sweep
def test_both_decoders_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.warns(UserWarning, match="stride 4"):
        assert run_evaluation([*BASE, *ISD, f"output={output}"]) == 0
    rows = _rows(capsys.readouterr().out)
    assert list(rows) == ["ar", "isd"]
    assert rows["ar"][:4] == ["exact", rows["isd"][1], "-", "1.00"]
    assert 0 <= float(rows["isd"][2]) <= 1
    assert float(rows["isd"][3]) >= 1

    records = read_lines(output)
    samples = task_samples(TASKS.get("ledger")(level="tiny"), "test", 3)
    assert [r["decoder"] for r in records] == ["ar"] * 3 + ["isd"] * 3
    assert [r["prompt"] for r in records] == [sample.prompt for sample in samples] * 2
    for ar, isd in zip(records[:3], records[3:], strict=True):
        assert ar["completion"]["token_ids"] == isd["completion"]["token_ids"]
        assert ar["verdict"] == isd["verdict"]
    share = sum(r["verdict"]["correct"] for r in records[:3]) / 3
    assert float(rows["ar"][1]) == pytest.approx(share, abs=5e-4)


@pytest.mark.sweep
def test_several_samples_per_prompt_are_judged_against_their_prompt(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    arguments = ["sampling.n=2", "num=2", "sampling.temperature=1", "sampling.seed=3", f"output={output}"]
    assert run_evaluation([*BASE, "decoder=ar", *arguments]) == 0
    records = read_lines(output)
    task = TASKS.get("ledger")(level="tiny")
    first, second = task_samples(task, "test", 2)
    assert [r["prompt"] for r in records] == [first.prompt] * 2 + [second.prompt] * 2
    assert [r["completion"]["seed"] for r in records] == [3, 3, 4, 4]
    for record in records:
        verdict = task.check(record["prompt"], record["completion"]["text"])
        assert record["verdict"]["correct"] == verdict.correct


def _spoil_a_pass(monkeypatch: pytest.MonkeyPatch, number: int, *, every_row: bool = False) -> None:
    """Logits of one request, or of all, are not finite in one pass."""
    forward, passes = Runner.forward, 0

    def spoiled(runner: Runner, plan: Any) -> Any:
        nonlocal passes
        wanted = forward(runner, plan)
        passes += 1
        if passes == number:
            logits_XV = wanted.logits().clone()
            logits_XV[: None if every_row else 1] = torch.nan
            return wanted_of(logits_XV)
        return wanted

    monkeypatch.setattr(Runner, "forward", spoiled)


@pytest.mark.sweep
def test_an_answer_that_fails_is_wrong_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run_evaluation([*BASE, f"output={whole}"]) == 0
    capsys.readouterr()
    _spoil_a_pass(monkeypatch, 5)
    with pytest.warns(UserWarning, match="decoder ar: 1 of 3 answers failed .* the first: IDLM-0457: "):
        assert run_evaluation([*BASE, f"output={output}"]) == 1
    records = read_lines(output)
    failed, *rest = records
    assert failed["completion"]["finish_reason"] == "error"
    assert failed["completion"]["error"] == failed["verdict"]["reason"]
    assert not failed["verdict"]["correct"]
    assert not failed["verdict"]["final_answer_correct"]
    assert [r["completion"]["text"] for r in rest] == [r["completion"]["text"] for r in read_lines(whole)[1:]]
    share = sum(r["verdict"]["correct"] for r in records) / 3
    assert float(_rows(capsys.readouterr().out)["ar"][1]) == pytest.approx(share, abs=5e-4)


def test_where_every_answer_fails_there_are_figures_still(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TASKS.get("ledger")(level="tiny")
    _spoil_a_pass(monkeypatch, 1, every_row=True)
    with pytest.warns(UserWarning, match="1 of 1 answers failed"):
        result = evaluate(reference(), task, task_samples(task, "test", 1), SamplingParams(temperature=0))
    figures = (
        [done.error is None for done in result.completions],
        result.exact_match,
        result.tokens_per_forward,
    )
    assert figures == ([False], 0, 0)
    assert decode_tokens_per_forward(result) == 0
    assert not reference().has_work


def test_an_interrupted_evaluation_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.from_pretrained(TINY, "ar", device="cpu", dtype="float32", max_num_seqs=2, max_length=160)
    task = TASKS.get("ledger")(level="tiny")
    samples, params = task_samples(task, "test", 3), SamplingParams(temperature=0, max_tokens=8)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 3)
        evaluate(engine, task, samples, params)
    assert not engine.has_work
    with pytest.raises(UserError, match="IDLM-0412: prompt 4: "):
        evaluate(engine, task, [*samples, dataclasses.replace(samples[0], prompt="x " * 400)], params)
    assert not engine.has_work
    assert len(evaluate(engine, task, samples, params).completions) == 3


@pytest.fixture
def block(tmp_path: Path) -> list[str]:
    """Arguments for a block-causal checkpoint, which answers nothing useful."""
    directory = tmp_path / "block"
    shutil.copytree(TINY, directory)
    (directory / "manifest.json").unlink(missing_ok=True)
    Semantics(causality="block", logit_shift=False, block_size=4, mask_token_id=SPARE_ROW).save(directory)
    return [*BASE, f"model={directory}", "num=1", "sampling.max_tokens=8"]


def test_block_rows_are_compared_with_one_token_per_pass(
    block: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    dynamic = ["decoder.strategy=low_confidence_dynamic", "decoder.threshold=0.01"]
    assert run_evaluation([*block, "decoder=block", *dynamic]) == 0
    rows = _rows(capsys.readouterr().out)
    assert list(rows) == ["block:sequential", "block"]
    assert float(rows["block:sequential"][3]) < float(rows["block"][3])
    assert run_evaluation([*block, "decoder=block", "decoder.strategy=sequential"]) == 0
    assert list(_rows(capsys.readouterr().out)) == ["block"]


def test_a_baseline_that_does_not_fit_is_named_before_anything_is_decoded(
    block: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idlm.infer.evaluation.evaluate.evaluate", None)
    with pytest.raises(UserError, match="IDLM-0452: baseline=ar .*causality='block'") as caught:
        run_evaluation([*block, "decoder=block", "baseline=ar"])
    assert "baseline=null" in caught.value.fix


@pytest.mark.parametrize(
    ("code", "arguments", "words"),
    [
        ("IDLM-0443", ["num=0"], "num=0"),
        ("IDLM-0102", ["task=ledgr"], "'ledger'"),
        ("IDLM-0220", ["level=tny"], "'tiny'"),
        ("IDLM-0223", ["split=tests"], "tests"),
        ("IDLM-0101", ["sampling.topp=1"], "'sampling.top_p'"),
        ("IDLM-0442", ["output=/nowhere/out"], "/nowhere"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, code: str, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", None)
    error = refused(code, run_evaluation, [*BASE, *arguments])
    assert words in error.message
