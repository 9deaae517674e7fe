"""The study: what a conversion keeps of a small AR model, at equal FLOPs, on chains of sums that are checked.

    python -m benchmarks.study seed=0 [arms=all] [seconds=460] [keep=DIR]
    python -m benchmarks.study part=table       rows and plots from all records
    python -m benchmarks.study part=plan        steps of every arm

A run trains the base of its seed, then `parallel` arms at a time (study_arms.py), each in a process of its
own (study_worker.py), on one GPU. Beside the base, every arm is rehearsed for a few steps and answers, so
that its kernels are compiled (on disk) when it begins. An arm without time left is not begun. Records are in
`results/study`, cell by cell; whole ones, there or in `known`, are not made again, so that the same command
continues a study. Where `folder` and `results` stay, training goes on from its last save and decoding from
the last cell: `continues=true` says so, and arms begin that cannot end. On a machine that is lent, `keep`
gets the checkpoints of the base and of idlm_4 (10 MB each) and `base=FILE` takes the first of them in the
next lease. Two GPUs take a seed each, or two parts of `arms` with one `base`. Ablations have bases of their
own, so their records are in `results/ablations/study`, and those of `size=large` in `results/large/study`.

An AR base learns from generated problems alone, in a tokenizer of 165 ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
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
from benchmarks.training.studies.study_arms import (
    BASE,
    CHAINS,
    CONTROL,
    MAX_TOKENS,
    SIZES,
    chosen_arms,
    flops_per_step,
)
from benchmarks.training.studies.study_report import read_records, report
from benchmarks.training.studies.study_worker import (
    TRAINED,
    Job,
    is_whole,
    record_path,
    samples_path,
    write_samples,
)
from idlm.cli import command
from idlm.errors import UserError

OPTIONS = {
    "part": "run",
    "seed": "0",
    "arms": "all",
    "base": "",
    "seconds": "1600",
    "parallel": "5",
    "rehearse": "auto",
    "continues": "false",
    "size": "small",
    "base_steps": "4000",
    "share": "0.25",
    "num": "1000",
    "max_tokens": str(MAX_TOKENS),
    "batch": "1024",
    "device": "auto",
    "workers": "4",
    "folder": "outputs/study",
    "keep": "",
    "known": str(RESULTS),
    "results": str(RESULTS),
}
PARTS = ("run", "table", "plan")
LINES_OF_A_FAILURE = 25
ABLATIONS = "ablations"
"""Below the results: records of arms on other bases than the study's, which only ablations compare."""
LARGE = "large"
"""Below the results: records of the larger model, which have a table of their own."""
WORKER = ("-m", "benchmarks.training.studies.study_worker")
REHEARSAL: dict[str, Any] = {"steps": 6, "flops": 0.0, "max_tokens": 8, "workers": 1, "keep": ""}
"""Six steps have some for each of three stages."""
REHEARSED_AT_ONCE = 3
"""More would take the memory and the processor that the bases of all seeds need."""


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
        records, ablations = read_records([results]), read_records([results / ABLATIONS])
        print(report(records, ablations=ablations, results=results, plots=Path("docs/plots")))
        if large := read_records([results / LARGE]):
            size = SIZES[large[0]["size"]]
            print(f"\nA model of {size.parameters:,} parameters:\n")
            print(report(large, results=results, bench=f"study_{LARGE}"))
        return 0
    if options["device"] == "auto":
        options["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    names = chosen_arms(options["arms"])
    if options["part"] == "plan":
        for job in planned_jobs(options, names):
            print(f"{job.name:<14} {job.steps:>6} steps, {job.flops / 1e12:.1f} TFLOP")
        return 0
    return run_seed(options, names)


def planned_jobs(options: dict[str, str], names: Sequence[str]) -> list[Job]:
    """These arms with the steps that their FLOPs allow; the control's are `share` of the base's."""
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
    for name in names:
        each = control if name in (BASE, CONTROL) else flops_per_step(name, size, device=device)
        steps = base_steps if name == BASE else max(4, round(control_steps * control / each))
        jobs.append(Job(name=name, steps=steps, flops=steps * each, **common))
    return jobs


def run_seed(options: dict[str, str], names: Sequence[str]) -> int:
    """Run the arms that have no whole record yet; prints what is known of this seed in the end."""
    start = time.monotonic()
    deadline = start + float(options["seconds"])
    seed, results = int(options["seed"]), Path(options["results"])
    folder = Path(options["folder"]) / options["seed"]
    folder.mkdir(parents=True, exist_ok=True)
    if options["base"]:
        take_base(Path(options["base"]), folder / BASE)
    known = [Path(options["known"]), results]
    left = [name for name in names if not any(is_whole(record_path(one, seed, name)) for one in known)]
    has_base = (folder / BASE / TRAINED).is_file()
    if left and not has_base and left[0] != BASE:
        raise UserError(
            "IDLM-0107",
            f"the base of seed {seed} is not in {folder / BASE}, and no arm of this run trains it",
            fix="add the arm base, or give base=FILE, the checkpoint that keep=DIR has kept",
        )
    processes, has_all = Processes(folder, deadline, continues=options["continues"] == "true"), True
    jobs: list[Job] = []
    rehearses = options["rehearse"] == "true" or (options["rehearse"], options["device"]) == ("auto", "cuda")
    try:
        # The base begins before anything else is drawn or counted.
        if left and left[0] == BASE:
            jobs = planned_jobs(options, [left.pop(0)])
            processes.begin(jobs[0])
            if rehearses:
                processes.begin(rehearsal(jobs[0]), is_rehearsal=True)
        if jobs or left:
            write_samples(folder, int(options["num"]))
            jobs += planned_jobs(options, left)
            if processes.running and rehearses:
                rehearse(processes, jobs, base=folder / BASE / TRAINED)
            has_all = processes.wait_for(folder / BASE / TRAINED)
            arms = [job for job in jobs if job.name != BASE]
            has_all = has_all and processes.run(arms, parallel=int(options["parallel"]))
    finally:
        processes.stop()
    print(report(read_records(known, seed=seed)))
    print(*speeds(jobs), f"{time.monotonic() - start:.0f} s", sep="\n")
    return int(not has_all)


def rehearsal(job: Job) -> Job:
    """A short run of a job in a folder of its own."""
    own = str(Path(job.folder) / "rehearsal")
    return replace(job, folder=own, results=own, **REHEARSAL)


def rehearse(processes: Processes, jobs: Sequence[Job], *, base: Path) -> None:
    """Begin rehearsals, `REHEARSED_AT_ONCE` at a time, once that of the base has trained, until the file
    `base` is there; returns before they end.
    """
    short = [rehearsal(job) for job in jobs]
    for chain in CHAINS:
        problems = samples_path(Path(jobs[0].folder), chain)
        shutil.copy(problems, samples_path(Path(short[0].folder), chain))
    if processes.wait_for(short[0].output / TRAINED):
        for job in short:
            if job.name == BASE:
                continue
            if not processes.wait_for_room(REHEARSED_AT_ONCE, until=base):
                return
            processes.begin(job, is_rehearsal=True)


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
    is_rehearsal: bool


class Processes:
    """Arms in processes of their own, which end with `stop` or at the `deadline` (monotonic clock). With
    `continues`, those begin too that cannot end.
    """

    def __init__(self, folder: Path, deadline: float, *, continues: bool = False) -> None:
        self.folder, self.deadline, self.continues = folder, deadline, continues
        self.running: list[Running] = []
        self.longest = 0.0
        self.has_failed = False

    def begin(self, job: Job, *, is_rehearsal: bool = False) -> None:
        """Start an arm; how a rehearsal ends does not count."""
        log = Path(job.folder) / f"{job.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *WORKER, json.dumps(asdict(job))],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.running.append(Running(job, process, log, time.monotonic(), is_rehearsal))

    def wait_for(self, path: Path) -> bool:
        """Whether the file came before the deadline; the process that makes it may end without it."""
        while not path.is_file():
            self._collect()
            is_made = any(path.is_relative_to(one.job.output) for one in self.running)
            if time.monotonic() > self.deadline or not (is_made or path.is_file()):
                print(f"there is no {path}", flush=True)
                return False
            time.sleep(0.2)
        return True

    def wait_for_room(self, most: int, *, until: Path) -> bool:
        """Whether less than `most` rehearsals run before `until` is there and before the deadline."""
        while sum(one.is_rehearsal for one in self.running) >= most:
            self._collect()
            if until.is_file() or time.monotonic() > self.deadline:
                return False
            time.sleep(0.2)
        return not until.is_file()

    def run(self, jobs: Sequence[Job], *, parallel: int) -> bool:
        """Run all jobs, `parallel` at a time, and what runs already; returns whether all have a record."""
        waiting = list(jobs)
        while waiting or self.running:
            self._collect()
            while waiting and (num := sum(not one.is_rehearsal for one in self.running)) < parallel:
                # The longest arm shared the GPU with others, and so will this one, or with fewer.
                if time.monotonic() + self.longest * (num + 1) / parallel <= self.deadline:
                    self.begin(waiting.pop(0))
                elif num:
                    break
                else:
                    print(f"{waiting.pop(0).name}: no time left", flush=True)
                    self.has_failed = True
            if all(one.is_rehearsal for one in self.running) and not waiting:
                self.stop()
            elif time.monotonic() > self.deadline:
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
            if one.job.name != BASE and not (one.is_rehearsal or self.continues):
                self.longest = max(self.longest, seconds)
            is_fine = status == 0 and one.job.record.is_file()
            kind = " (rehearsal)" if one.is_rehearsal else ""
            print(f"{one.job.name}{kind}: status {status}, {seconds:.0f} s", flush=True)
            if not is_fine:
                self.has_failed = self.has_failed or not one.is_rehearsal
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
