"""Proof that a killed run loses nothing: real `idlm-train` runs, killed and resumed, against one left alone.

    python -m benchmarks.resume [worlds=1,2] [writers=sync,async] [kills=50] [points=all] [flips=200]
        [record=true] [results=FOLDER]

It needs no GPU. World 1 is one process, world 2 two gloo processes under ZeRO-2. `kills` SIGKILLs come at
random moments, to one process or to all. `points` are deaths on every rank at every change of a file while a
stage is exported and a checkpoint is saved. After each the run is resumed (`resume=auto`): losses, order of
data items and the sha256 of all final weights must equal those of the run left alone, bit for bit. `flips`
bit flips and truncations of a published checkpoint must all be refused with the name of the file. `writers`
are values of `train.save`."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shared import Report, defaults, parse_options, start
from idlm.checkpoint import verify
from idlm.errors import UserError
from tests.integration.zero import crashes
from tests.integration.zero.worlds import RUN_SECONDS, STAGE_END, STEPS, World, import_everything, make_base

OPTIONS = defaults("worlds=1,2 writers=sync,async kills=50 points=all flips=200 seed=0 record=false")


def random_kills(world: World, num_kills: int, generator: random.Random) -> None:
    """Kill runs at random moments, several times in a row, before each may end."""
    number = 0
    while world.tally.kills < num_kills:
        run, number, killed = world.folder / f"random-{number}", number + 1, 0
        for _ in range(min(generator.randint(1, 5), num_kills - world.tally.kills)):
            pids = world.start(run)
            time.sleep(generator.uniform(0.1, 1.0) * world.seconds)
            # Half the time one process dies alone for a moment, as when the kernel picks one.
            crashes.kill(pids if generator.random() < 0.5 else [generator.choice(pids)], {})
            time.sleep(generator.choice([0.0, 0.05]))
            status = crashes.wait_for_first(pids, seconds=RUN_SECONDS)
            if any(code < 0 for code in status.values()):
                killed += 1
            else:
                # It ended before it was killed: the machine is less busy now, so runs are shorter.
                world.seconds *= 0.7
        world.tally.kills += killed
        world.finish(run, f"random kills, run {number}, {killed} times")


def kill_points(world: World, points: str, generator: random.Random) -> int:
    """Die at every change of a file after step `STAGE_END`, in the export of its stage and in its checkpoint.

    Returns the number of points."""
    before = world.folder / "before"
    # The state to start from: the checkpoint of the step before.
    world.run(before, crashes.CrashPlan(rank=0, step=STAGE_END, point=1))
    tried = 0
    for rank in range(world.world_size):
        counted = world.folder / f"counted-{rank}"
        shutil.copytree(before, counted)
        world.run(counted, crashes.CrashPlan(rank=rank, step=STAGE_END, counts=True))
        # The export of the stage is the same for both writers.
        is_async = world.changes["train.save"] == "async"
        listed = _points_of_first_save(counted / "trace" / f"points-{rank}.jsonl", of_save=is_async)
        chosen = listed if points == "all" else generator.sample(listed, min(int(points), len(listed)))
        for point in chosen:
            run = world.folder / f"point-{rank}-{point['point']}"
            shutil.copytree(before, run)
            pids = world.start(run, crashes.CrashPlan(rank=rank, step=STAGE_END, point=point["point"]))
            status = crashes.wait_for_first(pids, seconds=RUN_SECONDS)
            assert -9 in status.values(), f"{point=} {status=} {world.log(run)}"
            tried += 1
            world.finish(run, f"killed on rank {rank} {point['what']} {Path(point['place']).name}")
    world.tally.kills += tried
    return tried


def _points_of_first_save(path: Path, *, of_save: bool) -> list[dict[str, Any]]:
    """The points before the first change that belongs to the next step; `of_save`: in the checkpoint."""
    listed = [json.loads(line) for line in path.read_text().splitlines()]
    later = f"checkpoint-{STAGE_END + 1}"
    first = next((i for i, point in enumerate(listed) if later in point["place"]), len(listed))
    return [point for point in listed[:first] if not of_save or f"checkpoint-{STAGE_END}" in point["place"]]


def damaged_checkpoints(checkpoint: Path, num_flips: int, generator: random.Random) -> tuple[int, list[str]]:
    """(refused by name, complaints) of `num_flips` copies with one flipped bit or one cut file each."""
    refused, complaints = 0, []
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    for _ in range(num_flips):
        path = generator.choice(files)
        content = path.read_bytes()
        if generator.random() < 0.5 or not content:
            damaged = content[: generator.randrange(max(1, len(content)))]
            what = f"cut to {len(damaged)} of {len(content)} bytes" if content else "filled"
            damaged = damaged if content else b"x"
        else:
            bit = generator.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            damaged = bytes(flipped)
            what = f"bit {bit} flipped"
        path.write_bytes(damaged)
        try:
            verify(checkpoint, sealed=True)
            complaints.append(f"{path.name} {what}: accepted")
        except UserError as error:
            if path.name in error.message:
                refused += 1
            else:
                complaints.append(f"{path.name} {what}: {error.message} does not name it")
        path.write_bytes(content)
    verify(checkpoint, sealed=True)
    return refused, complaints


def prove(report: Report, world: World, generator: random.Random) -> list[str]:
    """Random kills, kill points and damages, in that order; returns complaints."""
    start, options = time.perf_counter(), report.options
    random_kills(world, int(options["kills"]), generator)
    num_random = world.tally.kills
    num_points = kill_points(world, options["points"], generator)
    tally, num_ranks, num_flips = world.tally, world.world_size, int(options["flips"])
    stage, writer = None if num_ranks == 1 else 2, world.changes["train.save"]
    case = {"processes": num_ranks, "zero_stage": stage, "device": "cpu"}
    case |= {"writer": writer, "from_ranks": num_ranks, "to_ranks": num_ranks}
    case |= {"random_kills": num_random, "kill_points": num_points}
    share, is_equal = tally.equal / tally.resumes, tally.equal == tally.resumes
    report.add(case, "kills", tally.kills, "kills", gate_passed=is_equal)
    report.add(case, "bitwise_equal", share, "share", floor=1.0, gate_passed=is_equal)
    checkpoint, unnamed = world.reference / "out" / "run" / f"checkpoint-{STEPS}", list[str]()
    if num_flips:
        refused, unnamed = damaged_checkpoints(checkpoint, num_flips, generator)
        damaged, is_refused = {"processes": num_ranks, "zero_stage": stage}, refused == num_flips
        damaged |= {"damaged": num_flips}
        share = refused / num_flips
        report.add(damaged, "refused_by_name", share, "share", floor=1.0, gate_passed=is_refused)
    print(f"{num_ranks} process(es), {writer}: {time.perf_counter() - start:.0f} s", flush=True)
    return [*tally.complaints, *unnamed]


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, OPTIONS)
    generator = random.Random(int(options["seed"]))
    import_everything()
    report, complaints = Report("resume", options), list[str]()
    # SIGKILL loses nothing that was written, so a RAM disk is as good as a disk and needs no flush.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="idlm-resume-", dir=memory) as temporary:
        folder = Path(temporary)
        base = folder / "base"
        base.mkdir()
        make_base(base)
        writers = options["writers"].split(",")
        for world_size, writer in itertools.product(filter(None, options["worlds"].split(",")), writers):
            run_folder = folder / f"world-{world_size}-{writer}"
            world = World(run_folder, base, int(world_size), **{"train.save": writer})
            complaints += prove(report, world, generator)
            shutil.rmtree(run_folder)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    start(measure, __doc__)
