"""One arm of the study in a process of its own: trains it, decodes the held-out problems, writes its record.

    python -m benchmarks.study_worker '{"name": "idlm_4", ...}'     the fields of `Job`, as JSON

A record (`<seed>_<arm>.json`) has what training took and, for each cell and chain, the counts of drafts and
passes and which problems were answered exactly (`marks`: bits as hexadecimal digits, the first problem last).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import result_row
from benchmarks.training.studies.study_arms import (
    ARMS,
    BASE,
    CHAINS,
    DETERMINISTIC,
    MAX_LENGTH,
    MAX_TOKENS,
    SIZES,
    Cell,
    task_of,
    train_arguments,
)
from idlm.checkpoint import read_json
from idlm.cli import command
from idlm.contracts import SamplingParams
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.files.disk import replace_text
from idlm.infer.cli.evaluate import Evaluation, evaluate, task_samples
from idlm.infer.engine import Engine
from idlm.tasks import TaskSample
from idlm.train import cli
from idlm.train.loop.metrics import read_metrics

TRAINED = "trained.json"
"""In the folder of an arm once it is trained."""
KEPT = (BASE, "idlm_4")
"""Arms whose checkpoints come back from a lent machine."""
PROMPT_TOKENS = 8192
SEED = 1
"""Of the answers at temperature 1."""
MACHINE = ("gpu", "num_gpus", "torch", "triton", "commit", "date")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An arm of a seed. `num`: problems of each chain. `keep`: a folder for its checkpoint, or ""."""

    name: str
    seed: int
    size: str
    steps: int
    flops: float
    num: int
    max_tokens: int
    batch: int
    device: str
    workers: int
    folder: str
    results: str
    keep: str

    @property
    def output(self) -> Path:
        """The folder of its checkpoint."""
        return Path(self.folder) / self.name

    @property
    def record(self) -> Path:
        """The file of its record."""
        return record_path(Path(self.results), self.seed, self.name)


def record_path(results: Path, seed: int, name: str) -> Path:
    """Where the record of an arm is below a folder of results."""
    return results / "study" / f"{seed}_{name}.json"


def is_whole(record: Path) -> bool:
    """Whether an arm has a record with all its cells."""
    return record.is_file() and json.loads(record.read_text())["is_whole"]


def samples_path(folder: Path, chain: str) -> Path:
    """Where the held-out problems of a chain are."""
    return folder / f"problems_{chain}.json"


def write_samples(folder: Path, num: int) -> None:
    """Write the held-out problems of all chains once, for all arms: drawing them takes seconds."""
    for chain in CHAINS:
        drawn = [asdict(one) for one in task_samples(task_of(chain), "test", num)]
        replace_text(samples_path(folder, chain), json.dumps(drawn))


def read_samples(folder: Path, chain: str, num: int) -> list[TaskSample]:
    """The held-out problems, drawn where they have not been written yet."""
    path = samples_path(folder, chain)
    if not path.is_file():
        return task_samples(task_of(chain), "test", num)
    return [TaskSample(**one) for one in json.loads(path.read_text())]


def main(arguments: list[str]) -> int:
    """Train, decode, record; returns the exit status."""
    run_arm(Job(**json.loads(arguments[0])))
    return 0


def run_arm(job: Job) -> None:
    """Train the arm, unless its folder says that it is trained, then decode it. Every cell adds to its
    record, because a machine that is lent may be taken back at any time; cells that the record of this job
    has are not decoded again.
    """
    if not (job.output / TRAINED).is_file():
        train(job)
    trained = read_json(job.output / TRAINED)
    machine = {key: result_row("study", {}, "none", 0.0, "")[key] for key in MACHINE}
    record: dict[str, Any] = {
        **{key: getattr(job, key) for key in ("name", "seed", "size", "steps", "flops", "num")},
        "trained": trained,
        "base": base_digest(Path(job.folder)),
        "machine": machine,
        "is_whole": False,
        "cells": [],
    }
    job.record.parent.mkdir(parents=True, exist_ok=True)
    if job.record.is_file():
        known = read_json(job.record)
        changing = ("machine", "is_whole", "cells")
        if all(known.get(key) == value for key, value in record.items() if key not in changing):
            record["cells"] = known["cells"]
    num_cells = len(ARMS[job.name].cells) * len(CHAINS)
    for cell in measured(job, num_known=len(record["cells"])):
        record["cells"].append(cell)
        record["is_whole"] = len(record["cells"]) == num_cells
        replace_text(job.record, json.dumps(record) + "\n")


def base_digest(folder: Path) -> str:
    """Of the weights of the base (sha256, 16 digits): arms of one base can be compared problem by problem."""
    return hashlib.sha256((folder / BASE / "model.safetensors").read_bytes()).hexdigest()[:16]


