"""Interfaces of a model: its spec, the part that a rank holds, the trunk's access to the KV cache, and
families.

A family maps `config.json` to a `ModelSpec` and names its tensors, in one file of `families/`. R rows fed
this pass, X rows whose logits are wanted, N query heads, K KV heads, H head dim, S KV slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from idlm.errors import UserError
from idlm.infer.state.page_pool import KVCache
from idlm.kernels.experts.types import Routing
from idlm.kernels.peer_sum import PeerBoxes, PeerMemory, peer_sum_rms_norm
from idlm.kernels.rms_norm import add_rms_norm
from idlm.registry import Registry
from idlm.semantics import Semantics

ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name in torch 2.13, and before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec(Routing):
    """Experts: feed-forward networks, of which a router chooses a few for each row. With a `capacity`, a pass
    must be fed all rows of a block, or none."""

    num_experts: int
    ffn_width: int
    """Hidden units of one expert; `ModelSpec.ffn_width` is that of the dense layers."""
    dense_layers: Collection[int] = ()
    """Indices of layers without experts."""
    layer_step: int = 1
    """Of the other layers, those whose number, counted from 1, is a multiple of it have experts."""
    has_bias: bool = False
    """Whether a bias per expert is added to its score for the choice, but not to its weight."""
    shared_ffn_width: int = 0
    """Hidden units of an expert that processes every row, without `scaling`; 0: there is none."""

    def is_in(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has experts."""
        return layer not in self.dense_layers and (layer + 1) % self.layer_step == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLayers:
    """Layers that rotate in another way than the rest of a model, or see a window."""

    numbers: Collection[int]
    """Counted from 0."""
    rope_inv_freq: tuple[float, ...]
    """As in `ModelSpec`; zeros rotate nothing."""
    rope_scaling: float = 1.0
    window: int | None = None
    """Positions that a row sees, its own the last; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Where the arithmetic of a family differs from Llama's."""

    is_qk_norm_whole: bool = False
    """Whether a norm spans all heads of queries, or of keys, rather than each head."""
    has_input_norms: bool = True
    """Norms before attention and before the feed-forward part."""
    has_output_norms: bool = False
    """Norms of what both add to the residual."""
    norm_offset: float | None = None
    """Norm weights are fp32, and this more than in the checkpoint; None: they have the model's dtype."""
    norm_groups: int = 1
    """Equal parts of a row that input norms and the final norm normalise each on its own."""
    embed_scale: float = 1.0
    """Factor of embeddings, rounded to the model's dtype."""
    residual_scale: float = 1.0
    """Factor of what attention and the feed-forward part add to the residual."""
    score_scale: float | None = None
    """Factor of scores of attention; None: head_dim ** -0.5."""
    logit_divisor: float = 1.0
    is_interleaved: bool = False
    """Whether a rotated dimension is paired with the next one, not with the one half of them further."""
    has_gelu: bool = False
    """Whether the feed-forward part has GELU (by tanh) in place of SiLU."""
    others: OtherLayers | None = None


