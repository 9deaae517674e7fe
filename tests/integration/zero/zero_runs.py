"""Runs of several processes that one test session shares.

`python -m tests.integration.zero.zero_runs FOLDER PART...` writes what happened as JSON.

A process of its own, because it forks: the imports are paid once, and nothing of it reaches other tests."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from idlm.checkpoint import MANIFEST, verify
from idlm.lora import WEIGHTS_FILE
from idlm.train import cli
from idlm.train.loop import watchdog as watchdogs
from idlm.train.loop.watchdog import has_ended
from idlm.train.report import SampleReport
from tests.integration.training.stopped_runs import num_floats
from tests.integration.zero import crashes, worlds, zero2_gradient_steps

ASYNC = {"train.save": "async"}
ENDLESS = {"train.stages": "[{stride: 2, steps: 100000}]", "train.save_every": 100000}


def parity(folder: Path, base: Path) -> dict[str, Any]:
    """One process with two micro-batches, and two plain ones with one."""
    one = worlds.World(folder / "one", base, 1)
    plain = worlds.World(folder / "plain", base, 2, **{"train.zero_stage": "null"})
    last = plain.reference / "out" / "run" / f"checkpoint-{worlds.STEPS}"
    for published in (plain.reference / "out", last):
        verify(published)
    return {"one": one.expected, "plain": plain.expected}


def deaths(folder: Path, base: Path) -> dict[str, Any]:
    """One process with two micro-batches, and two ZeRO-2 processes with one; deaths in saves of a thread."""
    one = worlds.World(folder / "one", base, 1, **ASYNC)
    alone = folder / "one" / "killed"
    for point in random.Random(1).sample(range(20, 90), 2):
        plan = crashes.CrashPlan(rank=0, step=worlds.STAGE_END, point=point)
        crashes.wait_for_first(one.start(alone, plan), seconds=worlds.RUN_SECONDS)
    one.finish(alone, "killed twice while saving")
    two = worlds.World(folder / "two", base, 2, **ASYNC)
    run = folder / "two" / "killed"
    pids = two.start(
        run, crashes.CrashPlan(rank=0, step=worlds.STAGE_END, point=random.Random(0).randint(30, 70))
    )
    status = crashes.wait_for_first(pids, seconds=worlds.RUN_SECONDS)
    checkpoints = sorted(path.name for path in (run / "out" / "run").glob("checkpoint-*"))
    kept = folder / "two" / "other-shape"
    shutil.copytree(run, kept)
    shutil.copytree(run, folder / "two" / "to-one")
    two.finish(run, "killed while saving")
    return {
        "one": one.expected,
        "two": two.expected,
        "killed_status": sorted(status.values()),
        "checkpoints": checkpoints,
        "resumes": [one.tally.equal + two.tally.equal, one.tally.resumes + two.tally.resumes],
        "complaints": one.tally.complaints + two.tally.complaints,
        "orphans": orphans(folder, base),
        "floats_left": floats_left(folder, base, zero_stage=2),
        "resharded": _reshard(folder, base, folder / "two" / "to-one", two),
        "refusals": {
            "batch": _refused(folder, base, kept, **{"train.zero_stage": 2, "train.accumulation": 8}),
            "uneven": _refused(folder, base, kept, **{"train.zero_stage": 2, "train.batch_size": 3}),
        },
    }


def floats_left(folder: Path, base: Path, *, zero_stage: int) -> int:
    """Elements of tensors that a lone process with ZeRO still holds when the report is sampled."""
    run = folder / "report"

    def sampler(directory: Path, num_samples: int) -> SampleReport:
        (run / "left").write_text(str(num_floats()))
        return SampleReport()

    pid = os.fork()
    if pid == 0:
        try:
            changes = {"train.zero_stage": zero_stage, "report.enabled": "true"} | ASYNC
            cli.main(_bare(base, 1, **changes).arguments(run), sampler=sampler)
        finally:
            os._exit(0)
    status = crashes.wait([pid], seconds=worlds.RUN_SECONDS)
    assert status == {pid: 0}, status
    return int((run / "left").read_text())


def _bare(base: Path, world_size: int, **changes: Any) -> worlds.World:
    """A world without a reference."""
    world = worlds.World.__new__(worlds.World)
    world.base, world.world_size, world.changes = base, world_size, changes
    return world


def orphans(folder: Path, base: Path) -> dict[str, Any]:
    """Two ranks whose launcher is killed."""
    world = _bare(base, 2, **ENDLESS, **ASYNC)
    run = folder / "orphans"
    run.mkdir()
    launcher = os.fork()
    if launcher == 0:
        (run / "pids").write_text(" ".join(map(str, world.start(run))))
        time.sleep(worlds.RUN_SECONDS)
        os._exit(0)
    metrics, end = run / "out" / "run" / "metrics.jsonl", time.monotonic() + worlds.RUN_SECONDS
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    pids = [int(pid) for pid in (run / "pids").read_text().split()]
    while not all(map(has_ended, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [pid for pid in pids if not has_ended(pid)]
    crashes.kill(left, {})
    checkpoints = [path for path in (run / "out" / "run").glob("checkpoint-*") if (path / MANIFEST).is_file()]
    return {"left": left, "num_checkpoints": len(checkpoints), "log": world.log(run)}


def _reshard(folder: Path, base: Path, run: Path, two: worlds.World) -> dict[str, Any]:
    """Runs that go on with another number of processes: `run` from two to one, and that of the report from
    one to two."""
    lone = _bare(base, 1, **{"train.zero_stage": 2} | two.changes)
    results: dict[str, Any] = {"two to one": _resume(lone, run)}
    shutil.rmtree(folder / "report" / "out" / "run" / f"checkpoint-{worlds.STEPS}")
    results["one to two"] = _resume(two, folder / "report")
    return results


def _resume(world: worlds.World, run: Path) -> dict[str, Any]:
    status = world.run(run)
    lines = (run / "out" / "run" / "metrics.jsonl").read_text().splitlines()
    left = sorted(path.name for path in (run / "out" / "run").iterdir())
    return {"status": status, "losses": list(map(json.loads, lines)), "left": left, "log": world.log(run)}


def _refused(folder: Path, base: Path, run: Path, **changes: Any) -> str:
    """What one process says that would go on from `run` of two processes."""
    (run / "log.txt").unlink()
    status = _bare(base, 1, **changes).run(run)
    return f"{sorted(status.values())} {(run / 'log.txt').read_text()}"


def stages(folder: Path, base: Path) -> dict[str, Any]:
    """Other ZeRO stages with two processes, bfloat16 and DDP: train, resume, export; one dies."""
    results: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {
        "zero1": {"train.zero_stage": 1},
        "zero3": {"train.zero_stage": 3},
        "bf16": {"train.zero_stage": 2, "model.dtype": "bfloat16", "export.dtype": "float32"},
        "ddp": {"train.zero_stage": "null"},
    }
    for name, changes in cases.items():
        world = worlds.World(folder / name, base, 2, **changes, **ASYNC)
        if name != "zero3":
            world.finish_again(name)
            results[name] = world.results()
            continue
        run = folder / name / "killed"
        pids = world.start(run, crashes.CrashPlan(rank=1, step=worlds.STAGE_END, point=1))
        crashes.wait_for_first(pids, seconds=worlds.RUN_SECONDS)
        shutil.copytree(run, folder / name / "to-one")
        world.finish(run, name)
        results[name] = {"floats_left": floats_left(folder, base, zero_stage=3), **world.results()}
        results[name]["resharded"] = _reshard(folder, base, folder / name / "to-one", world)
    return results


def watchdog(folder: Path, base: Path) -> dict[str, Any]:
    """One rank of two is killed, and in another run stopped; the other has to end by itself."""
    watchdogs.SILENT_SECONDS = 8.0
    results: dict[str, Any] = {}
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        world, run = _bare(base, 2, **ENDLESS), folder / name
        pids = world.start(run)
        metrics = run / "out" / "run" / "metrics.jsonl"
        end = time.monotonic() + worlds.RUN_SECONDS
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(pids[1], number)
        start = time.monotonic()
        _, raw = os.waitpid(pids[0], 0)
        results[name] = {
            "status": os.waitstatus_to_exitcode(raw),
            "seconds": time.monotonic() - start,
            "log": world.log(run),
            "pid": pids[1],
        }
        crashes.kill([pids[1]], {})
        os.waitpid(pids[1], 0)
    return results


def adapters(folder: Path, base: Path) -> dict[str, Any]:
    """ZeRO-2 with its optimizer on the host, and ZeRO-3: both train an adapter, and go on from a checkpoint
    without frozen weights."""
    adapter: dict[str, Any] = {"adapter.rank": 4, "adapter.alpha": 8}
    adapter["train.stages"] = f"[{{stride: 2, steps: {worlds.STAGE_END}}}, {{stride: 3, steps: 2}}]"
    one = worlds.World(folder / "one", base, 1, **adapter)
    results = {"one": one.expected}
    weights = load_file(one.reference / "out" / WEIGHTS_FILE)
    for stage, changes in ((2, {"train.offload_optimizer": "true", "train.save": "sync"}), (3, ASYNC)):
        world = worlds.World(folder / str(stage), base, 2, **{"train.zero_stage": stage} | changes | adapter)
        world.finish_again(str(stage))
        farthest = _farthest(weights, load_file(world.reference / "out" / WEIGHTS_FILE))
        results[str(stage)] = world.results() | {"farthest": farthest}
    return results


def gradients(folder: Path, base: Path) -> dict[str, Any]:
    """Optimizer steps of two processes, with and without what shortens them."""
    port, pids = crashes.free_port(), []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            status = 1
            try:
                status = zero2_gradient_steps.write_results(folder, "cpu")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    status = crashes.wait(pids, seconds=worlds.RUN_SECONDS)
    assert set(status.values()) == {0}, status
    return json.loads((folder / "results.json").read_text())


def _farthest(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """The largest difference of an element of `found`."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


PARTS = {
    "parity": parity,
    "deaths": deaths,
    "stages": stages,
    "adapters": adapters,
    "watchdog": watchdog,
    "gradients": gradients,
}


def main() -> int:
    folder, results = Path(sys.argv[1]), {}
    worlds.import_everything()
    base = folder / "base"
    base.mkdir()
    worlds.make_base(base)
    for name in sys.argv[2:]:
        (folder / name).mkdir()
        results[name] = PARTS[name](folder / name, base)
    (folder / "results.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
