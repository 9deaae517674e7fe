"""Runs the commands of a file on the GPUs of a machine that is lent for minutes.

    python -m benchmarks.lease plan=benchmarks/leases/kernels.txt out=$OUT [seconds=540]

The file has a heading `[0]`, `[1]`, ... for each GPU, and a command a line below it, behind its limit in
seconds. The commands of a GPU run one after the other, GPUs at the same time. A command that passes its
limit is stopped, and so is every one when `seconds` are over. `$RESULTS` is a folder for result rows
(`results=$RESULTS`). What commands print is in `<out>/lease.tgz` with the rows; its last lines are printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import parse_options
from idlm.cli import command
from idlm.errors import UserError

DEFAULTS = {"plan": "", "out": "", "seconds": "540", "lines": "25"}
SECONDS_TO_PACK = 5
MARK = "IDLM_LEASE_STEP"


@dataclass(frozen=True)
class Step:
    """A command, and how long it may take."""

    gpu: int
    number: int
    seconds: float
    command: str


def read_plan(text: str) -> list[list[Step]]:
    """The steps of each GPU. Raises UserError IDLM-0107 for a line that is no step."""
    streams: list[list[Step]] = []
    gpu = -1
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split(None, 1)
        if not words or words[0].startswith("#"):
            continue
        if words[0].startswith("[") and words[0][1:-1].isdecimal():
            gpu = int(words[0][1:-1])
            streams.append([])
        elif streams and len(words) == 2 and words[0].isdecimal():
            streams[-1].append(Step(gpu, number, float(words[0]), words[1]))
        else:
            raise UserError(
                "IDLM-0107",
                f"line {number} of the plan is neither a heading nor a command: {line!r}",
                fix="write `[0]` above the commands of GPU 0, and seconds before each command",
            )
    return streams


def run_stream(steps: list[Step], folder: Path, deadline: float) -> list[str]:
    """Run the commands of one GPU; returns a line for each."""
    said = []
    for step in steps:
        start = time.monotonic()
        seconds = min(step.seconds, deadline - start)
        status = run_step(step, folder, seconds) if seconds > 0 else "not begun"
        taken = time.monotonic() - start
        said.append(f"[{step.gpu}] {step.number:3}: {status:>10} {taken:6.1f} s  {step.command}")
        print(said[-1], flush=True)
    return said


def run_step(step: Step, folder: Path, seconds: float) -> str:
    """Run one command in a group of its own, and end all its processes with it. A variable of the environment
    marks them too, because launchers start ranks in other groups; one that sets its title may lose the mark.
    """
    mark = f"{folder.name}-{step.gpu}-{step.number}"
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": str(step.gpu),
        "RESULTS": str(folder),
        MARK: mark,
        "PYTHONUNBUFFERED": "1",
    }
    with (folder / f"{step.gpu}_{step.number:03}.log").open("w") as log:
        process = subprocess.Popen(
            step.command,
            shell=True,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return f"status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            return "stopped"
        finally:
            # What it started may outlive it, with the memory of a GPU.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end_marked(mark)
            process.wait()


def end_marked(mark: str) -> None:
    """Kill the processes that have this mark."""
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def main() -> int:
    """Command line entry point."""
    return command.run(_run)


def _run(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS)
    deadline = time.monotonic() + float(options["seconds"]) - SECONDS_TO_PACK
    streams = read_plan(Path(options["plan"]).read_text())
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(max(1, len(streams))) as pool:
        folder = Path(home)
        said = [
            line for lines in pool.map(lambda s: run_stream(s, folder, deadline), streams) for line in lines
        ]
        with tarfile.open(Path(options["out"]) / "lease.tgz", "w:gz") as packed:
            packed.add(folder, "lease")
        for log in sorted(folder.glob("*.log")):
            print(
                f"===== {log.stem}",
                *log.read_text(errors="replace").splitlines()[-int(options["lines"]) :],
                sep="\n",
            )
    print("=====", *said, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
