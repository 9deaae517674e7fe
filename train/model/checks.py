"""Vocabulary rows of a base model, the row of its mask token, and checks that the model must pass.

Any causal language model of transformers is accepted. `check_model` runs a few tokens instead of trusting a
list of families: the model must follow our mask, attend as it does by itself, and return the output of its
head as its logits.

Shape letters: B packed rows, T rows of one packed row, D width, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from idlm.errors import UserError
from idlm.masks import RowMeta
from idlm.text.mask_token import resolve_mask_token_id, unused_token_ids
from idlm.text.tokenizer import num_token_ids
from idlm.train.distributed.deepspeed import gathered, whole_shape
from idlm.train.model.attention import mask_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
FIX = "use a causal model of transformers with standard attention layers and a plain output head"
ROW_MULTIPLE = 64
"""A vocabulary grows to a multiple of it: the head's products are slow at odd sizes."""
TOLERANCE, ROUGH_TOLERANCE = 1e-3, 0.1
"""Of the largest logit: in float32 on a CPU; where attention or its products round to 16 bits."""


def num_vocabulary_rows(model: PreTrainedModel) -> int:
    """Rows of the whole embedding, also where ZeRO-3 has partitioned it."""
    return whole_shape(model.get_input_embeddings().weight)[0]


def mask_token(tokenizer: Any, num_rows: int, explicit: int | None) -> tuple[int, bool]:
    """(mask token id, whether the embedding of `num_rows` rows has a row for it).

    The id is that of `resolve_mask_token_id`; without one, that of the first row to add. Raises UserError.
    """
    first_spare = num_token_ids(tokenizer)
    is_open = explicit is None and tokenizer.mask_token_id is None
    if is_open and first_spare >= num_rows and not unused_token_ids(tokenizer):
        return first_spare, False
    return resolve_mask_token_id(tokenizer, num_rows, explicit), True


def mask_token_text(tokenizer: Any, num_rows: int, explicit: int | None, *, has_adapter: bool) -> str:
    """Which token `mask_token` chooses for an embedding of `num_rows` rows, and why."""
    mask_token_id, has_row = mask_token(tokenizer, num_rows, explicit)
    text = f"mask token {mask_token_id}"
    if not has_row:
        added = _num_padded_rows(mask_token_id) - num_rows
        how = (
            "the adapter gets an embedding, which starts"
            if has_adapter
            else f"{added} rows are added, which start"
        )
        return f"{text}: no row is spare and no special token unused, so {how} at the mean"
    token = tokenizer.convert_ids_to_tokens(mask_token_id)
    if explicit is not None:
        return f"{text}: model.mask_token_id, {'a spare row' if token is None else repr(token)}"
    if mask_token_id == tokenizer.mask_token_id:
        return f"{text}: the tokenizer's mask token {token!r}"
    if token is None:
        return f"{text}: the first spare row after the tokenizer's ids"
    return (
        f"{text}: no row is spare, so the unused special token {token!r} becomes the mask; "
        "model.mask_token_id chooses another"
    )