def train(job: Job) -> None:
    """Run idlm-train in this process. UserError IDLM-0108 if it fails."""
    base = None if job.name == BASE else Path(job.folder) / BASE
    shared: dict[str, Any] = {
        "seed": job.seed,
        "steps": job.steps,
        "device": job.device,
        "workers": job.workers,
    }
    words = train_arguments(job.name, SIZES[job.size], base=base, output=job.output, **shared)
    print("idlm-train", *words, flush=True)
    start = time.perf_counter()
    status = cli.main(words)
    if status:
        raise UserError(
            "IDLM-0108", f"training {job.name} ended with status {status}", fix="see its output above"
        )
    records = read_metrics(job.output / "run" / "metrics.jsonl")
    facts = {
        "seconds": time.perf_counter() - start,
        "step_seconds": sum(one["seconds"] for one in records) / job.steps,
        "tokens": sum(one["num_tokens"] for one in records),
        "flops": sum(one.get("tflops_per_gpu", 0.0) * one["seconds"] for one in records) * 1e12,
        "tokens_per_second": records[-1]["tokens_per_second"],
        "last": {key: value for key, value in records[-1].items() if key.endswith("_loss")},
        "acceptance": records[-1]["acceptance"],
    }
    if job.keep and job.name in KEPT:
        pack(job.output, Path(job.keep) / f"study_{job.seed}_{job.name}.tar")
    replace_text(job.output / TRAINED, json.dumps(facts))
    free_cached_memory()


def pack(checkpoint: Path, target: Path) -> None:
    """The published files of a checkpoint, as one file."""
    with tarfile.open(target, "w") as packed:
        for path in sorted(checkpoint.iterdir()):
            if path.is_file():
                packed.add(path, path.name)


def measured(job: Job, *, num_known: int = 0) -> Iterator[dict[str, Any]]:
    """A dict for every cell and chain behind the first `num_known`; one engine for cells that differ in the
    settings of requests alone. Greedy AR answers stay in the folder of the arm for cells of a later run.
    """
    arm = ARMS[job.name]
    problems = {chain: read_samples(Path(job.folder), chain, job.num) for chain in CHAINS}
    stored = job.output / "greedy.json"
    greedy: dict[str, list[list[int]]] = read_json(stored) if num_known and stored.is_file() else {}
    left = list(itertools.product(arm.cells, CHAINS))[num_known:]
    for _, group in itertools.groupby(left, key=lambda one: (one[0].decoder, one[0].engine, one[0].of_base)):
        cells = list(group)
        engine = engine_of(job, cells[0][0])
        for cell, chain in cells:
            params = SamplingParams(
                temperature=cell.temperature, max_tokens=job.max_tokens, seed=SEED, **cell.sampling
            )
            result = evaluate(engine, task_of(chain), problems[chain], params)
            answers = [list(done.token_ids) for done in result.completions]
            if cell.decoder == "ar" and cell.temperature == 0:
                greedy[chain] = answers
                replace_text(stored, json.dumps(greedy))
            known = greedy.get(chain) if cell.temperature == 0 else None
            yield figures(cell, chain, result, arm.stride if cell.decoder == "isd" else 1) | {
                "equal_to_ar": None if known is None else equal_share(answers, known)
            }
            print(
                f"{job.name} {chain} {cell.label} T={cell.temperature:g}: {result.exact_match:.3f}",
                flush=True,
            )
        engine.close()
        del engine
        free_cached_memory()


def engine_of(job: Job, cell: Cell) -> Engine:
    """An engine that takes a fixed part of the GPU's memory, because other arms run there too. It computes in
    float32: in bfloat16, ties would part greedy answers of strategies that agree. Only a GPU has kernels
    whose bits do not depend on the batch.
    """
    is_free = job.device != "cuda"
    settings = {name: value for name, value in cell.engine.items() if not (is_free and name == DETERMINISTIC)}
    return Engine.from_pretrained(
        Path(job.folder) / BASE if cell.of_base else job.output,
        cell.decoder,
        device=job.device,
        dtype="float32",
        max_num_seqs=job.batch,
        # All prompts in a few passes, after which passes are those of CUDA graphs.
        max_num_batched_tokens=PROMPT_TOKENS,
        max_length=2 * MAX_LENGTH,
        num_pages=job.batch * -(-(MAX_LENGTH + MAX_TOKENS) // 16),
        prefix_cache=False,
        **settings,
    )


def figures(cell: Cell, chain: str, result: Evaluation, stride: int) -> dict[str, Any]:
    """What a record says of a cell."""
    return {
        "task": chain,
        "decoder": cell.decoder,
        "strategy": cell.label,
        "temperature": cell.temperature,
        "stride": stride,
        "exactness": result.exactness,
        "marks": marks_text([verdict.correct for verdict in result.verdicts]),
        "num_tokens": result.num_tokens,
        "num_forwards": result.num_forwards,
        "num_prompt_passes": result.num_prompt_passes,
        "accepted": result.accepted_by_position,
        "tested": result.tested_by_position,
        "seconds": result.seconds,
        "num_failed": result.num_failed,
    }


def marks_text(marks: Sequence[bool]) -> str:
    """Bits as hexadecimal digits, the first mark last."""
    return f"{sum(mark << place for place, mark in enumerate(marks)):x}"


def marks_of(text: str, num: int) -> list[bool]:
    """The marks of `marks_text`."""
    bits = int(text, 16)
    return [bool(bits >> place & 1) for place in range(num)]


def equal_share(answers: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    """Share of problems with the same answer, token for token."""
    return sum(mine == theirs for mine, theirs in zip(answers, others, strict=True)) / len(answers)


if __name__ == "__main__":
    sys.exit(command.run(main))
