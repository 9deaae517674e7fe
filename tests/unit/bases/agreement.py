"""What a run and its dry run answer to one configuration."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.tasks.tokenizer import save_tokenizer
from idlm.train.check import check_config
from idlm.train.config.schema import TrainConfig, with_accumulation
from idlm.train.planning import step_time
from idlm.train.planning.dry_run import dry_run
from idlm.train.planning.step_time import HostRates
from idlm.train.prepare import prepare

Change = Callable[[Path], None]
SIZES = {
    "vocab_size": 192, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip


def small_config(family: str, **fields: Any) -> Any:
    """A configuration of a few thousand weights."""
    with_heads = {"head_dim": 16} if "head_dim" in AutoConfig.for_model(family).to_dict() else {}
    return AutoConfig.for_model(family, **{**SIZES, **with_heads, **fields})


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """What changes the tensors of a base in its file."""

    def apply(base: Path) -> None:
        tensors = load_file(base / "model.safetensors")
        change(tensors)
        (base / "model.safetensors").unlink()
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})

    return apply


def write_base(directory: Path, family: str = "qwen3", **fields: Any) -> Path:
    """A random base with the tokenizer of the tasks."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(small_config(family, **fields)).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def with_keys(**values: Any) -> Change:
    def apply(base: Path) -> None:
        path = base / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


def config_of(base: Path, output: Path, **changes: object) -> TrainConfig:
    """A run of one step on a CPU."""
    data = output.parent / "data.jsonl"
    if not data.exists():
        records = [{"prompt": f"Sam has {n}", "response": f"{n} and {n}"} for n in range(8)]
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {
        "model.path": base,
        "data.path": data,
        "output_dir": output,
        "train.device": "cpu",
        "train.max_length": 256,
        "train.stages": "[{stride: 2, steps: 1}]",
        "report.enabled": "false",
    } | changes
    return compose("train", TrainConfig, [f"{key}={value}" for key, value in values.items()])


def of_the_run(config: TrainConfig) -> UserError | None:
    """What ends the run before its first step; other exceptions pass."""
    try:
        check_config(config)
        prepare(with_accumulation(config, world_size=1), world_size=1, device=torch.device("cpu"))
    except UserError as error:
        return error
    return None


def of_the_dry_run(config: TrainConfig) -> tuple[str | None, str]:
    """(the problems that it ends with, or None; what it prints)."""
    out = io.StringIO()
    rates = HostRates(layers=1e9, head=1e9, gradients=1e9, optimizer=1e9, how="")
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Measuring takes longer than all the rest, and refuses nothing.
            patch.setattr(step_time, "measure", lambda *_: rates)
            dry_run(config, console=Console(file=out, width=200))
    except UserError as error:
        return error.message, out.getvalue()
    return None, out.getvalue()
