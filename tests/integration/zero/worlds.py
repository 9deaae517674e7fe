"""Real `idlm-train` runs that are started, killed and resumed, and what must be equal at their ends.

`benchmarks.resume` runs the full counts of deaths in them."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from idlm.config.compose import compose
from idlm.train.config.schema import TrainConfig
from tests.integration.training.test_train_tiny import arguments
from tests.integration.zero import crashes

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
            "train.stages": stages,
            "train.batch_size": 1,
            "train.accumulation": 2 // self.world_size,
            "train.save_every": 1,
            "train.zero_stage": "null" if self.world_size == 1 else 2,
        }
        return arguments(self.base, run / "out", **(values | self.changes))

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

    def finish_again(self, name: str) -> None:
        """Resume a copy of the reference from its last checkpoint but one, and compare."""
        run = self.folder / "again"
        for part in ("trace", "out/run", "out/stages"):
            shutil.copytree(self.reference / part, run / part)
        shutil.rmtree(run / "out" / "run" / f"checkpoint-{STEPS}")
        self.finish(run, name)

    def results(self) -> dict[str, Any]:
        """What the reference was, and how many resumed runs were equal to it."""
        resumes = [self.tally.equal, self.tally.resumes]
        return self.expected | {"resumes": resumes, "complaints": self.tally.complaints}

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
    """Import and cache what every run does, then freeze the garbage collector: it would copy shared pages."""
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    for name in IMPORTED_BY_RUNS:
        importlib.import_module(name)
    compose("train", TrainConfig, ["output_dir=x", "train.stages=[{stride: 2, steps: 3}]"])
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3")
    gc.collect()
    gc.freeze()
