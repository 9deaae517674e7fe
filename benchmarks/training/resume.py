"""Proof that a killed run loses nothing: real `idlm-train` runs, killed and resumed, against one left alone.

    python -m benchmarks.resume [worlds=1,2] [writers=sync,async] [kills=50] [points=all] [flips=200]
        [record=true] [results=FOLDER]

It needs no GPU. World 1 is one process, world 2 two gloo processes under ZeRO-2. `kills` SIGKILLs come at
random moments, to one process or to all. `points` are deaths on every rank at every change of a file while a
stage is exported and a checkpoint is saved. After each the run is resumed (`resume=auto`): losses, order of
data items and the sha256 of all final weights must equal those of the run left alone, bit for bit. `flips`
bit flips and truncations of a published checkpoint must all be refused with the name of the file. `writers`
are values of `train.save`.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import result_row
from benchmarks.shared import defaults, parse_options, save, start
from idlm.checkpoint import verify
from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.train.config.schema import TrainConfig
from tests.integration.zero import crashes

OPTIONS = defaults("worlds=1,2 writers=sync,async kills=50 points=all flips=200 seed=0 record=false")
STEPS = 5
STAGE_END = 3
RUN_SECONDS = 120.0
SAME = (
    "step",
    "stage",
    "stride",
    "clean_weight",
    "acceptance",
    "learning_rate",
    "gradient_norm",
    "num_tokens",
)
IMPORTED_BY_RUNS = (
    "deepspeed.runtime.engine",
    "deepspeed.module_inject",
    "idlm.train.cli",
    "idlm.train.loop.trainer",
    "idlm.train.pipeline",
    "idlm.tasks.tokenizer",
    "torch._inductor.compile_fx",
    "torch._functorch.aot_autograd",
    "transformers.models.qwen3.modeling_qwen3",
)
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 192,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@dataclass(slots=True)
class Tally:
    """Counts and complaints of one world."""

    kills: int = 0
    resumes: int = 0
    equal: int = 0
    complaints: list[str] = field(default_factory=list)


def outcome(run: Path, *, world_size: int = 1) -> dict[str, Any]:
    """Everything that must be equal: losses, data order, and digests of all published weights."""
    out = run / "out"
    losses = []
    for line in (out / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        losses.append({k: v for k, v in record.items() if k in SAME or k.endswith("_loss")})
    items: dict[str, Any] = {}
    clashes = []
    for rank in range(world_size):
        for line in (run / "trace" / f"items-{rank}.jsonl").read_text().splitlines():
            entry = json.loads(line)
            key = f"step {entry['step']} rank {rank} micro-batch {entry['micro_batch']}"
            if items.setdefault(key, entry["items"]) != entry["items"]:
                clashes.append(f"{key}: {items[key]} and {entry['items']}")
    weights = {}
    for path in sorted([*out.glob("*.safetensors"), *out.glob("stages/*/*.safetensors")]):
        with path.open("rb") as file:
            weights[str(path.relative_to(out))] = hashlib.file_digest(file, "sha256").hexdigest()
    left = sorted(path.name for path in out.rglob(".*.staging-*"))
    return {"losses": losses, "items": items, "clashes": clashes, "weights": weights, "left": left}


class World:
    """Runs with one number of processes. `reference`: the run left alone. `changes`: overrides."""

    def __init__(self, folder: Path, base: Path, world_size: int, **changes: Any) -> None:
        self.folder, self.base, self.world_size, self.changes = folder, base, world_size, changes
        self.tally = Tally()
        folder.mkdir()
        self.reference = self.folder / "reference"
        start = time.perf_counter()
        status = self.run(self.reference)
        assert set(status.values()) == {0}, f"{status=} {self.log(self.reference)}"
        self.seconds = time.perf_counter() - start
        self.expected = outcome(self.reference, world_size=self.world_size)

    def arguments(self, run: Path) -> list[str]:
        """Command line of a run: five steps, two stages, a checkpoint after every step."""
        second = f"{{stride: 3, steps: {STEPS - STAGE_END}, clean_weight: auto}}"
        stages = f"[{{stride: 2, steps: {STAGE_END}}}, {second}]"
        values: dict[str, Any] = {
            "output_dir": run / "out",
            "model.path": self.base,
            "data.source": "task",
            "train.stages": stages,
            "train.batch_size": 1,
            "train.accumulation": 2 // self.world_size,
            "train.max_length": 300,
            "train.row_length": 560,
            "train.learning_rate": 0.003,
            "train.device": "cpu",
            "train.threads": 1,
            "train.log_every": 1,
            "train.save_every": 1,
            "train.zero_stage": "null" if self.world_size == 1 else 2,
            "report.enabled": "false",
            **self.changes,
        }
        return [f"{key}={value}" for key, value in values.items()]

    def start(self, run: Path, plan: crashes.CrashPlan | None = None) -> list[int]:
        run.mkdir(exist_ok=True)
        return crashes.start(
            self.arguments(run),
            world_size=self.world_size,
            trace=run / "trace",
            plan=plan,
            log=run / "log.txt",
        )

    def run(self, run: Path, plan: crashes.CrashPlan | None = None) -> dict[int, int]:
        """Run once to the end."""
        return crashes.wait(self.start(run, plan), seconds=RUN_SECONDS)

    def log(self, run: Path) -> str:
        return (run / "log.txt").read_text()[-4000:]

    def finish(self, run: Path, scenario: str) -> None:
        """Resume until the end and compare."""
        status = self.run(run)
        self.tally.resumes += 1
        if set(status.values()) != {0}:
            self.tally.complaints.append(f"{scenario}: the resumed run ended with {status}: {self.log(run)}")
            return
        found = outcome(run, world_size=self.world_size)
        wrong = [key for key, value in self.expected.items() if found[key] != value]
        if wrong:
            self.tally.complaints.append(f"{scenario}: {wrong} differ: {[found[key] for key in wrong]}")
        else:
            self.tally.equal += 1
            shutil.rmtree(run)


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

    Returns the number of points.
    """
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


