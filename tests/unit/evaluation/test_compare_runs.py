"""`idlm report`: the table and plots of several runs, and what runs lack."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.train import report
from idlm.train.compare import compare
from tests.errors import refused

ACCEPTANCE = [0.8, 0.5]


def write_run(folder: Path, *, held_out: bool = False, drafts: bool = True) -> Path:
    acceptance = ACCEPTANCE if drafts else []
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "stage": 0,
            "stride": 3,
            "mask_loss": 1 / step,
            "acceptance": acceptance,
            "seconds": 30.0,
        }
        for step in (10, 1000)
    ]
    if held_out:
        line = {
            "held_out": True,
            "step": 1000,
            "stage": 0,
            "stride": 3,
            "mask_loss": 0.25,
            "acceptance": [0.75, 0.5],
        }
        lines.append(line)
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


class Conversion:
    """Stands in for what the engine measures."""

    class Shift:
        def _asdict(self) -> dict[str, float]:
            return {"kl": 0.0125, "agreement": 0.97}

    shifts = (Shift(),)

    def text(self) -> str:
        return "what changed"

    def draw(self, path: Path) -> None:
        path.write_text("<svg/>")


def table_of(shown: str) -> dict[str, dict[str, str]]:
    lines = [line.strip("| ").split(" | ") for line in shown.splitlines() if line.startswith("| ")]
    return {cells[0]: dict(zip(lines[0], cells, strict=True)) for cells in lines[1:]}


def test_runs_are_compared_and_what_they_lack_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = write_run(Path("whole"), held_out=True)
    write_run(Path("young"))
    write_run(Path("a=b"), drafts=False)
    measured = (report.Measurement(decoder="isd", tokens_per_forward=2.125), report.Measurement(decoder="ar"))
    samples = report.SampleReport(measurements=measured, conversion=Conversion())
    report.write_report(whole, report.read_metrics(whole / "run" / "metrics.jsonl"), {}, samples)
    assert compare(["whole", "young", "a=b", "whole"]) == 0
    shown = capsys.readouterr().out
    rows = table_of(shown)
    assert list(rows) == ["whole", "young", "a=b"]
    assert list(rows["whole"].values())[1:] == [
        "1,000", "mask 0.001", "mask 0.250", "0.750 0.500", "1.69", "isd 2.12", "0.0125", "60 s",
    ]  # fmt: skip
    assert rows["young"]["acceptance by position"] == "0.800 0.500"
    assert "- young lacks: held-out loss, measured, clean KL\n" in shown
    assert "- a=b lacks: held-out loss, acceptance by position, expected tokens per forward," in shown
    assert "- whole" not in shown
    page = (tmp_path / "comparison.html").read_text()
    figures = [base64.b64decode(text).decode() for text in re.findall(r"base64,([^\"]+)", page)]
    assert len(figures) == 3 and "young lacks" in page
    for name in ("whole mask", "young mask", "a=b mask"):
        assert f"<!-- {name} -->" in figures[0]
    assert "<!-- young draft 2 -->" in figures[1] and "<!-- a=b" not in figures[1]


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, report_alone = write_run(tmp_path / "run"), tmp_path / "old"
    (report_alone / "report").mkdir(parents=True)
    (report_alone / "report" / "figures.json").write_text('{"clean": {"kl": 0.5}}')
    assert compare([str(run), str(report_alone), "output=null"]) == 0
    assert table_of(capsys.readouterr().out)[str(report_alone)]["clean KL"] == "0.5000"
    empty, gone = tmp_path / "empty", tmp_path / "gone"
    empty.mkdir()
    with pytest.raises(UserError, match=f"IDLM-0555: no run/metrics.jsonl in {empty}, {gone}\n"):
        compare([str(run), str(empty), str(report_alone), str(gone)])


def test_without_a_run_nothing_is_compared(tmp_path: Path) -> None:
    refused("IDLM-0555: no run is given", compare, [])
    refused("no run/metrics.jsonl in", compare, [str(tmp_path)])
    for given in ("outputs=x", "--output"):
        refused("IDLM-0101", compare, [str(write_run(tmp_path / given)), given[-9:]])


def test_the_table_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare([str(write_run(tmp_path / "one")), "output=null"]) == 0
    assert "plots" not in capsys.readouterr().out
