"""The model under training: vocabulary and mask row, hidden states and head, and the checks it must
pass.

Any causal language model of transformers is taken as it is; `check_model` proves on a few tokens that it
obeys our mask, attends as it does by itself and that its logits are its head applied to its last hidden
states, instead of trusting a list of families.

Shape letters: B packed rows, T rows of one packed row, D width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from idlm.errors import UserError
from idlm.masks import RowMeta
from idlm.train.distributed.deepspeed import gathered, whole_shape
from idlm.train.model.attention import mask_arguments
from idlm.train.model.gated_lora import gate_of
from idlm.train.objectives.base import Batch, Head, Terms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
FIX = "use a causal model of transformers with standard attention layers and a plain output head"
TOLERANCE, ROUGH_TOLERANCE = 1e-3, 0.1
"""Of the largest logit: in float32 on a CPU; where attention rounds to 16 bits, or its products do."""


def num_vocabulary_rows(model: PreTrainedModel) -> int:
    """Rows of the embedding, wherever its values lie."""
    return whole_shape(model.get_input_embeddings().weight)[0]


def grow_vocabulary(model: PreTrainedModel, mask_token_id: int) -> bool:
    """Add rows (to a multiple of 64) when the mask id has none; returns whether it did."""
    num_rows = num_vocabulary_rows(model)
    if mask_token_id < num_rows:
        return False
    model.resize_token_embeddings(mask_token_id + 1, pad_to_multiple_of=64, mean_resizing=True)
    grown = num_vocabulary_rows(model)
    log.info("no spare vocabulary row for mask id %d: grew %d rows to %d", mask_token_id, num_rows, grown)
    return True


@torch.no_grad()
def prepare_mask_row(model: PreTrainedModel, mask_token_id: int) -> bool:
    """Give the mask row the mean embedding when it is zero or not finite; a usable row is kept. Returns if
    replaced.
    """
    rows_VD = model.get_input_embeddings().weight
    with gathered([rows_VD], writes=True):
        norm = rows_VD[mask_token_id].float().norm()
        if bool(torch.isfinite(norm)) and float(norm) > 0.0:
            log.info("mask row %d kept as the base has it (norm %.3g)", mask_token_id, float(norm))
            return False
        others = torch.ones(len(rows_VD), dtype=torch.bool, device=rows_VD.device)
        others[mask_token_id] = False
        rows_VD[mask_token_id] = rows_VD[others].float().mean(dim=0).to(rows_VD.dtype)
    log.info("mask row %d was unusable (norm %s): set to the mean embedding", mask_token_id, float(norm))
    return True


class BodyAndHead:
    """Runs a model so that a function of ours takes the place of its output head.

    The model's own `forward` is called, never a submodule, and the function runs inside the head module's
    forward: wrappers (DDP, DeepSpeed, PEFT, autocast) keep working, and whatever gathers the head's weight
    for its forward and backward passes, as ZeRO-3 does, gathers it for ours. The loss is what the head
    returns, so it reaches us as the model's `logits`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.gate = gate_of(model)

    def terms(
        self,
        model: nn.Module,
        batch: Batch,
        attention: str,
        compute: Callable[[Head, Tensor], Terms],
    ) -> Terms:
        """`compute(head, hidden_BTD)` of a collated batch, within one forward pass of `model`, which may be
        wrapped.
        """
        kept: list[Terms] = []

        def forward(hidden_BTD: Tensor) -> Tensor:
            head = Head(weight_VD=self.lm_head.weight, bias_V=self.lm_head.bias)
            kept.append(compute(head, hidden_BTD))
            loss = kept[0].loss
            return hidden_BTD.new_zeros(1, 1, 1) if loss is None else loss.reshape(1, 1, 1)

        logits = self._run(model, batch, attention, forward)
        assert len(kept) == 1, f"the head ran {len(kept)} times in one forward pass"
        return kept[0] if kept[0].loss is None else replace(kept[0], loss=logits.reshape(()))

    def hidden(self, model: nn.Module, batch: Batch, attention: str) -> Tensor:
        """Last hidden states [B, T, D], for whoever wants rows of logits instead of losses."""
        kept: list[Tensor] = []

        def forward(hidden_BTD: Tensor) -> Tensor:
            kept.append(hidden_BTD)
            return hidden_BTD[:, :0]

        self._run(model, batch, attention, forward)
        assert len(kept) == 1, f"the head ran {len(kept)} times in one forward pass"
        return kept[0]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] of chosen rows [M, D]."""
        return self.lm_head(hidden)

    def _run(
        self, model: nn.Module, batch: Batch, attention: str, forward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """What the model returns as logits when its head's forward is `forward`."""
        meta = RowMeta(
            doc_ids=batch["doc_ids"],
            positions=batch["position_ids"],
            block_starts=batch["block_starts"],
            is_noisy=batch["is_noisy"],
            reach=batch.get("reach"),
        )
        if self.gate is not None:
            self.gate.set(batch["gate_index"])
        own = vars(self.lm_head)
        # Wrappers may have put a forward of theirs on the module itself.
        before = own.get("forward")
        own["forward"] = forward
        try:
            return model(
                input_ids=batch["input_ids"],
                position_ids=batch["position_ids"],
                use_cache=False,
                **mask_arguments(meta, attention),
            ).logits
        finally:
            if before is None:
                del own["forward"]
            else:
                own["forward"] = before


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
    """Refuse a model that ignores our mask, has attention of another kind or changes logits after its head:
    a tiny packed pass is compared with what the model computes by itself.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(
            "IDLM-0505",
            f"the output head of {type(model).__name__} is a {type(head).__name__}, not a linear layer",
            fix="use a causal model of transformers with a plain output head",
        )
    device = model.get_input_embeddings().weight.device
    generator = torch.Generator().manual_seed(0)
    num_tokens = 5
    ids_BT = torch.randint(0, min(64, num_vocabulary_rows(model)), (1, 2 * num_tokens), generator=generator)
    ids_BT = ids_BT.to(device)
    order = torch.arange(num_tokens, device=device)
    batch = {
        "input_ids": ids_BT,
        "position_ids": torch.cat([order, order])[None],
        "doc_ids": torch.arange(2, device=device).repeat_interleave(num_tokens)[None],
        "block_starts": torch.zeros_like(ids_BT),
        "is_noisy": torch.zeros_like(ids_BT, dtype=torch.bool),
    }
    was_training = model.training
    model.eval()
    runner = BodyAndHead(model)
    name = type(model).__name__
    try:
        packed = runner.head(runner.hidden(model, batch, attention)[0]).float()
    # What a model makes of arguments that it does not know has no common base.
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            "IDLM-0505",
            f"{name} does not run under a prepared attention mask: {type(error).__name__}: {error}",
            fix=FIX,
        ) from error
    own = _own_logits(model, ids_BT.view(2, num_tokens))
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


def _own_logits(model: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Logits [B * T, V] of rows of plain causal text by the model's own attention."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits_BTV: Tensor = model(input_ids=ids_BT, use_cache=False).logits
    finally:
        model.set_attn_implementation(ours)
    return logits_BTV.flatten(0, 1).float()