def make_base(directory: Path) -> None:
    """Write a random tiny checkpoint in another process: this one forks later and must not compute."""
    pid = os.fork()
    if pid == 0:
        import torch

        from idlm.tasks.tokenizer import save_tokenizer
        from idlm.train.model.load import random_model

        model = random_model(MODEL, attention="idlm_sdpa", dtype=torch.float32, seed=0)
        model.save_pretrained(directory)
        save_tokenizer(directory)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def import_everything() -> None:
    """Import what a run imports, then freeze the garbage collector, which would copy shared pages."""
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    for name in IMPORTED_BY_RUNS:
        importlib.import_module(name)
    compose("train", TrainConfig, ["output_dir=x"])
    gc.collect()
    gc.freeze()


def prove(world: World, options: dict[str, str], generator: random.Random) -> tuple[list[Any], list[str]]:
    """(result rows, complaints) of one world: random kills, kill points and damages, in that order."""
    start = time.perf_counter()
    random_kills(world, int(options["kills"]), generator)
    num_random = world.tally.kills
    num_points = kill_points(world, options["points"], generator)
    num_flips = int(options["flips"])
    checkpoint = world.reference / "out" / "run" / f"checkpoint-{STEPS}"
    refused, unnamed = damaged_checkpoints(checkpoint, num_flips, generator)
    tally, stage, num_ranks = world.tally, None if world.world_size == 1 else 2, world.world_size
    writer = world.changes["train.save"]
    case = {"processes": num_ranks, "zero_stage": stage, "device": "cpu"}
    case |= {"writer": writer, "from_ranks": num_ranks, "to_ranks": num_ranks}
    case |= {"random_kills": num_random, "kill_points": num_points}
    is_equal = tally.equal == tally.resumes
    damaged = {"processes": world.world_size, "zero_stage": stage, "damaged": num_flips}
    rows = [
        result_row("resume", case, "kills", tally.kills, "kills", gate_passed=is_equal),
        result_row(
            "resume",
            case,
            "bitwise_equal",
            tally.equal / tally.resumes,
            "share",
            floor=1.0,
            gate_passed=is_equal,
        ),
    ]
    if num_flips:
        is_refused, share = refused == num_flips, refused / num_flips
        rows.append(
            result_row(
                "resume", damaged, "refused_by_name", share, "share", floor=1.0, gate_passed=is_refused
            )
        )
    print(
        f"{world.world_size} process(es), {writer}: {num_random} random kills, {num_points} points, "
        f"{tally.equal} of {tally.resumes} resumed runs bitwise equal, {refused} of {num_flips} damaged "
        f"checkpoints refused by name, {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    return rows, [*tally.complaints, *unnamed]


def measure(arguments: list[str]) -> int:
    """Prove all worlds; returns 1 if there is a complaint."""
    options = parse_options(arguments, OPTIONS)
    generator = random.Random(int(options["seed"]))
    import_everything()
    rows: list[Any] = []
    complaints: list[str] = []
    # SIGKILL loses nothing that was written, so a RAM disk is as good as a disk and needs no flush.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="idlm-resume-", dir=memory) as temporary:
        folder = Path(temporary)
        base = folder / "base"
        base.mkdir()
        make_base(base)
        writers = options["writers"].split(",")
        for world_size, writer in itertools.product(filter(None, options["worlds"].split(",")), writers):
            place = folder / f"world-{world_size}-{writer}"
            world = World(place, base, int(world_size), **{"train.save": writer})
            found = prove(world, options, generator)
            rows += found[0]
            complaints += found[1]
            shutil.rmtree(place)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    save("resume", rows, options)
    return 1 if complaints else 0


if __name__ == "__main__":
    start(measure, __doc__)