def _num_padded_rows(mask_token_id: int) -> int:
    return -(-(mask_token_id + 1) // ROW_MULTIPLE) * ROW_MULTIPLE


def grow_vocabulary(model: PreTrainedModel, mask_token_id: int) -> None:
    """Add rows, to a multiple of 64, up to that of the mask token; they start at the mean embedding."""
    before = num_vocabulary_rows(model)
    model.resize_token_embeddings(_num_padded_rows(mask_token_id), mean_resizing=True)
    after = num_vocabulary_rows(model)
    log.info("no spare vocabulary row for mask id %d: grew %d rows to %d", mask_token_id, before, after)


def is_usable(row_D: Tensor) -> bool:
    """Whether an embedding is finite and not zero. Waits for the device."""
    return 0.0 < float(row_D.float().norm()) < float("inf")


@torch.no_grad()
def prepare_mask_row(model: PreTrainedModel, mask_token_id: int) -> bool:
    """Set the mask row to the mean embedding where it is zero or not finite; returns whether it did so."""
    rows_VD = model.get_input_embeddings().weight
    with gathered([rows_VD], writes=True):
        if is_usable(rows_VD[mask_token_id]):
            log.debug("mask row %d kept as the base has it", mask_token_id)
            return False
        rows_VD[mask_token_id] = mean_of_others(rows_VD, mask_token_id).to(rows_VD.dtype)
    log.info("mask row %d was zero or not finite: set to the mean embedding", mask_token_id)
    return True


def mean_of_others(rows_VD: Tensor, row: int) -> Tensor:
    """Mean [D], float32, of all rows but one."""
    others = torch.ones(len(rows_VD), dtype=torch.bool, device=rows_VD.device)
    if row < len(rows_VD):
        others[row] = False
    return rows_VD[others].float().mean(dim=0)


def window_problem(config: Any, row_positions: int) -> str | None:
    """Why a sliding-window model cannot train on positions up to `row_positions`; None if it can."""
    layer_types = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in layer_types or (window and not layer_types)
    if slides and window and row_positions > window:
        return f"max_length={row_positions} exceeds the model's sliding window of {window} tokens"
    return None


@torch.no_grad()
def check_model(model: PreTrainedModel, *, attention: str) -> None:
    """Refuse a model that ignores our mask, has attention of another kind or changes logits after its head.

    Compares a tiny packed forward pass with the model's own pass. Raises UserError IDLM-0505.
    """
    head, name = model.get_output_embeddings(), type(model).__name__
    if not isinstance(head, nn.Linear):
        raise UserError(
            "IDLM-0505",
            f"the output head of {name} is a {type(head).__name__}, not a linear layer",
            fix="use a causal model of transformers with a plain output head",
        )
    device = model.get_input_embeddings().weight.device
    generator, num_tokens = torch.Generator().manual_seed(0), 5
    ids_BT = torch.randint(0, min(64, num_vocabulary_rows(model)), (2, num_tokens), generator=generator)
    ids_BT = ids_BT.to(device)
    was_training = model.training
    model.eval()
    try:
        packed = _packed_logits(model, head, ids_BT, attention)
    # The exceptions that models raise on arguments they do not know have no common base class.
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            "IDLM-0505",
            f"{name} does not run under a prepared attention mask: {type(error).__name__}: {error}",
            fix=FIX,
        ) from error
    own = _own_logits(model, ids_BT)
    model.train(was_training)
    if not bool(own.isfinite().all()):
        raise UserError("IDLM-0505", f"the logits of {name} are not finite", fix="restore the base's weights")
    is_exact = model.dtype == torch.float32 and device.type == "cpu"
    gap, scale = float((packed - own).abs().max()), float(own.abs().max().clamp_min(1.0))
    if not gap <= scale * (TOLERANCE if is_exact else ROUGH_TOLERANCE):
        raise UserError(
            "IDLM-0505",
            f"{name} does not honour a prepared attention mask, has attention that idlm does not compute, or "
            f"changes its logits after the head (two packed documents differ by {gap:.3g} from the same "
            "documents alone under the model's own attention)",
            fix=FIX,
        )


def _packed_logits(model: PreTrainedModel, head: nn.Linear, ids_BT: Tensor, attention: str) -> Tensor:
    """Output of the head [B * T, V], float32, with all rows of `ids_BT` as documents of one packed row."""
    num_docs, num_tokens = ids_BT.shape
    positions = torch.arange(num_tokens, device=ids_BT.device).repeat(num_docs)[None]
    meta = RowMeta(
        doc_ids=torch.arange(num_docs, device=ids_BT.device).repeat_interleave(num_tokens)[None],
        positions=positions,
        block_starts=torch.zeros_like(positions),
        is_noisy=torch.zeros_like(positions, dtype=torch.bool),
    )
    outputs: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        model(
            input_ids=ids_BT.flatten()[None],
            position_ids=positions,
            use_cache=False,
            **mask_arguments(meta, attention),
        )
    finally:
        hook.remove()
    assert len(outputs) == 1, f"the head ran {len(outputs)} times in one forward pass"
    return outputs[0].flatten(0, 1).float()


def _own_logits(model: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Logits [B * T, V] of rows of plain causal text by the model's own attention."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits_BTV: Tensor = model(input_ids=ids_BT, use_cache=False).logits
    finally:
        model.set_attn_implementation(ours)
    return logits_BTV.flatten(0, 1).float()
