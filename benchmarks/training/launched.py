"""SIGTERM to a launcher in the middle of a save of a large checkpoint, and a resume: bitwise, or not.

A part of `python -m benchmarks.resume shape=qwen3_8b` (resume.py): one process under ZeRO-2, with the width
of the shape and as many layers as memory and disk hold, started by torchrun or DeepSpeed as a user starts it.
The signal comes when a quarter of the first checkpoint is in its staging folder. DeepSpeed's command does not
pass signals on to its ranks, so its whole process group gets it, as from a terminal or Slurm. Kernels are
deterministic, and attention is dense by plain products: `idlm_split` adds in no fixed order, and neither does
the backward pass of PyTorch's memory-efficient attention.

Started by a launcher, the module benchmarks.training.launched TRACE ARGUMENTS is `idlm-train` with its data
items traced.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import append_rows, result_row
from benchmarks.training import crashes
from idlm.errors import UserError
from idlm.train.checkpoint.writer import SAVE_MODES

STEPS = {"cpu": 4, "cuda": 120}
"""The first save comes in the middle. On a GPU, steps enough to outlast an asynchronous one."""
BYTES_PER_WEIGHT = 14
"""Of a checkpoint: bfloat16, and the float32 master with both moments."""
SIGNAL_AT = 0.25
RUN_SECONDS = 300.0
HEAD_DIM, KV_HEADS = 128, 8
SHAPES = {
    "qwen3_8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "small": {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8},
}
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"),
    "deepspeed": ("-m", "deepspeed.launcher.runner", "--no_local_rank", "--num_gpus", "1", "--module"),
}
Outcome = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Launched:
    """Runs of one shape below `folder`. Each ends within RUN_SECONDS, and all within `seconds`."""

    folder: Path
    shape: str
    layers: int
    device: str
    seconds: float = 3600.0
    began: float = field(default_factory=time.monotonic)

    @property
    def end(self) -> float:
        """When a run that begins now is killed."""
        return min(time.monotonic() + RUN_SECONDS, self.began + self.seconds)

    def say(self, what: str) -> None:
        """At once: the machine may be taken away."""
        print(f"{time.monotonic() - self.began:6.1f} s  {what}", flush=True)

    def checkpoint_bytes(self) -> int:
        """About the size of a checkpoint; the vocabulary of the tasks is small."""
        width, ffn, heads = SHAPES[self.shape].values()
        return BYTES_PER_WEIGHT * self.layers * width * (2 * HEAD_DIM * (heads + KV_HEADS) + 3 * ffn)

    def command(self, run: Path, launcher: str, writer: str, save_every: int) -> list[str]:
        """Command line of a run of `STEPS` steps."""
        shape = SHAPES[self.shape] | {
            "model_type": "qwen3",
            "num_hidden_layers": self.layers,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "tie_word_embeddings": "false",
        }
        values = {
            "output_dir": run / "out",
            "model.path": "null",
            "model.tokenizer": "task",
            "model.dtype": "bfloat16",
            "model.attention": "idlm_sdpa",
            "model.compile": "off",
            "data.source": "task",
            "train.stages": f"[{{stride: 2, steps: {STEPS[self.device]}}}]",
            "train.max_length": 300,
            "train.row_length": 560,
            "train.learning_rate": 1e-4,
            "train.device": self.device,
            "train.zero_stage": 2,
            "train.save": writer,
            "train.save_every": save_every,
            "train.save_total_limit": 1,
            "train.log_every": 1,
            "report.enabled": "false",
            **{f"+model.config.{key}": value for key, value in shape.items()},
        }
        worker = ["benchmarks.training.launched", str(run / "trace")]
        return [sys.executable, *LAUNCHERS[launcher], *worker, *(f"{k}={v}" for k, v in values.items())]

    def start(
        self, run: Path, launcher: str, writer: str, *, saves_once: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a run in a process group of its own; it also saves in the middle, unless it `saves_once`."""
        run.mkdir(exist_ok=True)
        environment = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "840", "OMP_NUM_THREADS": "2"}
        if self.device == "cpu":
            environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        steps = STEPS[self.device]
        command = self.command(run, launcher, writer, steps if saves_once else steps // 2)
        if launcher == "deepspeed":
            command[3:3] = ["--master_port", str(crashes.free_port())]
        with (run / "log.txt").open("a") as log:
            return subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def reference(self, outcome: Outcome, name: str = "reference") -> dict[str, Any]:
        """What a run that is left alone gives; it saves at its end."""
        run = self.folder / name
        status = wait(self.start(run, "torchrun", "sync", saves_once=True), self.end)
        self.say(f"the run left alone ended with {status}")
        assert status == 0, f"{status=} {log_of(run)}"
        found = outcome(run)
        shutil.rmtree(run)
        return found

    def stop_in_a_save(self, launcher: str, writer: str) -> str:
        """Start a run and stop it in its first save. Returns what came of it, "" where no save was met."""
        run, end = self.folder / f"{launcher}-{writer}", self.end
        process = self.start(run, launcher, writer)
        while bytes_in_staging(run / "out" / "run") < SIGNAL_AT * self.checkpoint_bytes():
            if process.poll() is not None or time.monotonic() > end:
                self.say(f"{launcher} {writer} met no save: {wait(process, end)} {log_of(run)}")
                return ""
            time.sleep(0.01)
        self.say(f"{launcher} {writer} is in its first save")
        start = time.monotonic()
        if launcher == "deepspeed":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            process.terminate()
        status = wait(process, end)
        kept = sorted(path.name for path in (run / "out" / "run").glob("checkpoint-*"))
        told = f"ended with {status} after {time.monotonic() - start:.1f} s, with {kept}"
        self.say(f"{launcher} {writer} {told}")
        return told

    def resumed(self, launcher: str, writer: str, outcome: Outcome) -> dict[str, Any]:
        """Outcome of the run after a resume to its end."""
        run = self.folder / f"{launcher}-{writer}"
        status = wait(self.start(run, launcher, writer), self.end)
        self.say(f"{launcher} {writer}, resumed, ended with {status}")
        if status != 0:
            return {"status": status, "log": log_of(run)}
        found = outcome(run)
        shutil.rmtree(run)
        return found


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one launcher and writer: `complaint` is empty where the resumed run is bitwise equal."""

    launcher: str
    writer: str
    told: str
    complaint: str
    seconds: float


def verdicts(
    runs: Launched, cases: Sequence[tuple[str, ...]], outcome: Outcome, *, together: int
) -> Iterator[Verdict]:
    """The verdict of each (launcher, writer), `together` at a time, those first that are done first; two runs
    left alone go beside them, since kernels that differ from run to run would look like a wrong resume.
    """
    with ThreadPoolExecutor(2) as alone, ThreadPoolExecutor(together) as pool:
        expected, again = (alone.submit(runs.reference, outcome, name) for name in ("reference", "again"))

        def judge(case: tuple[str, ...]) -> Verdict:
            start, (launcher, writer) = time.monotonic(), case
            told = runs.stop_in_a_save(launcher, writer)
            complaint = "no save was met" if not told else ""
            if told:
                # First, so that the disk need not hold this run's checkpoint too.
                wanted = expected.result()
                found = runs.resumed(launcher, writer, outcome)
                wrong = different(wanted, found)
                complaint = f"{wrong} differ: {found}" if wrong else ""
                if wrong and (unlike := different(wanted, again.result())):
                    complaint = f"the runs left alone differ too, in {unlike}; {complaint}"
            seconds = time.monotonic() - start
            return Verdict(launcher=case[0], writer=case[1], told=told, complaint=complaint, seconds=seconds)

        for done in as_completed([pool.submit(judge, case) for case in cases]):
            yield done.result()


def different(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What `found` has otherwise than `wanted`; of losses the first step too."""
    wrong = [key for key, value in wanted.items() if found.get(key) != value]
    pairs = zip(wanted["losses"], found.get("losses", []), strict=False)
    steps = (step for step, (one, two) in enumerate(pairs, start=1) if one != two)
    return [f"losses from step {next(steps, None)}" if key == "losses" else key for key in wrong]


def measure(options: dict[str, str], outcome: Outcome) -> int:
    """Stop and resume the runs of all launchers and writers; returns 1 if one is not bitwise equal."""
    cases = [tuple(stop.split(":")) for stop in options["stops"].split(",")]
    known = set(itertools.product(LAUNCHERS, SAVE_MODES))
    if options["shape"] not in SHAPES or set(cases) - known:
        raise UserError(
            "IDLM-0107",
            f"shape={options['shape']} stops={options['stops']}",
            fix=f"shapes are {', '.join(SHAPES)}; stops are {', '.join(sorted(map(':'.join, known)))}",
        )
    is_equal = True
    with tempfile.TemporaryDirectory(prefix="idlm-resume-", dir=options["place"] or None) as temporary:
        runs = Launched(
            folder=Path(temporary),
            shape=options["shape"],
            layers=int(options["layers"]),
            device=options["device"],
            seconds=float(options["seconds"]),
        )
        for found in verdicts(runs, cases, outcome, together=int(options["together"])):
            name = f"{found.launcher} {found.writer} after {found.seconds:.0f} s"
            runs.say(f"{name}: {found.complaint or 'bitwise equal'}")
            if options["record"] == "true":
                append_rows("resume", _rows(runs, found), results=Path(options["results"]))
            is_equal = is_equal and not found.complaint
    return 0 if is_equal else 1


def _rows(runs: Launched, found: Verdict) -> list[dict[str, Any]]:
    case = {"writer": found.writer, "launcher": found.launcher, "layers": runs.layers, "shape": runs.shape}
    case |= {"device": runs.device, "from_ranks": 1, "to_ranks": 1}
    is_equal = not found.complaint
    command = "python -m benchmarks.resume"
    return [
        result_row("resume", case, metric, value, unit, gate_passed=is_equal, command=command)
        for metric, value, unit in (
            ("kills", int(found.told != ""), "kills"),
            ("bitwise_equal", float(is_equal), "share"),
        )
    ]


def bytes_in_staging(run: Path) -> int:
    """Bytes in folders of checkpoints that are not published yet."""
    total = 0
    for path in run.glob(".checkpoint-*.staging-*/**/*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def wait(process: subprocess.Popen[bytes], end: float) -> int:
    """Status of a launcher once all processes of its group have ended; what is left is killed at `end`."""
    while (process.poll() is None or _is_alive(process.pid)) and time.monotonic() < end:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _is_alive(group: int) -> bool:
    """Whether a process of `group` runs. A zombie, whose parent has ended, does not count."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number = path.read_text().rpartition(")")[2].split()[:3]
            if int(number) == group and state != "Z":
                return True
    return False


def log_of(run: Path) -> str:
    """The end of what a run printed."""
    return (run / "log.txt").read_text(errors="replace")[-3000:]


def fix_order_of_sums() -> None:
    """Make kernels of this process deterministic; call it before any is launched."""
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def main() -> int:
    """`idlm-train` with deterministic kernels."""
    from idlm.train import cli

    trace = Path(sys.argv[1])
    trace.mkdir(parents=True, exist_ok=True)
    fix_order_of_sums()
    crashes.record_items(trace, int(os.environ.get("RANK", "0")))
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
