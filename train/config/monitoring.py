"""Sections of the configuration of `idlm-train` that do not change what a run learns.

Assumptions of the plan, held-out evaluation, Weights & Biases, the report.
"""

from __future__ import annotations

from dataclasses import dataclass

from idlm.config.schema import option

MATMUL_TFLOPS = {"B200": 1700.0, "H200": 785.0, "H100": 770.0, "A100": 265.0}
"""bf16 TFLOP/s that matrix products of a GPU reach: H200 and H100 measured, others 0.8 of the data sheet."""
DECODED = ("exact_match", "acceptance_rate", "tokens_per_forward")
"""What the answers of a model that trains are measured by."""
WANDB_MODES = ("disabled", "offline", "online")


@dataclass(kw_only=True)
class PlanConfig:
    """What `dry_run=true` assumes where it cannot find out."""

    num_gpus: int | None = option(
        "GPUs to plan for; null: the launcher's processes, else the visible GPUs, else 1", None
    )
    gpu: str | None = option(
        "B200, H200, H100 or A100; null: the visible GPU, else this CPU (H200 with plan.num_gpus)", None
    )
    tflops: float | None = option("bf16 TFLOP/s of its matrix products; null: by its name", None)
    full_config: bool = option("show the whole configuration, not only what differs from the recipe", False)


@dataclass(kw_only=True)
class EvalConfig:
    """Losses and acceptance by draft position on held-out data while training, and answers of the engine."""

    every: int | None = option("optimizer steps between evaluations; null: none", None)
    num_items: int = option("packed rows per evaluation", 16)
    path: str | None = option(
        "held-out data of the data source; null: the task's validation split, or eval.holdout",
        None,
        is_path=True,
    )
    split: str | None = option(
        "held-out split of an hf dataset: of path, or of data.path without one; null: validation of path",
        None,
    )
    holdout: float = option(
        "share of a file's samples that training leaves out, for evaluations and the report, where path and "
        "split are null; at least 16 samples, or a tenth of fewer than 160, none of fewer than 8; 0: none",
        0.005,
    )
    num_prompts: int = option("prompts that the engine answers greedily at every evaluation; 0: none", 0)
    stop_if: dict[str, float] = option(
        "end the run where the answers' exact_match, acceptance_rate or tokens_per_forward is so far below "
        "its best value in the same stage: {exact_match: 0.05}",
        {},
    )


@dataclass(kw_only=True)
class WandbConfig:
    """Metrics mirrored to Weights & Biases."""

    mode: str = option(
        "disabled, offline (no account needed; files in the run's folder) or online", "disabled"
    )
    project: str = option("name of the project", "idlm")
    name: str | None = option("name of the run; null: chosen by the service", None)


@dataclass(kw_only=True)
class ReportConfig:
    """The report next to the checkpoint."""

    enabled: bool = option("write report.md with plots", True)
    num_samples: int = option("sample generations shown", 8)
