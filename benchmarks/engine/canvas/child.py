"""A task in a fresh process, given to this module as JSON, its only argument.

The process prints one line that starts with `ANSWER` and holds the answer, or the reason of its failure. The
allocator is chosen by the environment, before torch is imported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.engine.canvas.tasks import Task

MARK = "ANSWER "
ROOT = Path(__file__).resolve().parents[3]
ALLOCATORS = {"default": False, "expandable": True}
MAX_REASON = 300
PROGRAM = ("-m", "benchmarks.engine.canvas.child")


class ArmFailedError(RuntimeError):
    """A task has no answer; the message says why."""


def run_child(task: Task, *, timeout_s: float, program: Sequence[str] = PROGRAM) -> dict[str, Any]:
    """The answer of a task in a fresh process; raises ArmFailedError with the reason if there is none.

    `program` gets the task as its last argument.
    """
    environment = {**os.environ, **_environment(task)}
    with subprocess.Popen(
        [sys.executable, *program, json.dumps(asdict(task))],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            # A compiler has processes of its own.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise ArmFailedError(f"no answer in {timeout_s:.0f} s") from error
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return _answer_of(output, errors, process.returncode)


def _environment(task: Task) -> dict[str, str]:
    """The allocator's setting, the path of this source tree, and blocking launches for a timeline."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    found = {"PYTHONPATH": path, "PYTORCH_ALLOC_CONF": f"expandable_segments:{task.expandable}"}
    return found | ({"CUDA_LAUNCH_BLOCKING": "1"} if task.kind == "timeline" else {})


def _answer_of(output: str, errors: str, status: int) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if not lines:
        last = (errors.strip().splitlines() or ["no output"])[-1]
        raise ArmFailedError(f"status {status}: {last[:MAX_REASON]}")
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    if "error" in answer:
        raise ArmFailedError(answer["error"])
    return answer


def main(arguments: list[str]) -> int:
    """Run the task and print its answer; the status is 0 if there is one."""
    from benchmarks.engine.canvas.tasks import Task, run_task

    fields = json.loads(arguments[0])
    task = Task(**{**fields, "lengths": tuple(fields["lengths"])})
    try:
        answer, status = run_task(task), 0
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        answer, status = {"error": f"{type(error).__name__}: {first_line}"[:MAX_REASON]}, 1
    print(MARK + json.dumps(answer), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
