"""An output file holds valid JSON, whatever numbers a model returned, and belongs to one run at a time; its
records are found again by the run after."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Completion, SamplingParams, TokenLogprob
from idlm.errors import UserError
from idlm.files.disk import lock_file
from idlm.infer.cli.batch import figures
from idlm.infer.cli.output import answer_file, exclusive_output
from idlm.infer.cli.prompts import PromptLine
from idlm.infer.cli.resume import ResumeState, find_resume_state, of_request
from tests.errors import refused

ROOT = Path(__file__).resolve().parents[3]


def _refuse(constant: str) -> None:
    pytest.fail(f"{constant} is not JSON")


def test_log_probabilities_that_are_not_finite_are_null(tmp_path: Path) -> None:
    done = Completion(
        request_id="a",
        index=0,
        text="x",
        token_ids=(5, 6),
        finish_reason="length",
        num_prompt_tokens=1,
        num_forwards=2,
        logprobs=(
            TokenLogprob(token_id=5, logprob=math.nan, top={5: math.nan}),
            TokenLogprob(token_id=6, logprob=-0.5, top={6: -0.5, 7: -math.inf}),
        ),
    )
    with answer_file(str(tmp_path / "out")) as answers:
        answers.write(figures(done))
    record = json.loads((tmp_path / "out").read_text(), parse_constant=_refuse)
    assert record["logprobs"] == [
        {"token_id": 5, "logprob": None, "top": {"5": None}},
        {"token_id": 6, "logprob": -0.5, "top": {"6": -0.5, "7": None}},
    ]
    assert (record["token_ids"], record["tokens_per_forward"]) == ([5, 6], 1.0)


def test_the_lock_of_a_run_ends_when_it_is_killed(tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    program = """
import sys, time
from idlm.infer.cli.output import exclusive_output
with exclusive_output(sys.argv[1], overwrite=False):
    print("locked", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program, output], stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match="IDLM-0462"), exclusive_output(output, overwrite=False):
            pytest.fail("two runs have the lock")
        other.kill()
    assert other.returncode == -signal.SIGKILL
    with exclusive_output(output, overwrite=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_finished_before_the_lock_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run ends between this one's first check and its lock."""
    output = tmp_path / "out"

    def locking(path: Path) -> int | None:
        output.write_text("theirs")
        return lock_file(path)

    monkeypatch.setattr("idlm.files.disk.lock_file", locking)
    with pytest.raises(UserError, match="IDLM-0431"), exclusive_output(str(output), overwrite=False):
        pytest.fail("it is lost")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


COMMON = {"model": "m", "model_digest": "d", "decoder": "ar", "sampling.temperature": 0}


def _line(number: int, name: str, **sampling: Any) -> PromptLine:
    params = SamplingParams(**sampling)
    return PromptLine(location=f"in:{number}", request_id=name, prompt="p", params=params)


def _record(line: PromptLine, **changes: Any) -> str:
    made = of_request(COMMON, line.params)
    output = {
        "request_id": line.request_id,
        "index": 0,
        "prompt": line.prompt,
        "run_config": made,
        "error": None,
    }
    return json.dumps(output | changes) + "\n"


def _resume_state(tmp_path: Path, lines: list[PromptLine], text: str) -> ResumeState:
    source = tmp_path / "out.partial"
    source.write_text(text)

    def run_config(line: PromptLine) -> dict[str, Any]:
        return of_request(COMMON, line.params)

    def read() -> Iterator[PromptLine]:
        return iter(lines)

    return find_resume_state(source, read, run_config)


def _locations(found: ResumeState) -> list[str]:
    return [line.location for line in found.missing]


@pytest.mark.parametrize("there", [(1,), (1, 0), (2, 1), (2, 0, 1), (0, 2), (2,)])
def test_lines_without_a_record_are_missing(tmp_path: Path, there: tuple[int, ...]) -> None:
    lines = [_line(number + 1, str(number), max_tokens=6 - number) for number in range(3)]
    found = _resume_state(tmp_path, lines, "".join(_record(lines[number]) for number in there))
    assert len(found.finished_lines) == len(there)
    assert _locations(found) == [line.location for number, line in enumerate(lines) if number not in there]


@pytest.mark.parametrize("changes", [{"request_id": "b"}, {"prompt": "q"}])
def test_a_record_that_belongs_to_no_line_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    line = _line(1, "a")
    refused("IDLM-0444.*no line of the input", _resume_state, tmp_path, [line], _record(line, **changes))


def test_equal_numbers_are_equal_settings_and_a_model_may_move(tmp_path: Path) -> None:
    line = _line(1, "a", top_p=0.5, min_p=0)
    made = {**of_request(COMMON, line.params), "sampling.temperature": 0.0, "model": "elsewhere"}
    assert _resume_state(tmp_path, [line], _record(line, run_config=made)).is_whole


def test_blank_lines_are_skipped_and_broken_ones_have_a_number(tmp_path: Path) -> None:
    lines = [_line(number, str(number)) for number in range(1, 5)]
    records = [_record(line) for line in lines]
    blank = _resume_state(tmp_path, lines, "\n" + records[0] + " \n\n" + "".join(records[1:]) + "\n")
    assert blank.is_whole and blank.broken_lines == () and blank.finished_lines == {2, 5, 6, 7}
    broken = _resume_state(
        tmp_path, lines, records[0] + '{"request_id"\n' + records[2] + "\n" + records[3][:-9]
    )
    assert (broken.finished_lines, broken.broken_lines) == ({1, 3}, (2, 5))
    assert _locations(broken) == ["in:2", "in:4"]
