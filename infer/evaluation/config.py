"""Arguments of `idlm-eval`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from idlm.config.schema import option
from idlm.contracts import SamplingParams
from idlm.infer.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(EngineSettings):
    """`idlm-eval`: answers a task of idlm.tasks or of a file, with a baseline for comparison."""

    model: str | None = option("checkpoint directory", None, is_path=True)
    task: str = option(
        "a generated task (ledger, recall), or one whose problems are in data= (gsm8k, math500, "
        "humaneval, mbpp)",
        "ledger",
    )
    data: str | None = option(
        "the task's problems, as published: JSON lines (may be compressed) or a JSON list", None, is_path=True
    )
    harness: Literal["idlm", "lm_eval"] = option(
        "lm_eval runs a task of lm-eval on the file data=, with its own prompts and metrics (extra: eval)",
        "idlm",
    )
    fewshot_data: str | None = option(
        "harness=lm_eval: the file of the examples in a prompt; null is none, unless the task writes them",
        None,
        is_path=True,
    )
    num_fewshot: int | None = option(
        "harness=lm_eval: examples in a prompt, from fewshot_data=; null is the task's own number", None
    )
    allow_code: bool = option("run programs that the model writes, in a sandbox (humaneval, mbpp)", False)
    level: str = option("level of a generated task", "tiny")
    split: str = option("train, validation or test, of a generated task", "test")
    num: int | None = option("prompts; null: 200 of a generated task, all of a file", None)
    baseline: str | None = option(
        "decoder to compare with; auto is one token per step (ar, or block with strategy=sequential for a "
        "block-causal checkpoint), null is none",
        "auto",
    )
    compare: list[str] = option(
        "more decoders, each with options: NAME:OPTION:VALUE; a path is the checkpoint's base: how far "
        "conversion moved from it follows the table",
        [],
        is_path=True,
    )
    output: str | None = option(
        "JSON lines with every completion and whether it is correct", None, is_path=True
    )
    overwrite: bool = option("replace an existing output file", False)
    sampling: SamplingParams = field(default_factory=SamplingParams)
