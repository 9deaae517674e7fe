"""LoRA while training. Gated (R-ISD), MASK rows of a batch get the low-rank update, and all other rows stay
bitwise those of the base. Not gated, all rows get it, and it is merged into the base in the end.

The batch marks which rows are MASK rows (`gate_index`); token ids do not decide it. In gated training they
run by themselves (`idlm.train.step.BodyAndHead`), so that no layer distinguishes rows. An adapted module is
an `nn.Linear` that owns the base's weight, A and B, so that wrappers that gather, shard or cast the weights
of a called module (DDP, ZeRO, autocast, compiled layers) covers all three.

Shape letters: B packed rows, T rows of one packed row, M MASK rows of the batch, D input width, E output
width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from idlm.errors import UserError
from idlm.lora import MASK_ROW, AdapterSpec, tensor_name
from idlm.train.distributed.deepspeed import gathered, num_elements
from idlm.train.model.checks import MaskToken, is_usable, mean_of_others

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Gate:
    """What the adapted modules of one model do now; `idlm.train.step.BodyAndHead` sets it.

    `is_gated`: clean and MASK rows run apart, and MASK rows alone through an open gate; otherwise all rows
    run together, the linear layers adapt all of them, and `rows_M`, flat indices into B*T, are the MASK rows,
    which the embedding needs."""

    def __init__(self, *, is_gated: bool = True) -> None:
        self.is_gated = is_gated
        self.is_open = not is_gated
        self.rows_M: Tensor | None = None


class AdaptedLinear(nn.Linear):
    """Replaces a linear layer and owns its weight; A and B are float32 for any dtype of the base."""

    def __init__(self, base: nn.Linear, gate: Gate, spec: AdapterSpec, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        bound = 1 / math.sqrt(self.in_features)
        a_rD = torch.empty(spec.rank, self.in_features).uniform_(-bound, bound, generator=generator)
        device = base.weight.device
        self.lora_A = nn.Parameter(a_rD.to(device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, spec.rank, device=device))
        self.scaling, self.gate = spec.scaling, gate

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., D] to [..., E]: all rows by the base if the gate is closed, all adapted if it is open."""
        if not self.gate.is_open:
            return functional.linear(x, self.weight, self.bias)
        return self.of_reduced(x, self.reduced(x, self.lora_A))

    def of_reduced(self, x: Tensor, low: Tensor) -> Tensor:
        return adapted(x, self.weight, self.bias, low, [self.lora_B], self.scaling)

    def reduced(self, x: Tensor, a_rD: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return functional.linear(x, a_rD)
        return functional.linear(x.to(a_rD.dtype), a_rD)


def adapted(
    x: Tensor, weight_ED: Tensor, bias_E: Tensor | None, low: Tensor, parts: list[Tensor], scaling: float
) -> Tensor:
    """`x` [..., D] by the base, [..., E], with the update of `low` [..., r]. `parts` [E, r]: the B of layers
    whose weights stand one below the other in `weight_ED`, and whose `low` stand one after the other."""
    dtype = low.dtype
    if torch.is_autocast_enabled(x.device.type) or x.dtype == dtype:
        bias_E = None if bias_E is None else bias_E.to(dtype)
        parts = [b_Er.to(dtype) for b_Er in parts]
        return _adapted(x.to(dtype), weight_ED.to(dtype), bias_E, low, parts, scaling)
    base, lows = functional.linear(x, weight_ED, bias_E), low.split([b.shape[1] for b in parts], dim=-1)
    updates = [functional.linear(*both) * scaling for both in zip(lows, parts, strict=True)]
    return base + torch.cat(updates, dim=-1).to(base.dtype)


@torch.library.custom_op("idlm::adapted_linear", mutates_args=())
def _adapted(
    x: Tensor, weight_ED: Tensor, bias_E: Tensor | None, low: Tensor, parts: Sequence[Tensor], scaling: float
) -> Tensor:
    """`adapted` in one dtype, as one operator: the update is added in place, where `torch.addmm` in a
    compiled layer would copy all outputs of the base first."""
    out = functional.linear(x, weight_ED, bias_E)
    for out_ME, low_Mr, b_Er in _by_part(out, low, parts):
        out_ME.addmm_(low_Mr, b_Er.t(), alpha=scaling)
    return out


def _by_part(out: Tensor, low: Tensor, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    sizes, ranks = zip(*(b_Er.shape for b_Er in parts), strict=True)
    outs, lows = out.flatten(0, -2).split(sizes, dim=-1), low.flatten(0, -2).split(ranks, dim=-1)
    return zip(outs, lows, parts, strict=True)


@_adapted.register_fake
def _adapted_shape(x: Tensor, weight_ED: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_ED.shape[0])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight_ED, _, low, parts, ctx.scaling = inputs
    ctx.save_for_backward(weight_ED, low, *parts)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    """Of `x`, `low` and B; the base is frozen."""
    weight_ED, low, *parts = ctx.saved_tensors
    by_part = list(_by_part(dout, low, parts))
    dlow_MR = torch.cat([dout_ME @ b_Er for dout_ME, _, b_Er in by_part], dim=-1) * ctx.scaling
    dparts = [dout_ME.t() @ low_Mr * ctx.scaling for dout_ME, low_Mr, _ in by_part]
    return dout @ weight_ED, None, None, dlow_MR.view(low.shape), dparts, None


torch.library.register_autograd("idlm::adapted_linear", _gradients, setup_context=_save_for_backward)


class GatedEmbedding(nn.Embedding):
    """An embedding that gives all MASK rows one trained vector, whatever their id, even one outside the
    table. The table stays the base's: where it is tied to the head, a changed row would change the logits of
    clean rows."""

    def __init__(self, base: nn.Embedding, gate: Gate, mask_row_D: Tensor) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = base.num_embeddings, base.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = base.padding_idx, None, base.norm_type
        self.scale_grad_by_freq, self.sparse = False, False
        self.weight = base.weight
        self.mask_row = nn.Parameter(mask_row_D.to(device=base.weight.device, dtype=torch.float32))
        self.gate = gate

    def forward(self, input: Tensor) -> Tensor:
        if self.gate.is_gated and self.gate.is_open:
            return self.mask_row.to(self.weight.dtype).expand(*input.shape, -1)
        rows_M = self.gate.rows_M
        if rows_M is None:
            return functional.embedding(input, self.weight, self.padding_idx)
        ids = input.flatten().index_fill(0, rows_M, 0)
        x = functional.embedding(ids, self.weight, self.padding_idx)
        mask_MD = self.mask_row.to(x.dtype).expand(len(rows_M), -1)
        return x.index_copy(0, rows_M, mask_MD).view(*input.shape, -1)


def add_adapter(
    model: PreTrainedModel,
    spec: AdapterSpec,
    *,
    mask_row_D: Tensor | None = None,
    seed: int = 0,
    is_gated: bool = True,
) -> Gate:
    """Freeze `model` and adapt the linear layers named in `spec.targets`, in place, for MASK rows alone or,
    without `is_gated`, for all rows.

    A is drawn as PEFT draws it (Kaiming uniform) from `seed`, the same on every device; B is zero.
    `mask_row_D`: start of a trained input embedding for MASK rows, None where the base's own row serves.
    Raises UserError IDLM-0530."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    known = sorted({name.rpartition(".")[2] for name in linears})
    unknown = sorted(set(spec.targets) - set(known))
    if unknown:
        raise UserError(
            "IDLM-0530",
            f"adapter.targets: {type(model).__name__} has no linear layer named {', '.join(unknown)}",
            fix=f"choose from {', '.join(known)}",
        )
    gate, generator = Gate(is_gated=is_gated), torch.Generator().manual_seed(seed)
    for name, linear in linears.items():
        if name.rpartition(".")[2] in spec.targets:
            model.set_submodule(name, AdaptedLinear(linear, gate, spec, generator))
    if mask_row_D is not None:
        embedding = model.get_input_embeddings()
        fix = "set model.mask_token_id to an unused token whose embedding is not zero"
        if not is_gated and head is not None and head.weight is embedding.weight:
            raise UserError(
                "IDLM-0530",
                "the base has no usable row for the mask token, and a trained one, merged into the input "
                "embedding, would change the output head, which is tied to it",
                fix=fix,
            )
        if type(embedding) is not nn.Embedding:
            raise UserError(
                "IDLM-0530",
                f"the base has no usable row for the mask token, and its {type(embedding).__name__} cannot "
                "take a trained one",
                fix=fix,
            )
        model.set_input_embeddings(GatedEmbedding(embedding, gate, mask_row_D))
    model.register_load_state_dict_post_hook(_expect_trained_only)
    model.mask_gate = gate
    return gate


def gate_of(model: nn.Module) -> Gate | None:
    gate: Gate | None = getattr(model, "mask_gate", None)
    return gate


@torch.no_grad()
def trained_row(model: PreTrainedModel, mask: MaskToken) -> Tensor | None:
    """The start of an embedding [D] that an adapter trains for the mask, at the mean, where the row of the
    base is missing, zero or not finite; else None. `model` stays as it is."""
    rows_VD = model.get_input_embeddings().weight
    with gathered([rows_VD]):
        if mask.has_row and is_usable(rows_VD[mask.token_id]):
            return None
        return mean_of_others(rows_VD, mask.token_id)


def is_trained(name: str) -> bool:
    """Whether a weight of an adapted model, by its name in `state_dict`, belongs to the adapter."""
    return name.rpartition(".")[2] in ("lora_A", "lora_B", "mask_row")


def num_base_parameters(module: nn.Module) -> int:
    return sum(num_elements(value) for name, value in module.named_parameters() if not is_trained(name))


def peft_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's weights under the names that PEFT gives them, and `MASK_ROW` where one is trained."""
    tensors = {}
    for name, value in weights.items():
        module, _, kind = name.rpartition(".")
        if is_trained(name):
            target = MASK_ROW if kind == "mask_row" else tensor_name(module, kind.removeprefix("lora_"))
            tensors[target] = value.detach().cpu().contiguous()
    return tensors


def merged(weights: dict[str, Tensor], *, scaling: float, mask_token_id: int | None) -> dict[str, Tensor]:
    """The weights of a model whose adapter is not gated, with W + scaling * B A in place of W and the trained
    row of MASK rows in the embedding. Changed weights are copies on the host; the sum is rounded once, to the
    base's dtype."""
    changed: dict[int, Tensor] = {}
    for name, b_Er in weights.items():
        module, _, kind = name.rpartition(".")
        base = weights.get(f"{module}.weight")
        if base is None or kind not in ("lora_B", "mask_row"):
            continue
        if kind == "lora_B":
            a_rD = weights[f"{module}.lora_A"]
            new = base.float() + scaling * (b_Er.float() @ a_rD.float())
        else:
            new = base.clone()
            new[mask_token_id] = b_Er.to(base.dtype)
        changed[base.data_ptr()] = new.to("cpu", base.dtype)
    # Names of tied weights share one tensor, also afterwards.
    kept = {name: value for name, value in weights.items() if not is_trained(name)}
    return {name: changed.get(value.data_ptr(), value) for name, value in kept.items()}


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The trained weights, without the frozen base: `model.safetensors` of a training checkpoint."""
    return {name: value for name, value in model.state_dict().items() if is_trained(name)}


def save_trained(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {name: value.cpu().contiguous() for name, value in tensors.items()}, path, metadata={"format": "pt"}
    )


def _expect_trained_only(model: nn.Module, incompatible: Any) -> None:
    """Do not report frozen weights as missing: checkpoints of an adapter hold none."""
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if is_trained(name)]
