"""Sections of the configuration of `idlm-train` that do not change what a run learns.

Assumptions of the plan, held-out evaluation, Weights & Biases, the report.
"""

from __future__ import annotations

from dataclasses import dataclass

from idlm.config.suggest import did_you_mean
from idlm.train.config.data import setting

MATMUL_TFLOPS = {"B200": 1700.0, "H200": 785.0, "H100": 700.0, "A100": 265.0}
"""bf16 TFLOP/s that matrix products of a GPU reach: H200 measured, the others about 0.8 of the data sheet."""
WANDB_MODES = ("disabled", "offline", "online")


@dataclass(kw_only=True)
class PlanConfig:
    """What `dry_run=true` assumes where it cannot find out."""

    num_gpus: int | None = setting(
        None, "GPUs to plan for; null: the launcher's processes, else the visible GPUs, else 1"
    )
    gpu: str | None = setting(None, "B200, H200, H100 or A100; null: the visible GPU, else H200")
    tflops: float | None = setting(None, "bf16 TFLOP/s of its matrix products; null: by its name")


@dataclass(kw_only=True)
class EvalConfig:
    """Losses and acceptance by draft position on held-out data while training."""

    every: int | None = setting(None, "optimizer steps between evaluations; null: none")
    num_items: int = setting(16, "packed rows per evaluation")
    path: str | None = setting(
        None, "held-out file of the data source; null: the task's validation split, or eval.holdout"
    )
    holdout: float = setting(0.005, "share of a file's samples that is held out, where path is null")


@dataclass(kw_only=True)
class WandbConfig:
    """Metrics mirrored to Weights & Biases."""

    mode: str = setting(
        "disabled", "disabled, offline (no account needed; files in the run's folder) or online"
    )
    project: str = setting("idlm", "name of the project")
    name: str | None = setting(None, "name of the run; null: chosen by the service")


@dataclass(kw_only=True)
class ReportConfig:
    """The report beside the checkpoint."""

    enabled: bool = setting(True, "write report.md with plots")
    num_samples: int = setting(8, "sample generations shown")
    sample_every: int | None = setting(
        None, "optimizer steps between greedy samples of the running weights; null: none"
    )
    sample_tokens: int = setting(64, "most tokens of such a sample")


def control_problems(
    plan: PlanConfig, evaluation: EvalConfig, wandb: WandbConfig, report: ReportConfig
) -> list[str]:
    """Return what is wrong with these sections, as sentences."""
    at_least_one = {
        "plan.num_gpus": plan.num_gpus,
        "eval.every": evaluation.every,
        "eval.num_items": evaluation.num_items,
        "report.sample_every": report.sample_every,
        "report.sample_tokens": report.sample_tokens,
    }
    problems = [
        f"{key}={value} must be at least 1"
        for key, value in at_least_one.items()
        if value is not None and value < 1
    ]
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
