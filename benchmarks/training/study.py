"""What a conversion retains of a small AR model, at equal FLOPs, on chains of sums that are checked.

    python -m benchmarks.study seed=0 [arms=base,ar,idlm_4,block_4,lora_4]     trains, decodes, records
    python -m benchmarks.study part=table                  rows and plots (docs/plots) from all records

A seed takes about 20 minutes of one GPU (`size=toy device=cpu` is for tests). The base of a seed learns from
generated problems alone, in a tokenizer of 165 ids; every other arm starts from it and does as many FLOPs as
`ar`, counted as the plan of idlm-train does, so that an arm with fewer FLOPs a step takes more steps. An arm
whose checkpoint is in `folder` is not trained again, and one that has a whole record is left out. A record
(`results/study/<seed>_<arm>.json`) has what training took and, for each cell and chain, the counts of drafts
and passes and which problems were answered exactly (`marks`: bits as hexadecimal digits, the first problem
last).

Rows are made by study_report.py."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import result_row
from benchmarks.shared import chosen, defaults, parse_options, start
from benchmarks.training import study_report
from benchmarks.training.study_report import BASE, CHAINS, CONTROL, MACHINE
from idlm.checkpoint import read_json
from idlm.config.compose import compose
from idlm.contracts import SamplingParams
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.files.disk import replace_text
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import evaluate, task_samples
from idlm.tasks import TASKS, Task
from idlm.train.config.schema import TrainConfig
from idlm.train.loop.progress import read_metrics

LEVEL, MAX_LENGTH, MAX_TOKENS, SEED = "p4", 544, 440, 1
BASE_RATE, ARM_RATE, LORA_RATE = 2e-3, 7e-4, 3e-3
"""Peaks of the cosine at a width of 256. At the base's rate the control fell from 81 to 67 % of short chains
in 600 steps.
"""
DEFAULTS = defaults(
    "part=run seed=0 arms=all size=small base_steps=4000 share=0.25 num=1000 batch=1024 device=auto "
    "workers=4 folder=outputs/study plots=docs/plots",
    max_tokens=str(MAX_TOKENS),
)
FLOPS_ITEMS = 256
"""Packed rows whose mean is the FLOPs of a step: 8 left 3 % between arms."""
Record = dict[str, Any]


SIZES = {
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 64},
    "toy": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16},
}
BATCHES = {"small": 32, "toy": 1}
SHAPE = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": "true",
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to decode an arm; `label` names it in rows."""

    label: str
    decoder: str
    temperature: float
    engine: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`overrides` of idlm-train added to the common ones; `rate` is the peak of its learning rate."""

    overrides: tuple[str, ...]
    cells: tuple[Cell, ...]
    stride: int = 4
    rate: float = ARM_RATE


def _both(label: str, decoder: str, **engine: Any) -> tuple[Cell, ...]:
    return tuple(Cell(label=label, decoder=decoder, temperature=t, engine=engine) for t in (0.0, 1.0))


def _stages(*shares: float, last: str) -> str:
    weights = ["0.2"] * (len(shares) - 1) + [last]
    each = zip((2, 3, 4), shares, weights, strict=True)
    return ", ".join(
        f"{{stride: {stride}, fraction: {share}, clean_weight: {weight}}}" for stride, share, weight in each
    )


AR = _both("ar", "ar")
COLD = _both("cold", "isd", rejection_strategy="cold")
BRANCH = _both("branch", "isd", rejection_strategy="branch")
RELAXED = replace(COLD[1], label="tau_0.5", sampling={"tau": 0.5})
PUBLISHED = replace(COLD[1], label="published", engine=COLD[1].engine | {"acceptance": "published"})
BLOCKS = (
    *_both("sequential", "block", strategy="sequential"),
    *_both("threshold_0.9", "block", strategy="low_confidence_dynamic", threshold=0.9),
)
ARMS = {
    BASE: Arm(overrides=("objective=ar",), cells=AR, stride=1),
    CONTROL: Arm(overrides=("objective=ar",), cells=AR, stride=1),
    # Cells of one engine stand next to each other.
    "idlm_4": Arm(
        overrides=("objective=idlm", f"train.stages=[{_stages(0.25, 0.25, 0.5, last='auto')}]"),
        cells=(AR[0], *COLD, RELAXED, *BRANCH, PUBLISHED),
    ),
    # Blocks that are bidirectional, without the shift of logits: block diffusion of the paper's Figure 6(a).
    "block_4": Arm(overrides=("objective=block", "train.stages=[{stride: 4, fraction: 1.0}]"), cells=BLOCKS),
    # R-ISD: a gated LoRA, whose clean rows are the base's and have no loss.
    "lora_4": Arm(
        overrides=(
            "objective=idlm",
            "train.stages=[{stride: 2, fraction: 0.25}, {stride: 3, fraction: 0.25}, "
            "{stride: 4, fraction: 0.5}]",
            "adapter.rank=64",
            "adapter.alpha=128",
        ),
        cells=(AR[0], *COLD, *BRANCH),
        rate=LORA_RATE,
    ),
}


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS)
    names = chosen(options, "arms", ["all", *ARMS])
    [part], [_] = chosen(options, "part", ("run", "table")), chosen(options, "size", SIZES)
    results = Path(options["results"])
    if part == "table":
        study_report.write(results, Path(options["plots"]))
        return 0
    if options["device"] == "auto":
        options["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    for name in sorted(ARMS if names == ["all"] else names, key=lambda name: name != BASE):
        run_arm(options, name, results / "study" / f"{options['seed']}_{name}.json")
    return 0


def run_arm(options: dict[str, str], name: str, record: Path) -> None:
    """Train the arm unless it is trained, and decode it unless it has a whole record."""
    if record.is_file() and read_json(record)["is_whole"]:
        return
    folder, seed = Path(options["folder"]) / options["seed"], int(options["seed"])
    steps, flops = budget(options, name)
    trained = folder / name / "trained.json"
    if not trained.is_file():
        train(options, name, steps, trained)
    base = (folder / BASE / "model.safetensors").read_bytes()
    row = result_row("study", {}, "none", 0.0, "")
    found: Record = {
        "name": name,
        "seed": seed,
        "size": options["size"],
        "steps": steps,
        "flops": flops,
        "num": int(options["num"]),
        "trained": read_json(trained),
        # Arms of one base can be compared problem by problem.
        "base": hashlib.sha256(base).hexdigest()[:16],
        "machine": {key: row[key] for key in MACHINE},
        "is_whole": True,
        "cells": list(decoded(options, name, folder / name)),
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    replace_text(record, json.dumps(found) + "\n")


def budget(options: dict[str, str], name: str) -> tuple[int, float]:
    """Steps and FLOPs of an arm; the control's steps are `share` of the base's."""
    base_steps = int(options["base_steps"])
    control_steps = max(4, round(float(options["share"]) * base_steps))
    control = flops_per_step(options, CONTROL)
    each = control if name in (BASE, CONTROL) else flops_per_step(options, name)
    steps = base_steps if name == BASE else max(4, round(control_steps * control / each))
    return steps, steps * each


def flops_per_step(options: dict[str, str], name: str) -> float:
    """FLOPs of an average step from new weights, by the plan of `dry_run=true`; nothing is loaded."""
    from idlm.train.planning.dry_run import mask_choice, meta_model
    from idlm.train.planning.estimate import estimate_run
    from idlm.train.prepare import make_objective, prepare_adapter, prepare_data, prepare_tokenizer

    # Fractions of stages need some steps to split.
    words = train_arguments({**options, "seed": "0", "workers": "0"}, name, 20, base=None, output=Path("x"))
    config = compose("train", TrainConfig, words)
    # Any rate will do: FLOPs are wanted, not seconds.
    config.plan.tflops = 1.0
    tokenizer = prepare_tokenizer(config)
    # An adapter needs a stored base, FLOPs its shape alone.
    model = meta_model(replace(config, adapter=None), tokenizer)
    mask_token_id, *_ = mask_choice(config, model, tokenizer)
    prepare_adapter(config, model, None)
    objective = make_objective(config, model, tokenizer, mask_token_id)
    data = prepare_data(config, tokenizer, objective, mask_token_id, 1)
    estimate = estimate_run(config, model, data.dataset, data.curriculum, gpus=1, num_sampled=FLOPS_ITEMS)
    assert estimate is not None and estimate.time is not None
    return estimate.time.flops_per_step + estimate.time.extra_flops


def train_arguments(
    options: dict[str, str], name: str, steps: int, *, base: Path | None, output: Path
) -> list[str]:
    """The command line of idlm-train for an arm; `base` None: new weights."""
    is_gpu, seed = options["device"] == "cuda", int(options["seed"])
    new = [f"+model.config.{key}={value}" for key, value in (SHAPE | SIZES[options["size"]]).items()]
    return [
        f"output_dir={output}",
        "mask_region=response",
        "export.dtype=bfloat16",
        "report.enabled=false",
        "data.source=task",
        f"data.level={LEVEL}",
        f"data.task_args={{min_steps: {CHAINS['short'][0]}, max_steps: {CHAINS['long'][1]}}}",
        # The arms see other samples than their base.
        f"data.seed={2 * seed + (name != BASE)}",
        f"train.seed={seed}",
        f"train.steps={steps}",
        f"train.batch_size={BATCHES[options['size']]}",
        f"train.max_length={MAX_LENGTH}",
        "train.row_length=1152",
        f"train.learning_rate={BASE_RATE if base is None else ARMS[name].rate:g}",
        "train.warmup=0.03",
        "train.weight_decay=0.01",
        "train.adam_beta2=0.98",
        f"train.bf16={str(is_gpu).lower()}",
        f"train.device={options['device']}",
        f"train.workers={options['workers'] if is_gpu else 0}",
        f"train.log_every={max(1, min(50, steps // 10))}",
        f"train.save_every={max(1, steps // 2)}",
        "train.save_total_limit=1",
        *([*new, "model.tokenizer=task"] if base is None else [f"model.path={base}"]),
        *ARMS[name].overrides,
    ]


def train(options: dict[str, str], name: str, steps: int, target: Path) -> None:
    """Run idlm-train; what it took goes to the file `target`. UserError IDLM-0108 if it fails."""
    base = None if name == BASE else target.parents[1] / BASE
    words = train_arguments(options, name, steps, base=base, output=target.parent)
    start_time = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "idlm.train.cli", *words], check=False)
    if done.returncode:
        message = f"training {name} ended with status {done.returncode}"
        raise UserError("IDLM-0108", message, fix="see its output above")
    records = read_metrics(target.parent / "run" / "metrics.jsonl")
    facts = {
        "seconds": time.perf_counter() - start_time,
        "tokens": sum(one["num_tokens"] for one in records),
        "tokens_per_second": records[-1]["tokens_per_second"],
        "acceptance": records[-1]["acceptance"],
    }
    replace_text(target, json.dumps(facts))


def task_of(chain: str) -> Task:
    low, high = CHAINS[chain]
    task: Task = TASKS.get("ledger")(level=LEVEL, min_steps=low, max_steps=high)
    return task


def decoded(options: dict[str, str], name: str, checkpoint: Path) -> Iterator[dict[str, Any]]:
    """A dict for every cell and chain; one engine for cells that differ in the settings of requests alone.
    It computes in float32: in bfloat16, ties would part greedy answers of strategies that agree."""
    arm, batch = ARMS[name], int(options["batch"])
    problems = {chain: task_samples(task_of(chain), "test", int(options["num"])) for chain in CHAINS}
    greedy: dict[str, list[list[int]]] = {}
    for _, group in itertools.groupby(arm.cells, key=lambda cell: (cell.decoder, cell.engine)):
        cells = list(group)
        engine = Engine.from_pretrained(
            checkpoint,
            cells[0].decoder,
            device=options["device"],
            dtype="float32",
            max_num_seqs=batch,
            max_num_batched_tokens=8192,
            max_length=2 * MAX_LENGTH,
            num_pages=batch * -(-(MAX_LENGTH + MAX_TOKENS) // 16),
            prefix_cache=False,
            **cells[0].engine,
        )
        for cell, chain in itertools.product(cells, CHAINS):
            params = SamplingParams(
                temperature=cell.temperature,
                max_tokens=int(options["max_tokens"]),
                seed=SEED,
                **cell.sampling,
            )
            result = evaluate(engine, task_of(chain), problems[chain], params)
            answers = [list(done.token_ids) for done in result.completions]
            if cell.decoder == "ar" and cell.temperature == 0:
                greedy[chain] = answers
            known = greedy.get(chain) if cell.temperature == 0 else None
            marks = sum(verdict.correct << index for index, verdict in enumerate(result.verdicts))
            same = [mine == other for mine, other in zip(answers, known or (), strict=known is not None)]
            yield {
                "task": chain,
                "decoder": cell.decoder,
                "strategy": cell.label,
                "temperature": cell.temperature,
                "stride": arm.stride if cell.decoder == "isd" else 1,
                "exactness": result.exactness,
                "marks": f"{marks:x}",
                "num_tokens": result.num_tokens,
                "num_forwards": result.num_forwards,
                "num_prompt_passes": result.num_prompt_passes,
                "accepted": result.accepted_by_position,
                "tested": result.tested_by_position,
                "seconds": result.seconds,
                "equal_to_ar": sum(same) / len(same) if same else None,
            }
            print(f"{name} {chain} {cell.label} T={cell.temperature:g}: {result.exact_match:.3f}", flush=True)
        engine.close()
        del engine
        free_cached_memory()


if __name__ == "__main__":
    start(measure, __doc__)
