"""Sections of the configuration of `idlm-train` about watching a run, not about what it learns.

Assumptions of the plan, held-out evaluation, Weights & Biases, the report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from idlm.config.suggest import did_you_mean

WANDB_MODES = ("disabled", "offline", "online")


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class PlanConfig:
    """What `dry_run=true` assumes where it cannot ask."""

    num_gpus: int | None = _setting(
        None, "GPUs to plan for; null: the launcher's processes, else the visible GPUs, else 1"
    )
    gpu: str | None = _setting(None, "B200, H200, H100 or A100; null: the visible GPU, else H200")
    tflops: float | None = _setting(None, "bf16 TFLOP/s of its matrix products; null: by its name")


@dataclass(kw_only=True)
class EvalConfig:
    """Losses and acceptance by draft position on held-out data while training."""

    every: int | None = _setting(None, "optimizer steps between evaluations; null: none")
    num_items: int = _setting(16, "packed rows that are looked at")
    path: str | None = _setting(
        None, "held-out file of the data source; null: the task's validation split, or eval.holdout"
    )
    holdout: float = _setting(0.005, "share of a file's samples that is held out, where path is null")


@dataclass(kw_only=True)
class WandbConfig:
    """Metrics mirrored to Weights & Biases."""

    mode: str = _setting("disabled", "disabled, offline (no account; files in the run's folder) or online")
    project: str = _setting("idlm", "project")
    name: str | None = _setting(None, "name of the run; null: the service's choice")


@dataclass(kw_only=True)
class ReportConfig:
    """The report beside the checkpoint."""

    enabled: bool = _setting(True, "write report.md with plots")
    num_samples: int = _setting(8, "sample generations shown")


def control_problems(
    plan: PlanConfig, evaluation: EvalConfig, wandb: WandbConfig, report: ReportConfig
) -> list[str]:
    """What is wrong with these sections, as sentences."""
    # Not above: it imports torch, which help and refusals of keys do not wait for.
    from idlm.train.planning.time import MATMUL_TFLOPS

    at_least_one = {
        "plan.num_gpus": plan.num_gpus,
        "eval.every": evaluation.every,
        "eval.num_items": evaluation.num_items,
    }
    problems = [
        f"{key}={value} must be at least 1" for key, value in at_least_one.items() if (value or 1) < 1
    ]
    problems += [f"{key}=0 must be at least 1" for key, value in at_least_one.items() if value == 0]
    if report.num_samples < 0:
        problems.append(f"report.num_samples={report.num_samples} must be at least 0")
    if plan.tflops is not None and plan.tflops <= 0:
        problems.append(f"plan.tflops={plan.tflops} must be above 0")
    if plan.gpu is not None and plan.gpu not in MATMUL_TFLOPS and plan.tflops is None:
        problems.append(
            f"plan.gpu={plan.gpu!r} is not one of {', '.join(MATMUL_TFLOPS)}"
            f"{did_you_mean(plan.gpu, tuple(MATMUL_TFLOPS))}; for another one give plan.tflops too"
        )
    if wandb.mode not in WANDB_MODES:
        problems.append(
            f"wandb.mode={wandb.mode!r} is not one of {', '.join(WANDB_MODES)}"
            f"{did_you_mean(wandb.mode, WANDB_MODES)}"
        )
    if not 0 < evaluation.holdout < 1:
        problems.append(f"eval.holdout={evaluation.holdout} must be in (0, 1)")
    return problems