USUAL = Variant()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """All that a trunk is built from. `vocab_size` counts embedding rows, padding rows included."""

    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_inv_freq: tuple[float, ...]
    """Radians per position, head_dim / 2 fp32 values; 0 for dimensions beyond `rotary_dim`."""
    rope_scaling: float
    """Factor on cos and sin (yarn); 1 otherwise."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    max_positions: int
    trained_length: int | None = None
    """Longer sequences run, with a warning; None: `max_positions`, beyond which nothing runs."""
    rotary_dim: int | None = None
    """Number of leading dimensions of a head that rotate; None: all."""
    moe: MoeSpec | None = None
    variant: Variant = USUAL

    @property
    def score_scale(self) -> float:
        """Factor of the products of queries and keys."""
        own = self.variant.score_scale
        return float(self.head_dim**-0.5) if own is None else own


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """This rank among `size` ranks that share a model. `group` connects devices and `control` hosts (None:
    default group).

    Attention heads, hidden units of each MLP and experts are divided (Megatron-LM, arXiv 1909.08053, section
    3), so a layer needs two sums; the head's vocabulary rows are divided too and its logits gathered. All
    ranks must sample from the same bits. A gather copies bits. Sums of few rows add in the order of ranks, in
    one launch over NVLink (`kernels/peer_sum`). Others are all-reduces by NCCL, or gloo on a CPU, which
    compute each element once, on one rank and in one order, and then copy it (rings and trees).
    `TensorParallelGroup.compare` checks this from time to time.

    `memory`: that of all GPUs, if they reach each other's; `boxes` in it are those of a model."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    memory: PeerMemory | None = None
    boxes: PeerBoxes | None = None

    def local(self, spec: ModelSpec) -> ModelSpec:
        """The spec of one rank's layers; `moe` stays that of the whole model, whose router every rank has.
        UserError IDLM-0423 if `size` does not divide heads, hidden units or experts."""
        divided = {name: getattr(spec, name) for name in ("num_heads", "num_kv_heads", "ffn_width")}
        sizes = dict(divided)
        if spec.moe is not None:
            sizes |= {name: getattr(spec.moe, name) for name in ("num_experts", "shared_ffn_width")}
        indivisible = [f"{name}={value}" for name, value in sizes.items() if value % self.size]
        if indivisible:
            raise UserError(
                "IDLM-0423",
                f"tensor_parallel={self.size} does not divide {', '.join(indivisible)} of the model",
                fix="choose a divisor of them all",
            )
        return replace(spec, **{name: value // self.size for name, value in divided.items()})

    def device(self, device: torch.device) -> torch.device:
        """The device of this rank: GPUs are numbered like ranks."""
        return device if self.size == 1 or device.type != "cuda" else torch.device("cuda", self.rank)

    def part(self, size: int) -> slice:
        """This rank's part of `size` items; the last ranks may have fewer."""
        each = -(-size // self.size)
        return slice(min(self.rank * each, size), min((self.rank + 1) * each, size))

    def linked(self, width: int, dtype: torch.dtype) -> Shards:
        """These shards with boxes for rows of `width`, if GPUs reach each other; waits for all ranks."""
        if self.memory is None:
            return self
        # Sums of an earlier model have ended: those of this GPU have got all that is sent to it.
        torch.cuda.synchronize()
        boxes = self.memory.boxes(width, dtype)
        self.minimum(0)
        return replace(self, boxes=boxes)

    def stop_waiting(self) -> None:
        """End what GPUs of this process wait for, when a rank is gone: sums are wrong from then on."""
        if self.memory is not None:
            self.memory.stop.fill_(1)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over ranks, with the same bits on each; in place if `partial` is contiguous."""
        if self.size > 1:
            partial = partial.contiguous()
            dist.all_reduce(partial, group=self.group)
        return partial

    def add_rms_norm(
        self, x_RD: Tensor, residual_RD: Tensor | None, weight_D: Tensor, *, eps: float, groups: int = 1
    ) -> tuple[Tensor, Tensor]:
        """`add_rms_norm` of the sum of `x_RD` over ranks; without a residual, of `x_RD`, which all hold."""
        if residual_RD is None or self.size == 1:
            return add_rms_norm(x_RD, residual_RD, weight_D, eps=eps, groups=groups)
        if groups == 1 and self.boxes is not None and self.boxes.holds(x_RD):
            return peer_sum_rms_norm(x_RD, residual_RD, weight_D, eps=eps, boxes=self.boxes)
        return add_rms_norm(self.sum(x_RD), residual_RD, weight_D, eps=eps, groups=groups)

    def gather(self, part_XV: Tensor, num_columns: int) -> Tensor:
        """The columns of all ranks [X, num_columns], where each holds those of `part(num_columns)`."""
        if self.size == 1:
            return part_XV
        each = -(-num_columns // self.size)
        if part_XV.shape[1] < each:
            part_XV = F.pad(part_XV, (0, each - part_XV.shape[1]))
        num_rows, parts = len(part_XV), part_XV.new_empty(self.size * len(part_XV), each)
        ALL_GATHER(parts, part_XV.contiguous(), group=self.group)
        return parts.view(self.size, num_rows, each).transpose(0, 1).reshape(num_rows, -1)[:, :num_columns]

    def minimum(self, number: int) -> int:
        """The minimum of `number` over the hosts of all ranks."""
        if self.size == 1:
            return number
        minimum = torch.tensor(number)
        dist.all_reduce(minimum, op=dist.ReduceOp.MIN, group=self.control)
        return int(minimum)


ALONE = Shards()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Tensor names in the checkpoint, by default those of Hugging Face decoders. `{}` is the layer index."""

    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    attention_norm: str = "model.layers.{}.input_layernorm.weight"
    q: str = "model.layers.{}.self_attn.q_proj"
    k: str = "model.layers.{}.self_attn.k_proj"
    v: str = "model.layers.{}.self_attn.v_proj"
    qkv: str | None = None
    """One module in place of q, k and v: all query heads, then all key heads, then all value heads."""
    k_scale: str = "model.layers.{}.self_attn.k_scale"
    v_scale: str = "model.layers.{}.self_attn.v_scale"
    o: str = "model.layers.{}.self_attn.o_proj"
    q_norm: str = "model.layers.{}.self_attn.q_norm.weight"
    k_norm: str = "model.layers.{}.self_attn.k_norm.weight"
    mlp_norm: str = "model.layers.{}.post_attention_layernorm.weight"
    attention_out_norm: str = "model.layers.{}.post_attention_layernorm.weight"
    mlp_out_norm: str = "model.layers.{}.post_feedforward_layernorm.weight"
    gate: str = "model.layers.{}.mlp.gate_proj"
    up: str = "model.layers.{}.mlp.up_proj"
    gate_up: str | None = None
    """One module in place of gate and up, in this order."""
    down: str = "model.layers.{}.mlp.down_proj"
    router: str = "model.layers.{}.mlp.gate.weight"
    router_bias: str = "model.layers.{}.mlp.gate.expert_bias"
    expert_gate: str = "model.layers.{}.mlp.experts.{}.gate_proj.weight"
    """The second `{}` is the index of the expert."""
    expert_up: str = "model.layers.{}.mlp.experts.{}.up_proj.weight"
    expert_down: str = "model.layers.{}.mlp.experts.{}.down_proj.weight"
    shared_gate: str = "model.layers.{}.mlp.shared_experts.gate_proj.weight"
    shared_up: str = "model.layers.{}.mlp.shared_experts.up_proj.weight"
    shared_down: str = "model.layers.{}.mlp.shared_experts.down_proj.weight"

    def kv_scales(self, num_layers: int) -> list[str]:
        """Names of the key scales of all layers, then of the value scales."""
        return [name.format(number) for name in (self.k_scale, self.v_scale) for number in range(num_layers)]


class KVAccess(Protocol):
    """Access of one step to the KV cache: where its rows are stored, and what they attend to."""

    @property
    def slot_mapping_R(self) -> Tensor:
        """Physical slot of each row [R]; -1 for padding, which is not stored and not read."""
        ...

    @property
    def cache(self) -> KVCache:
        """Where a layer writes the keys and values of its rows, at `slot_mapping_R`."""
        ...

    def select_rows(self, number: int, q_RNH: Tensor) -> Tensor | None:
        """Indices [I] of the rows that continue after the layer stored its keys and values; None: all. Rows,
        and `slot_mapping_R`, then mean those."""
        ...

    def attend(self, number: int, q_RNH: Tensor) -> Tensor: ...


class Family(ABC):
    """Base of all families; registered in `FAMILIES` under the checkpoint's architecture string."""

    tensor_names: ClassVar[TensorNames] = TensorNames()
    model_types: ClassVar[tuple[str, ...]] = ()
    """Allowed values of `model_type`; empty: it is not checked."""
    config_keys: ClassVar[Mapping[str, str]] = {}
    """Further known keys of config.json (`idlm.checkpoint`): `READ`, or why the family ignores them."""
    foreign_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of other models with the same architecture string, and the names of those models."""
    unknown_semantics: ClassVar[str | None] = None
    """Why the architecture string does not determine how a model decodes; None: it does."""
    causality: ClassVar[str] = "causal"
    """As in `Semantics`. A conversion may change a causal family; all others keep it and `logit_shift`."""
    logit_shift: ClassVar[bool] = True
    """Whether a row predicts the next token rather than the token at its own position."""
    mask_token_id: ClassVar[int | None] = None
    """Used if the config has no `mask_token_id`."""
    stop_token_ids: ClassVar[tuple[int, ...]] = ()

    @classmethod
    @abstractmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        """The spec of a config.json. Raises UserError IDLM-0604 with all unusable fields."""

    @classmethod
    def refined(cls, spec: ModelSpec, tensors: Collection[str]) -> ModelSpec:
        """The spec, corrected by the names of the checkpoint's tensors."""
        return spec

    @classmethod
    def block_size(cls, config: dict[str, Any]) -> int | None:
        """Tokens of a block; None if the model does not decode in blocks."""
        return None

    @classmethod
    def edit_token_ids(cls, config: dict[str, Any]) -> tuple[int, ...]:
        return ()

    @classmethod
    def semantics(cls, config: dict[str, Any]) -> Semantics:
        """How the model decodes by default; not called for a family with `unknown_semantics`."""
        given = config.get("mask_token_id")
        return Semantics(
            causality=cls.causality,
            logit_shift=cls.logit_shift,
            block_size=cls.block_size(config),
            mask_token_id=cls.mask_token_id if given is None else given,
            stop_token_ids=cls.stop_token_ids,
        )

    @classmethod
    def contradictions(cls, meaning: Semantics) -> list[str]:
        """Messages about settings in `meaning` that cannot be true of this family."""
        if cls.causality == "causal":
            return []
        return [
            f"{name}={getattr(meaning, name)!r}, but this architecture is trained with {getattr(cls, name)!r}"
            for name in ("causality", "logit_shift")
            if getattr(meaning, name) != getattr(cls, name)
        ]


FAMILIES: Registry[type[Family]] = Registry("family", "idlm.infer.models.families")
