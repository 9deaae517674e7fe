"""One process of `test_zero.py`: training runs one after the other, so that a process group is opened once.

    torchrun --nproc-per-node N -m tests.gpu.engine.zero_worker FOLDER BASE DEVICE CASE...

A CASE is `name:key=value,key=value`; each runs to its end, then again with a SIGTERM to rank 0 in step 3 and
a resume. Rank 0 writes the outcomes to FOLDER/results-N.json."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.integration.zero.determinism import fix_order_of_sums

STEPS = 6
STOP_AT = 3


def arguments(output: Path, base: Path, device: str, changes: list[str]) -> list[str]:
    """Two stages of three steps in float32, with the plainest form of every kernel."""
    second = f"{{stride: 4, steps: {STEPS - STEPS // 2}, clean_weight: auto}}"
    stages = f"[{{stride: 2, steps: {STEPS // 2}}}, {second}]"
    values = {
        "output_dir": output,
        "model.path": base,
        "model.attention": "idlm_sdpa",
        "model.compile": "off",
        "data.source": "task",
        "train.stages": stages,
        "train.batch_size": 1,
        "train.max_length": 300,
        "train.row_length": 560,
        "train.learning_rate": 1e-4,
        "train.device": device,
        "train.log_every": 1,
        "train.save_every": STEPS,
        "train.save": "sync",
        "report.enabled": "false",
    }
    return [*(f"{key}={value}" for key, value in values.items()), *changes]


def outcome(output: Path) -> dict[str, Any]:
    """Losses by step, and the digests of what was published."""
    losses = []
    for line in (output / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        losses.append([value for key, value in record.items() if key.endswith("_loss")])
    weights = sorted([*output.glob("*.safetensors"), *output.glob("stages/*/*.safetensors")])
    return {
        "losses": losses,
        "weights": {
            str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in weights
        },
    }


def run(argv: list[str]) -> int:
    from idlm.train import cli

    status = cli.main(argv)
    # A remaining DeepSpeed engine would shard the next model like its own.
    gc.collect()
    return status


def stopping(argv: list[str]) -> int:
    """A signal to rank 0 alone stops the run."""
    from idlm.train.loop.trainer import IdlmTrainer

    plain = IdlmTrainer.compute_loss

    def stopped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == STOP_AT - 1 and int(os.environ.get("RANK", "0")) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args, **kwargs)

    IdlmTrainer.compute_loss = stopped
    try:
        return run(argv)
    finally:
        IdlmTrainer.compute_loss = plain


def main() -> int:
    folder, base, device, cases = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    results: dict[str, Any] = {}
    # Bitwise equality needs kernels with a fixed order of sums; embeddings and attention have others too.
    fix_order_of_sums()
    for case in cases:
        name, _, text = case.partition(":")
        changes = [change for change in text.split(",") if change]
        start = time.perf_counter()
        whole, broken = folder / f"{name}-{world_size}", folder / f"{name}-{world_size}-broken"
        status = [run(arguments(whole, base, device, changes))]
        if world_size > 1:
            status += [stopping(arguments(broken, base, device, changes))]
            status += [run(arguments(broken, base, device, changes))]
        if rank == 0:
            results[name] = {
                "status": status,
                "whole": outcome(whole),
                "seconds": time.perf_counter() - start,
            }
            results[name]["broken"] = outcome(broken) if world_size > 1 else None
    if rank == 0:
        (folder / f"results-{world_size}.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
