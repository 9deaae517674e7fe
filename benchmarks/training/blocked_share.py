"""Which share of a save training waits for, with the product's own trainer and writers.

    python -m benchmarks.blocked_share [device=cuda] [writers=async,sync] [layers=16] [steps=150]
        [seconds=150] [record=true] [results=FOLDER]

A run with random weights saves three times, with `steps` optimizer steps before each, which must take longer
than a save: training waits for the save before. A thread of the asynchronous writer allocates its host memory
before the first save. On a GPU one process runs ZeRO-2 on bfloat16 weights, 1024 wide: 16 layers are
checkpoints of 3.5 GB. Nothing is compiled, which would take longer than the saves. On a CPU the weights are
float32, 384 wide, and 12 layers are checkpoints of 181 MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from idlm.cli import command
from idlm.errors import UserError

OPTIONS = {"device": "cuda", "writers": "async,sync", "layers": "16", "steps": "150", "seconds": "150"}
OPTIONS |= {"record": "false", "results": str(RESULTS)}
NUM_SAVES = 3
SIZES = {
    "cuda": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128},
    "cpu": {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 4, "head_dim": 16},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "cuda": {"model.dtype": "bfloat16", "train.zero_stage": 2, "train.batch_size": 16},
    "cpu": {"train.zero_stage": "null", "train.batch_size": 1, "train.threads": 1},
}


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Run every writer, print and optionally record rows."""
    options = parse_options(arguments, OPTIONS)
    if options["device"] not in SIZES:
        raise UserError("IDLM-0107", f"device={options['device']}", fix="give device=cuda or device=cpu")
    rows = [row for writer in options["writers"].split(",") for row in blocked_shares(writer, options)]
    for row in rows:
        print(f"{row['case']['writer']:<6} {row['case']['save']:<6} {row['metric']} {row['value']:.3f}")
    if options["record"] == "true":
        append_rows("resume", rows, results=Path(options["results"]))
    return 0


def blocked_shares(writer: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of a run: of its first save, and the largest share of a later one."""
    with tempfile.TemporaryDirectory(prefix="idlm-blocked-") as temporary:
        folder, trace = Path(temporary), Path(temporary) / "trace"
        trace.mkdir()
        command_line = [sys.executable, "-m", "benchmarks.training.crashes", str(trace)]
        try:
            subprocess.run(
                [*command_line, *overrides(folder, writer, options)],
                check=True,
                timeout=float(options["seconds"]),
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            raise UserError("IDLM-0108", f"the run ended: {error}", fix="see its output above") from error
        saves = [json.loads(line) for line in (trace / "saves-0.jsonl").read_text().splitlines()]
        stored = sorted((folder / "out" / "run").glob("checkpoint-*"))[-1]
        megabytes = sum(path.stat().st_size for path in stored.rglob("*") if path.is_file()) // 10**6
    told = ", ".join(f"{save['blocked']:.2f} of {save['total']:.2f} s" for save in saves)
    print(f"{writer}: training waited for {told} of checkpoints of {megabytes} MB", flush=True)
    case = {"writer": writer, "from_ranks": 1, "to_ranks": 1, "checkpoint_mb": megabytes}
    case |= {"device": options["device"]}
    shares = [save["blocked"] / save["total"] for save in saves]
    return [
        result_row(
            "resume",
            case | {"save": name},
            "blocked_share",
            share,
            "share",
            command="python -m benchmarks.blocked_share",
        )
        for name, share in (("first", shares[0]), ("later", max(shares[1:])))
    ]


def overrides(folder: Path, writer: str, options: dict[str, str]) -> list[str]:
    """Arguments of `idlm-train`."""
    steps, device = int(options["steps"]), options["device"]
    shape = SIZES[device] | {"num_hidden_layers": options["layers"], "num_key_value_heads": 2}
    shape |= {"model_type": "qwen3", "vocab_size": 192, "tie_word_embeddings": "true"}
    values = {
        "output_dir": folder / "out",
        "model.path": "null",
        "model.tokenizer": "task",
        "model.attention": "idlm_sdpa",
        "model.compile": "off",
        "data.source": "task",
        "train.stages": f"[{{stride: 2, steps: {NUM_SAVES * steps}}}]",
        "train.max_length": 300,
        "train.row_length": 560,
        "train.device": device,
        "train.save": writer,
        "train.save_every": steps,
        "train.log_every": NUM_SAVES * steps,
        "report.enabled": "false",
        **SETTINGS[device],
        **{f"+model.config.{key}": value for key, value in shape.items()},
    }
    return [f"{key}={value}" for key, value in values.items()]


if __name__ == "__main__":
    sys.exit(main())
