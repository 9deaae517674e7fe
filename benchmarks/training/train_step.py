"""Time of one training step of `[x_t | x_0]` against the arithmetic limit of the same machine.

    python -m benchmarks.train_step model=qwen3_8b gpus=4 [arms=full,gated_lora,ungated_lora]
        [accumulation=16] [shortest=64] [steps=4] [record=true] [results=FOLDER]

It needs GPUs. Every arm runs the product's trainer (train_step_worker.py) in fresh processes: random weights
of the true shape, real text, samples of 4096 data tokens or of `shortest` to 4096, all supervised. The limit
counts the FLOPs that the layout needs, twice those of autoregressive training, at the rate of an 8192^3 bf16
product that every process of the arm measures. `dense_recompute` does what public trainers of the method do:
a dense mask and recomputed activations. Losses of arms that train the same weights must agree
(`gate_passed`). A LoRA has micro-batches of its own; `accumulation` is that of other arms, by default what
the recipe has on 8 GPUs."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS
from benchmarks.shared import Report, chosen, defaults, parse_options, start
from idlm.errors import UserError

LENGTH = 4096
TOKENIZER = Path(__file__).resolve().parents[2] / "recipes" / "assets" / "tiny_ar"
OPTIONS = defaults(
    "model=qwen3_8b gpus=1 arms=full,dense_recompute steps=4 accumulation= shortest= record=false"
)
ROPE = "{rope_type: default, rope_theta: 1000000}"
LORAS = ("gated_lora", "ungated_lora")
"""Arms that do not train all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a model of `benchmarks.models.MODELS` is trained."""

    model: str
    recipe: str
    accumulation: int
    lora: tuple[int, int]
    """Packed rows of a micro-batch and micro-batches of a step of gated LoRA."""
    tied: bool = True

    @property
    def shape(self) -> dict[str, Any]:
        return MODELS[self.model]

    @property
    def mask_token_id(self) -> int:
        return int(self.shape["vocab_size"]) - 267

    def config(self) -> list[str]:
        tied = {"tie_word_embeddings": str(self.tied).lower()}
        values = {"model_type": "qwen3", "rope_parameters": ROPE} | self.shape | tied
        return [f"+model.config.{key}={value}" for key, value in values.items() if key != "architectures"]

    def batches(self, arm: str, accumulation: str = "") -> list[str]:
        """How an arm divides a step; the recipe has the micro-batch of arms without LoRA."""
        if arm not in LORAS:
            return [f"train.accumulation={accumulation or self.accumulation}"]
        batch_size, num_batches = self.lora
        if arm == "ungated_lora":
            # It saves clean rows too for the backward pass.
            batch_size, num_batches = batch_size // 2, 2 * num_batches
        return [f"train.batch_size={batch_size}", f"train.accumulation={num_batches}"]

    def flops_per_token(self, mode: str) -> float:
        """Needed FLOPs per data token of `[x_t | x_0]` where every token is supervised.

        Two rows per token, a noisy and a clean one, through every layer and the head: 2 FLOPs per weight
        forward, as many for the gradient of the activations and for that of the weights. A frozen base needs
        no gradient of its weights, and under a gated LoRA none at all for clean rows, which no trained weight
        affects. The products of the LoRA itself are left out.
        Attention: L^2 + L visible pairs, half of them of noisy rows, 4 FLOPs per pair and head dimension
        forward and 10 backward: the second product of queries and keys counts, because the first cannot be
        kept."""
        shape = self.shape
        width, num_layers, head_dim = shape["hidden_size"], shape["num_hidden_layers"], shape["head_dim"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        projections = (2 * heads + 2 * kv_heads) * head_dim * width
        layers = num_layers * (projections + 3 * width * shape["intermediate_size"])
        head = width * shape["vocab_size"]
        attended = num_layers * (LENGTH + 1) * heads * head_dim
        if mode == "gated_lora":
            return 2 * (3 * layers + 2 * head) + (4 + 10 / 2) * attended
        if mode == "ungated_lora":
            return 2 * 2 * 2 * (layers + head) + (4 + 10) * attended
        return 2 * 2 * 3 * (layers + head) + (4 + 10) * attended


SETTINGS = {
    "qwen3_8b": Setting(model="qwen3-8b", recipe="qwen3_8b", accumulation=4, lora=(2, 4), tied=False),
    "qwen3_0_6b": Setting(model="qwen3-0.6b", recipe="qwen3_0_6b", accumulation=8, lora=(8, 2)),
    "smollm2_135m": Setting(model="smollm2-135m", recipe="qwen3_0_6b", accumulation=4, lora=(8, 2)),
    "llama_1b": Setting(model="llama-1b", recipe="qwen3_0_6b", accumulation=8, lora=(4, 2)),
}
ARMS: dict[str, tuple[str, ...]] = {
    "full": (),
    "full_zero1": ("train.zero_stage=1",),
    "dense_recompute": (
        "model.attention=idlm_sdpa",
        "model.gradient_checkpointing=true",
        "model.compile=off",
    ),
    "gated_lora": (),
    "ungated_lora": ("adapter.gated=false", "export.merge=true"),
}
LOSS_TOLERANCE = 0.02
"""Between arms that train the same weights; their bfloat16 sums differ in order."""


def mode_of(arm: str) -> str:
    """What an arm trains."""
    return arm if arm in LORAS else "full"


def measure(arguments: list[str]) -> int:
    """Run the arms in sequence, print a table and optionally record rows; returns 1 when an arm failed."""
    options = parse_options(arguments, OPTIONS)
    [model], arms = chosen(options, "model", SETTINGS), chosen(options, "arms", ARMS)
    setting = SETTINGS[model]
    results: dict[str, dict[str, Any]] = {}
    command = f"python -m benchmarks.train_step model={options['model']} gpus={options['gpus']}"
    report = Report("train_step", options, command)
    for arm in arms:
        start = time.perf_counter()
        try:
            results[arm] = _run(options, setting, arm)
        except UserError as error:
            print(error, flush=True)
        else:
            print(f"{arm}: {time.perf_counter() - start:.0f} s in all, {results[arm]}", flush=True)
            _add_rows(report, setting, arm, results)
    return 0 if len(results) == len(arms) else 1


def _run(options: dict[str, str], setting: Setting, arm: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        overrides = [
            f"recipe={'qwen3_8b_lora' if arm in LORAS else setting.recipe}",
            *setting.config(),
            "model.path=null",
            f"model.tokenizer={TOKENIZER}",
            f"model.mask_token_id={setting.mask_token_id}",
            "mask_region=all",
            "data.source=benchmark_text",
            f"+data.task_args.vocab_size={setting.mask_token_id}",
            f"+data.task_args.length={LENGTH}",
            *([f"+data.task_args.shortest={options['shortest']}"] if options["shortest"] else []),
            f"train.max_length={LENGTH}",
            "train.overlong=error",
            "train.epochs=null",
            "train.steps=10000",
            "train.global_batch=null",
            *setting.batches(arm, options["accumulation"]),
            f"output_dir={folder}/run",
            "resume=never",
            *ARMS[arm],
        ]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options['gpus']}"]
        worker = ["-m", "benchmarks.training.train_step_worker", str(target), options["steps"], *overrides]
        done = subprocess.run([sys.executable, *launch, *worker], check=False)
        if done.returncode != 0 or not target.is_file():
            raise UserError(
                "IDLM-0108", f"the arm {arm} ended with status {done.returncode}", fix="see its output above"
            )
        result: dict[str, Any] = json.loads(target.read_text())
    return result


def _add_rows(report: Report, setting: Setting, arm: str, results: dict[str, dict[str, Any]]) -> None:
    """Rows of an arm that has just run, and the speedup over `dense_recompute` once both are known."""
    options, result, mode = report.options, results[arm], mode_of(arm)
    agree = _agree([one["losses"] for name, one in results.items() if mode_of(name) == mode])
    for metric, value, unit, floor in _measured(options, setting, mode, result):
        report.add(_case(options, arm, result), metric, value, unit, floor=floor, gate_passed=agree)
    if arm in ("full", "dense_recompute") and {"full", "dense_recompute"} <= results.keys():
        speedup = _speed(results["full"]) / _speed(results["dense_recompute"])
        case = _case(options, "full", results["full"])
        report.add(case, "speedup_vs_dense_recompute", speedup, "x", gate_passed=agree)


def _speed(result: dict[str, Any]) -> float:
    """Data tokens per second and GPU."""
    return float(result["data_tokens_per_step"] / statistics.median(result["seconds_per_step"]))


def _agree(losses: list[list[list[float]]]) -> bool | None:
    """Whether all arms have the losses of the first one, by step and term; None with one arm."""
    pairs = [
        pair
        for other in losses[1:]
        for one, two in zip(losses[0], other, strict=True)
        for pair in zip(one, two, strict=True)
    ]
    return all(math.isclose(*pair, rel_tol=LOSS_TOLERANCE) for pair in pairs) if pairs else None


def _case(options: Mapping[str, str], arm: str, result: dict[str, Any]) -> dict[str, Any]:
    case = {
        "model": options["model"],
        "gpus": result["world_size"],
        "zero_stage": result["zero_stage"],
        "mode": mode_of(arm),
        "arm": arm,
        "attention": result["attention"],
    }
    return case | {name: int(options[name]) for name in ("accumulation", "shortest") if options[name]}


def _measured(
    options: Mapping[str, str], setting: Setting, mode: str, result: dict[str, Any]
) -> Iterator[tuple[str, float, str, float | None]]:
    # Of shorter samples attention takes less than is counted.
    limit = None if options["shortest"] else result["matmul_flops"] / setting.flops_per_token(mode)
    yield "data_tokens_per_s_per_gpu", _speed(result), "tokens/s", limit
    yield "peak_memory", result["peak_allocated"] / 2**30, "GiB", None
    if result["planned_peak"] and result["peak_allocated"]:
        yield "planned_over_peak_memory", result["planned_peak"] / result["peak_allocated"], "x", None
    if result["planned_seconds"]:
        taken = statistics.median(result["seconds_per_step"])
        yield "planned_over_step_time", result["planned_seconds"] / taken, "x", None


if __name__ == "__main__":
    start(measure, __doc__)
