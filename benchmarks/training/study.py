"""The study: what a conversion keeps of a small AR model, at equal FLOPs, on chains of sums that are checked.

    python -m benchmarks.study seed=0 [arms=all] [seconds=460] [keep=DIR]
    python -m benchmarks.study part=table       rows and plots from all records
    python -m benchmarks.study part=plan        steps of every arm
    python -m benchmarks.study part=probe       speed of a base's steps, and of four arms' steps together

A run trains the base of its seed, then `parallel` arms at a time (study_arms.py), each in a process of its
own (study_worker.py), on one GPU. An arm without time left is not begun. Records of finished arms are in
`results/study`; those in `known` too are not made again, so that the same command continues a study. On a
machine that is lent, `keep` gets the checkpoints of the base and of idlm_4 (10 MB each) and `base=FILE`
takes the first of them in the next lease. Two GPUs take a seed each, or two parts of `arms` with one `base`.

An AR base learns from generated problems alone, in a tokenizer of 165 ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import parse_options
from benchmarks.results import RESULTS
from benchmarks.training.study_arms import BASE, CONTROL, MAX_TOKENS, SIZES, chosen_arms, flops_per_step
from benchmarks.training.study_report import read_records, report
from benchmarks.training.study_worker import TRAINED, Job, record_path, write_samples
from idlm.cli import command
from idlm.errors import UserError

OPTIONS = {
    "part": "run",
    "seed": "0",
    "arms": "all",
    "base": "",
    "seconds": "1600",
    "parallel": "4",
    "size": "small",
    "base_steps": "1500",
    "share": "0.5",
    "num": "1000",
    "max_tokens": str(MAX_TOKENS),
    "batch": "256",
    "device": "auto",
    "workers": "4",
    "folder": "outputs/study",
    "keep": "",
    "known": str(RESULTS),
    "results": str(RESULTS),
}
PARTS = ("run", "table", "plan", "probe")
LINES_OF_A_FAILURE = 25
WORKER = ("-m", "benchmarks.training.study_worker")
PROBE_ARMS = (CONTROL, "idlm_4", "lora_4", "block_4")


def main() -> int:
    """Console entry point."""
    return command.run(study)


def study(arguments: list[str]) -> int:
    """Do one part; returns 1 if an arm failed."""
    options = parse_options(arguments, OPTIONS)
    if options["part"] not in PARTS or options["size"] not in SIZES:
        raise UserError(
            "IDLM-0107",
            f"part={options['part']} size={options['size']}",
            fix=f"parts are {', '.join(PARTS)}; sizes are {', '.join(SIZES)}",
        )
    results = Path(options["results"])
    if options["part"] == "table":
        print(report(read_records([results]), results=results, plots=Path("docs/plots")))
        return 0
    if options["device"] == "auto":
        options["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    jobs = planned_jobs(options)
    if options["part"] == "plan":
        for job in jobs:
            print(f"{job.name:<14} {job.steps:>6} steps, {job.flops / 1e12:.1f} TFLOP")
        return 0
    if options["part"] == "probe":
        return probe(options, jobs)
    return run_seed(options, jobs)


def planned_jobs(options: dict[str, str]) -> list[Job]:
    """The arms that are asked for, with the steps that their FLOPs allow; the control's are `share` of the
    base's.
    """
    size, device = SIZES[options["size"]], options["device"]
    folder = Path(options["folder"]) / options["seed"]
    base_steps = int(options["base_steps"])
    control_steps = max(4, round(float(options["share"]) * base_steps))
    control = flops_per_step(CONTROL, size, device=device)
    common: dict[str, Any] = {
        **{key: int(options[key]) for key in ("seed", "num", "max_tokens", "batch", "workers")},
        **{key: options[key] for key in ("size", "device", "results", "keep")},
        "folder": str(folder),
    }
    jobs = []
    for name in chosen_arms(options["arms"]):
        each = control if name in (BASE, CONTROL) else flops_per_step(name, size, device=device)
        steps = base_steps if name == BASE else max(4, round(control_steps * control / each))
        jobs.append(Job(name=name, steps=steps, flops=steps * each, **common))
    return jobs


def run_seed(options: dict[str, str], jobs: list[Job]) -> int:
    """Run the arms that have no record yet; prints what is known of this seed in the end."""
    start = time.monotonic()
    deadline = start + float(options["seconds"])
    folder, results = Path(jobs[0].folder), Path(options["results"])
    folder.mkdir(parents=True, exist_ok=True)
    if options["base"]:
        take_base(Path(options["base"]), folder / BASE)
    known = [Path(options["known"]), results]
    left = [job for job in jobs if not any(record_path(one, job.seed, job.name).is_file() for one in known)]
    has_base = (folder / BASE / TRAINED).is_file()
    if left and not has_base and left[0].name != BASE:
        raise UserError(
            "IDLM-0107",
            f"the base of seed {options['seed']} is not in {folder / BASE}, and no arm of this run trains it",
            fix="add the arm base, or give base=FILE, the checkpoint that keep=DIR has kept",
        )
    processes, is_whole = Processes(folder, deadline), True
    try:
        # The base has a GPU to itself until it is trained.
        if left and left[0].name == BASE:
            processes.begin(left.pop(0))
        if left or processes.running:
            write_samples(folder, int(options["num"]))
            is_whole = processes.wait_for(folder / BASE / TRAINED)
            is_whole = is_whole and processes.run(left, parallel=int(options["parallel"]))
    finally:
        processes.stop()
    print(report(read_records(known, seed=jobs[0].seed)))
    print(f"{time.monotonic() - start:.0f} s")
    return int(not is_whole)


def take_base(given: Path, target: Path) -> None:
    """Unpack a base that an earlier lease kept, or link a checkpoint directory."""
    if (target / TRAINED).is_file():
        return
    target.mkdir(parents=True, exist_ok=True)
    if given.is_dir():
        for path in given.iterdir():
            if path.is_file():
                (target / path.name).write_bytes(path.read_bytes())
    else:
        with tarfile.open(given) as packed:
            packed.extractall(target, filter="data")
    (target / TRAINED).write_text(json.dumps({"taken_from": given.name}))


@dataclass(slots=True)
class Running:
    """A process of an arm, its log, and when it was started."""

    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    start: float


class Processes:
    """Arms in processes of their own, which end with `stop` or at the `deadline` (monotonic clock)."""

    def __init__(self, folder: Path, deadline: float) -> None:
        self.folder, self.deadline = folder, deadline
        self.running: list[Running] = []
        self.longest = 0.0
        self.has_failed = False

    def begin(self, job: Job) -> None:
        """Start an arm."""
        log = self.folder / f"{job.name}.log"
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *WORKER, json.dumps(asdict(job))],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.running.append(Running(job, process, log, time.monotonic()))

    def wait_for(self, path: Path) -> bool:
        """Whether the file came before the deadline; a process that fails meanwhile has made none."""
        while not path.is_file():
            self._collect()
            if time.monotonic() > self.deadline or (self.has_failed and not self.running):
                print(f"there is no {path}", flush=True)
                return False
            time.sleep(0.2)
        return True

    def run(self, jobs: Sequence[Job], *, parallel: int) -> bool:
        """Run all jobs, `parallel` at a time, and what runs already; returns whether all have a record."""
        waiting = list(jobs)
        while waiting or self.running:
            self._collect()
            while waiting and len(self.running) < parallel:
                job = waiting.pop(0)
                if time.monotonic() + self.longest > self.deadline:
                    print(f"{job.name}: no time left", flush=True)
                    self.has_failed = True
                    continue
                self.begin(job)
            if time.monotonic() > self.deadline:
                names = ", ".join(one.job.name for one in self.running)
                print(f"the time is over for {names}", flush=True)
                self.has_failed = True
                self.stop()
                waiting.clear()
            time.sleep(0.2)
        return not self.has_failed

    def _collect(self) -> None:
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            seconds, status = time.monotonic() - one.start, one.process.returncode
            if one.job.name != BASE:
                self.longest = max(self.longest, seconds)
            is_fine = status == 0 and one.job.record.is_file()
            print(f"{one.job.name}: status {status}, {seconds:.0f} s", flush=True)
            if not is_fine:
                self.has_failed = True
                print(*tail(one.log), sep="\n", flush=True)

    def stop(self) -> None:
        """End what runs, with the processes that it has started."""
        for one in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
        self.running.clear()


def tail(log: Path) -> list[str]:
    """The last lines of a log."""
    return log.read_text(errors="replace").splitlines()[-LINES_OF_A_FAILURE:]


def probe(options: dict[str, str], jobs: list[Job]) -> int:
    """Train `base_steps` steps of new weights alone and of four arms on them together; print their speeds and
    the time of all cells at `num` problems, by which `base_steps` of a run is chosen.
    """
    base = next(job for job in jobs if job.name == BASE)
    chosen = [replace(job, steps=base.steps) for job in jobs if job.name in PROBE_ARMS]
    folder = Path(base.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_samples(folder, int(options["num"]))
    processes = Processes(folder, time.monotonic() + float(options["seconds"]))
    try:
        processes.begin(base)
        is_whole = processes.wait_for(base.output / TRAINED)
        is_whole = is_whole and processes.run(chosen, parallel=len(chosen) + 1)
    finally:
        processes.stop()
    for line in speeds([base, *chosen]):
        print(line)
    return int(not is_whole)


def speeds(jobs: Sequence[Job]) -> Iterator[str]:
    """Speed of training of every arm that is trained, and of decoding where that has ended."""
    for job in jobs:
        if (job.output / TRAINED).is_file():
            trained = json.loads((job.output / TRAINED).read_text())
            yield (
                f"{job.name:<10} {1000 * trained['step_seconds']:.1f} ms a step with its start, at last "
                f"{trained['tokens_per_second']:,.0f} tok/s; {trained['seconds']:.0f} s in all"
            )
        if job.record.is_file():
            cells = json.loads(job.record.read_text())["cells"]
            each = (f"{cell['num_tokens'] / cell['seconds']:,.0f}" for cell in cells)
            yield f"{'':<10} decoding {sum(cell['seconds'] for cell in cells):.0f} s, tok/s: {' '.join(each)}"


if __name__ == "__main__":
    sys.exit(main())
