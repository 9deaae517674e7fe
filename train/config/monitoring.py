"""Sections of the configuration of `idlm-train` that do not change what a run learns.

Assumptions of the plan, held-out evaluation, Weights & Biases, the report.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """The report next to the checkpoint."""

    enabled: bool = setting(True, "write report.md with plots")
    num_samples: int = setting(8, "sample generations shown")
