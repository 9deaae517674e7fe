"""Loads what a run needs, base model, tokenizer and data, and checks that they fit together."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from idlm.errors import UserError
from idlm.lora import AdapterSpec, base_identity
from idlm.text.tokenizer import check_vocabulary, load_tokenizer, num_token_ids
from idlm.train.config.schema import TASK_TOKENIZER, TrainConfig
from idlm.train.data.dataset import PackedDataset
from idlm.train.data.prepare import make_objective, prepare_data
from idlm.train.distributed.deepspeed import gathering_forward, zero_stage
from idlm.train.model.attention import choose_attention
from idlm.train.model.checks import (
    check_model,
    grow_vocabulary,
    mask_token,
    num_vocabulary_rows,
    prepare_mask_row,
    window_problem,
)
from idlm.train.model.compile import compile_layers, compiles
from idlm.train.model.gated_lora import add_adapter, choose_mask
from idlm.train.model.load import create_base, load_base
from idlm.train.objectives.base import OBJECTIVES, Objective
from idlm.train.objectives.curriculum import Curriculum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything a run needs, checked and loaded."""

    model: PreTrainedModel
    tokenizer: Any
    mask_token_id: int | None
    objective: Objective
    dataset: PackedDataset
    curriculum: Curriculum
    attention: str
    held_out: PackedDataset | None = None
    adapter: AdapterSpec | None = None
    base_identity: str | None = None


def prepare(config: TrainConfig, *, world_size: int, device: torch.device) -> Prepared:
    """Load and check everything. Raises UserError where something is missing or does not fit."""
    is_16_bit = config.train.bf16 or config.model.dtype == "bfloat16"
    attention = choose_attention(config.model.attention, device, is_16_bit=is_16_bit)
    tokenizer = prepare_tokenizer(config)
    model = prepare_model(config, tokenizer, attention, device).to(device)
    mask_token_id, mask_row_D = prepare_mask(config, model, tokenizer)
    with gathering_forward(model):
        check_model(model, attention=attention)
    adapter = prepare_adapter(config, model, mask_row_D)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if compiles(config.model.compile, device, zero_stage=zero_stage(config.train)):
        compile_layers(model)
    check_vocabulary(tokenizer, num_vocabulary_rows(model))
    problem = window_problem(model.config, config.train.max_length)
    if problem is not None:
        raise UserError("IDLM-0509", problem, fix="lower train.max_length to the window")
    objective = make_objective(config, model, tokenizer, mask_token_id)
    data = prepare_data(config, tokenizer, objective, mask_token_id, world_size)
    return Prepared(
        model=model,
        tokenizer=tokenizer,
        mask_token_id=mask_token_id,
        objective=objective,
        dataset=data.dataset,
        curriculum=data.curriculum,
        held_out=data.held_out,
        attention=attention,
        adapter=adapter,
        base_identity=_identity_of_base(adapter),
    )


def prepare_tokenizer(config: TrainConfig) -> Any:
    """The tokenizer of the base, or `model.tokenizer`, where `task` is that of the tasks."""
    if config.model.tokenizer == TASK_TOKENIZER:
        from idlm.tasks.tokenizer import save_tokenizer

        with tempfile.TemporaryDirectory() as temporary:
            save_tokenizer(Path(temporary))
            return load_tokenizer(temporary)
    directory = Path(config.model.tokenizer or config.model.path or "")
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise UserError(
            "IDLM-0510",
            f"{directory} has no tokenizer files, and training data is text",
            fix="copy the tokenizer files into the checkpoint directory, or set model.tokenizer",
        )
    return tokenizer


def prepare_model(
    config: TrainConfig, tokenizer: Any, attention: str, device: torch.device
) -> PreTrainedModel:
    """The base: loaded from `model.path`, or new with a vocabulary that leaves a spare row for the mask
    token.
    """
    dtype = getattr(torch, config.model.dtype)
    if config.model.path is not None:
        return load_base(config.model.path, attention=attention, dtype=dtype)
    values = dict(config.model.config)
    num_rows = -(-(num_token_ids(tokenizer) + 1) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    values.setdefault("vocab_size", num_rows)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values.setdefault(name, getattr(tokenizer, name))
    return create_base(values, attention=attention, dtype=dtype, seed=config.train.seed, device=device)


def prepare_mask(
    config: TrainConfig, model: PreTrainedModel, tokenizer: Any
) -> tuple[int | None, torch.Tensor | None]:
    """The mask token's id, whose embedding row is usable afterwards; None for objectives without masks.

    Grows the vocabulary only when it has no spare row. An adapter does not change the base: where it needs an
    embedding for the mask token, its start [D] is returned.
    """
    if not OBJECTIVES.get(config.objective).places_masks:
        return None, None
    if config.adapter is not None:
        return choose_mask(model, tokenizer, config.model.mask_token_id)
    mask_token_id, has_row = mask_token(tokenizer, num_vocabulary_rows(model), config.model.mask_token_id)
    if not has_row:
        grow_vocabulary(model, mask_token_id)
    prepare_mask_row(model, mask_token_id)
    return mask_token_id, None


def prepare_adapter(
    config: TrainConfig, model: PreTrainedModel, mask_row_D: torch.Tensor | None
) -> AdapterSpec | None:
    """Freeze the base and add the adapter, if one is configured."""
    if config.adapter is None:
        return None
    spec = AdapterSpec(
        rank=config.adapter.rank,
        alpha=config.adapter.alpha,
        targets=tuple(config.adapter.targets),
        base_path=None if config.model.path is None else str(Path(config.model.path).resolve()),
    )
    add_adapter(model, spec, mask_row_D=mask_row_D, seed=config.train.seed)
    return spec


def _identity_of_base(adapter: AdapterSpec | None) -> str | None:
    if adapter is None or adapter.base_path is None:
        return None
    return base_identity(Path(adapter.base_path))
