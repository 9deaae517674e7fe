"""Progress of long runs: a bar that fits the terminal, plain lines elsewhere, and nothing
on standard output."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from idlm.cli.progress import Progress
from idlm.contracts import Completion
from idlm.infer.cli.batch import AnswerProgress
from idlm.infer.cli.config import loading
from idlm.infer.engine import StreamEvent
from idlm.train.loop.progress import _new_bar, describe
from tests.toy import load_model, write_toy_checkpoint

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WIDTH = 80


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=WIDTH, height=20, color_system=None)


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=WIDTH)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return ESCAPES.sub("", console.file.getvalue()).replace("\r", "\n")


def event(name: str, num_tokens: int, *, is_last: bool, error: str | None = None) -> StreamEvent:
    tokens = tuple(range(num_tokens))
    done = Completion(
        request_id=name,
        index=0,
        text="",
        token_ids=tuple(range(10)),
        finish_reason="stop",
        num_prompt_tokens=1,
        num_forwards=4,
        error=error,
    )
    return StreamEvent(
        request_id=name, index=0, token_ids=tokens, text="", completion=done if is_last else None
    )


def test_the_bar_of_answers_has_counts_speed_tpf_and_time_left() -> None:
    console, clock = terminal(), FakeClock()
    with AnswerProgress("isd+mage", total=4, console=console, clock=clock) as progress:
        progress.see([event("a", 6, is_last=False)])
        clock.now = 20.0
        progress.see([event("a", 4, is_last=True), event("b", 10, is_last=True)])
    frames = written(console)
    [bar] = {line.rstrip() for line in frames.splitlines() if "2/4" in line}
    assert bar.startswith("isd+mage ━━━━━━━━━━  ")
    assert bar.endswith("left 0:00:20")
    assert "\n20 tokens  1 tokens/s  TPF 2.50" in frames
    assert max(map(len, frames.splitlines())) <= WIDTH


def test_without_a_terminal_a_line_comes_every_30_seconds() -> None:
    console, clock = plain(), FakeClock()
    with AnswerProgress("isd", total=8, console=console, clock=clock) as progress:
        for second in range(0, 91, 5):
            clock.now = float(second)
            events = [event("a", 1, is_last=False)] if second < 85 else []
            progress.see([event("b", 1, is_last=True, error="IDLM-0448")] if second == 10 else events)
    assert written(console).splitlines() == [
        "isd  1/8  7 tokens  0 tokens/s  TPF 2.50  1 failed  left 0:03:30",
        "isd  1/8  13 tokens  0 tokens/s  TPF 2.50  1 failed  left 0:07:00",
        "isd  1/8  17 tokens  0 tokens/s  TPF 2.50  1 failed  left 0:10:30",
    ]


def test_progress_is_on_standard_error_and_leaves_standard_output_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also while the bar is there: what is printed goes where it would go without a bar."""
    console = terminal()
    with Progress("answers", total=2, console=console) as progress, progress.hidden():
        print("an answer")
    assert capsys.readouterr().out == "an answer\n"
    assert "an answer" not in written(console)
    clock = FakeClock()
    with Progress("answers", total=2, clock=clock) as progress:
        clock.now = 31.0
        progress.update(1)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "answers  1/2  left 0:00:31\n")


WRITES = """
import logging, sys
early = logging.StreamHandler()
logging.getLogger("a.library").addHandler(early)
logging.getLogger("printing").addHandler(logging.StreamHandler(sys.stdout))
from rich.console import Console
from idlm.cli.progress import figure_bar
bar = figure_bar(Console(width=60))
task = bar.add_task("training", total=4, text="figures without an end")
for _ in range(2):
    bar.start()
    bar.update(task, completed=2)
    bar.refresh()
    logging.getLogger("a.library").warning("logged by a handler that is older than the bar")
    logging.getLogger("printing").error("logged to standard output")
    print("printed")
    print("printed as an error", file=sys.stderr)
    bar.refresh()
    with bar.hidden():
        print("printed while it is hidden")
bar.stop()
print("after the bar", early.stream is sys.stderr)
"""


def on_screen(output: str) -> list[str]:
    """The lines that a terminal shows after `output`: text, carriage return, line feed, up, erase."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.startswith("\x1b"):
            row -= int(part[2:-1]) if part.endswith("A") else 0
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("errors", ["the terminal", "a file"])
def test_what_is_written_beside_a_bar_has_lines_of_its_own(errors: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    file = (tmp_path / "errors").open("w")
    stderr = file if errors == "a file" else theirs
    child = subprocess.Popen([sys.executable, "-c", WRITES], stdout=theirs, stderr=stderr)
    os.close(theirs)
    output = b""
    # Reading the end of a terminal raises EIO on Linux.
    with contextlib.suppress(OSError):
        while part := os.read(ours, 65536):
            output += part
    assert child.wait() == 0
    shown = on_screen(output.decode())
    logged = (tmp_path / "errors").read_text().splitlines() if errors == "a file" else shown
    for line, text in (
        ("logged by a handler that is older than the bar", logged),
        ("printed as an error", logged),
        ("logged to standard output", shown),
        ("printed", shown),
        ("printed while it is hidden", shown),
    ):
        assert text.count(line) == 2, (line, text)
    assert shown.count("after the bar True") == 1
    assert shown.count("figures without an end") == 1, "the last state of the bar stays, no other"


def test_loading_shows_the_share_of_the_weights(tmp_path: Path) -> None:
    console, clock = terminal(), FakeClock()
    copies: list[Any] = []
    copy_ = torch.Tensor.copy_

    def copying(target: torch.Tensor, *arguments: Any) -> torch.Tensor:
        clock.now += 1.0
        copies.append(target)
        return copy_(target, *arguments)

    directory = write_toy_checkpoint(tmp_path)
    with pytest.MonkeyPatch.context() as patch, loading(console=console, clock=clock):
        patch.setattr(torch.Tensor, "copy_", copying)
        load_model(directory, device="cpu")
    frames = written(console)
    assert len(copies) > 5
    assert re.search(r"^loading ━+ +100% .*left 0:00:00", frames, re.MULTILINE), frames
    assert max(map(len, frames.splitlines())) <= WIDTH


def test_metrics_of_stride_4_do_not_hide_the_bar_of_training() -> None:
    record = {
        "stride": 4,
        "mask_loss": 1.23456,
        "clean_loss": 0.12345,
        "clean_weight": 0.2,
        "acceptance": [0.948, 0.912, 0.871],
        "tokens_per_second": 123456.0,
        "mfu": 0.4321,
    }
    console = terminal()
    bar = _new_bar(console)
    bar.add_task("training", total=240, completed=60, text=describe(record))
    with bar:
        pass
    frames = written(console)
    assert re.search(r"^training ━{5} {15}.* 60/240 .*left", frames, re.MULTILINE), frames
    shown = " ".join(frames.split())
    assert " ".join(describe(record).split()) in shown
    assert max(map(len, frames.splitlines())) <= WIDTH
