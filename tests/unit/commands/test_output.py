"""An output file holds valid JSON, whatever numbers a model returned, and belongs to one run at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from idlm.contracts import Completion, TokenLogprob
from idlm.errors import UserError
from idlm.files.disk import lock_file
from idlm.infer.cli.batch import figures
from idlm.infer.cli.output import answer_file, exclusive_output

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


def test_an_output_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    (tmp_path / "link").symlink_to("out")
    with exclusive_output(output, overwrite=False):
        for name in (output, str(tmp_path / "link"), f"{tmp_path}/../{tmp_path.name}/out"):
            with (
                pytest.raises(UserError, match="IDLM-0462.*another run"),
                exclusive_output(name, overwrite=True),
            ):
                pytest.fail("two runs have the lock")
        with (
            exclusive_output(str(tmp_path / "other"), overwrite=False),
            exclusive_output(None, overwrite=False),
        ):
            pass
    with exclusive_output(output, overwrite=False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


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

    monkeypatch.setattr("idlm.infer.cli.output.lock_file", locking)
    with pytest.raises(UserError, match="IDLM-0431"), exclusive_output(str(output), overwrite=False):
        pytest.fail("it is lost")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_system_without_locks_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refusing)
    output = str(tmp_path / "out")
    with (
        pytest.warns(UserWarning, match="no locks"),
        exclusive_output(output, overwrite=False),
        answer_file(output) as answers,
    ):
        answers.write({"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_invalid_unicode_is_escaped(tmp_path: Path) -> None:
    """A path may hold any byte."""
    with answer_file(str(tmp_path / "out")) as answers:
        answers.write({"model": "caf\udce9"})
    assert json.loads((tmp_path / "out").read_bytes()) == {"model": "caf\udce9"}
