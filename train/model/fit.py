"""Whether a base, a tokenizer and the settings of a run fit together, by shapes alone.

The run and the dry run call these functions, the latter with a model on the meta device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from idlm.errors import UserError
from idlm.text.tokenizer import check_vocabulary
from idlm.train.config.schema import TrainConfig
from idlm.train.distributed.deepspeed import zero_stage
from idlm.train.model.checks import check_positions, check_window
from idlm.train.model.load import compiles, decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def needed_attention(config: TrainConfig, attention: str) -> str:
    """The attention whose arguments a run needs: a gated adapter hands on more than a mask with any."""
    return "idlm_documents" if config.is_gated else attention


def check_fit(
    config: TrainConfig, model: PreTrainedModel, tokenizer: Any, device: torch.device, *, num_rows: int
) -> None:
    """Refuse a model, of `num_rows` embeddings in training, that does not fit the tokenizer and the settings;
    UserError IDLM-0213, 0509 and 0540. No values are read: the model may be on the meta device.
    """
    check_vocabulary(tokenizer, num_rows)
    check_window(model.config.get_text_config(), config.train.max_length)
    check_positions(model, config.train.max_length)
    if config.model.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise UserError(
            "IDLM-0540",
            f"model.gradient_checkpointing=true: {type(model).__name__} cannot recompute its layers",
            fix="set model.gradient_checkpointing=false",
        )
    if compiles(config.model.compile, device, zero_stage=zero_stage(config.train)):
        decoder_layers(model)


def require_row(config: TrainConfig, mask_token_id: int, num_rows: int) -> None:
    """UserError IDLM-0530 where an adapter is merged in the end and the embedding lacks the mask's row."""
    if config.adapter is not None and not config.is_gated and mask_token_id >= num_rows:
        raise UserError(
            "IDLM-0530",
            f"the base has no row for mask id {mask_token_id}, and an adapter that is merged adds none",
            fix="set model.mask_token_id to an unused token, or adapter.gated=true and export.merge=false",
        )
