"""The transformer trunk of all families, over packed ragged rows with the ops of `kernels/`. Its layers are
dense; `moe.py` has layers with experts.

It has no cache, no mask and no batch axis, and never waits for the device. Rounding follows transformers step
by step (norms in fp32, then cast), so that bf16 logits agree as well.
R rows fed this pass, X rows whose logits are wanted, N query heads, K KV heads, J fused heads (N + 2K), H
head dim, D width, F ffn, V vocabulary, E output width of a projection, L adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idlm.infer.models.base import ALONE, KVAccess, ModelSpec, Shards, TensorNames
from idlm.infer.models.low_rank import LowRank
from idlm.infer.models.weights import WeightTarget, head_order, row_orders, row_target, target_of
from idlm.kernels.gated_lora import Gate, GatedLora, gate_of, group_rows, num_adapters_of
from idlm.kernels.linear import Fp8Weight, Linears
from idlm.kernels.masked_logits import has_fused
from idlm.kernels.qkv_rope_cache import Rope, make_rope, qkv_rope_cache
from idlm.kernels.rms_norm import add_rms_norm
from idlm.kernels.row_compaction import gather_rows

SUMMED = ("o", "down")
"""Projections whose input is divided among ranks: each computes a summand, which the next norm adds up."""
MakeWeight = Callable[..., nn.Parameter]
"""`empty_weight` of one device and dtype."""
Projection = tuple[tuple[str, ...], tuple[int, ...], Tensor, Tensor | None]
"""Of a fused projection: its modules in the checkpoint, or the one that has all its parts, the output widths
of its parts, weight and bias."""


class Layer(nn.Module, ABC):
    """Attention and both norms of a layer; a subclass adds the feed-forward part. Query, key and value rows
    are stacked in `qkv`."""

    def __init__(self, spec: ModelSpec, shards: Shards, empty: MakeWeight) -> None:
        super().__init__()
        self.shards, spec = shards, shards.local(spec)
        fused_heads, o_width = spec.num_heads + 2 * spec.num_kv_heads, spec.num_heads * spec.head_dim
        norm = partial(empty, dtype=norm_dtype(spec, empty))
        self.attention_norm = norm(spec.width) if spec.variant.has_input_norms else None
        self.qkv = empty(fused_heads * spec.head_dim, spec.width)
        self.qkv_bias = empty(fused_heads * spec.head_dim) if spec.qkv_bias else None
        # One row per head (equal within queries and within keys), so that one call normalises both.
        is_whole, num_normed = spec.variant.is_qk_norm_whole, spec.num_heads + spec.num_kv_heads
        self.qk_norm = norm(num_normed, spec.head_dim) if spec.qk_norm and not is_whole else None
        self.whole_qk_norm = norm(num_normed * spec.head_dim) if spec.qk_norm and is_whole else None
        self.o = empty(spec.width, o_width)
        self.o_bias = empty(spec.width) if spec.o_bias else None
        self.attention_out_norm = norm(spec.width) if spec.variant.has_output_norms else None
        self.mlp_norm = norm(spec.width) if spec.variant.has_input_norms else None
        self.mlp_out_norm = norm(spec.width) if spec.variant.has_output_norms else None
        self.lora: nn.ModuleDict | None = None
        self.spec = spec

    def projections(self, names: TensorNames) -> dict[str, Projection]:
        spec = self.spec
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        modules = (names.q, names.k, names.v) if names.qkv is None else (names.qkv,)
        return {
            "qkv": (modules, (q_rows, kv_rows, kv_rows), self.qkv, self.qkv_bias),
            "o": ((names.o,), (spec.width,), self.o, self.o_bias),
        }

    def further_targets(self, number: int, names: TensorNames) -> dict[str, WeightTarget]:
        """Targets of tensors other than projections and norms."""
        return {}

    @abstractmethod
    def feed_forward(self, normed_RD: Tensor, rows: Rows, slot_mapping_R: Tensor) -> Tensor:
        """This rank's summand of the output [R, D]; padding rows (negative slot) need only be finite."""

    def project(self, name: str, x_RD: Tensor, gate: Gate | None, linears: Linears) -> Tensor:
        """Projection `name` of all rows [R, E], of `o` and `down` this rank's summand (the first rank's has
        the bias); an adapter changes the rows of the gate only."""
        weight_ED, bias_E, lora = self.operands(name, gate)
        own_bias_E = None if name in SUMMED and self.shards.rank else bias_E
        return linears.linear(x_RD, weight_ED, bias_E=own_bias_E, lora=lora)

    def operands(
        self, name: str, gate: Gate | None
    ) -> tuple[Tensor | Fp8Weight, Tensor | None, GatedLora | None]:
        """Weight, bias and adapter of a projection; None for an adapter that is absent or without a gate."""
        if self.lora is None or gate is None:
            return getattr(self, name), getattr(self, f"{name}_bias"), None
        low = self.lora[name]
        assert isinstance(low, LowRank), f"{type(low)=}"
        lora = low.gated(gate)
        if lora.a_XD is not None:
            return getattr(self, name), getattr(self, f"{name}_bias"), lora
        return low.stacked, low.bias, lora

    def forward(
        self,
        x_RD: Tensor,
        residual_RD: Tensor | None,
        number: int,
        rows: Rows,
        kv: KVAccess,
        wanted_X: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Rows]:
        """This rank's summand of the output (all of it after an output norm), the residual to add the output
        to, and the remaining rows. `x_RD` is such a summand if there is a residual. `wanted_X`: the rows that
        remain after attention; None: all."""
        spec = self.spec
        normed_RD, residual_RD = add_and_norm(x_RD, residual_RD, self.attention_norm, spec, self.shards)
        qkv_RE = self.project("qkv", normed_RD, rows.gate, rows.linears)
        if self.whole_qk_norm is not None:
            self._norm_whole(qkv_RE, self.whole_qk_norm)
        (keys, values), (k_scale_K, v_scale_K) = kv.cache.layer(number), kv.cache.layer_scales(number)
        q_RNH = qkv_rope_cache(
            qkv_RE.view(len(x_RD), -1, spec.head_dim),
            keys,
            values,
            rope=rows.rope_of(number),
            slot_mapping_R=kv.slot_mapping_R,
            qk_norm_YH=self.qk_norm,
            norm_eps=spec.norm_eps,
            k_scale_K=k_scale_K,
            v_scale_K=v_scale_K,
        )
        retained_I = kv.select_rows(number, q_RNH)
        if retained_I is not None:
            q_RNH, residual_RD, rows = rows.select_plan_rows(retained_I, q_RNH, residual_RD)
        o_RE, slot_mapping_R = kv.attend(number, q_RNH).reshape(len(q_RNH), -1), kv.slot_mapping_R
        if wanted_X is not None:
            o_RE, residual_RD, rows = rows.select_wanted_rows(wanted_X, o_RE, residual_RD)
            slot_mapping_R = slot_mapping_R[wanted_X]
        x_RD = self._output(self.project("o", o_RE, rows.gate, rows.linears), self.attention_out_norm)
        normed_RD, residual_RD = add_and_norm(x_RD, residual_RD, self.mlp_norm, spec, self.shards)
        x_RD = self._output(self.feed_forward(normed_RD, rows, slot_mapping_R), self.mlp_out_norm)
        return x_RD, residual_RD, rows

    def _output(self, x_RD: Tensor, norm_D: Tensor | None) -> Tensor:
        """What is added to the residual, of this rank's summand."""
        if self.spec.variant.residual_scale != 1.0:
            x_RD = x_RD * self.spec.variant.residual_scale
        if norm_D is None:
            return x_RD
        x_RD = self.shards.sum(x_RD)
        return add_rms_norm(x_RD, None, norm_D, eps=self.spec.norm_eps, out_RD=x_RD)[0]

    def _norm_whole(self, qkv_RE: Tensor, weight_E: Tensor) -> None:
        """Normalise queries and keys IN PLACE, each over the heads of all ranks."""
        spec, size = self.spec, self.shards.size
        sizes = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads)]
        parts, weights = qkv_RE[:, : sum(sizes)].split(sizes, dim=1), weight_E.split(sizes)
        if size == 1:
            for x_RE, own_E in zip(parts, weights, strict=True):
                add_rms_norm(x_RE, None, own_E, eps=spec.norm_eps, out_RD=x_RE)
            return
        sums_R2 = self.shards.sum(torch.stack([x_RE.float().square().sum(1) for x_RE in parts], dim=1))
        for x_RE, own_E, sum_R in zip(parts, weights, sums_R2.unbind(1), strict=True):
            factor_R1 = (sum_R / (size * x_RE.shape[1]) + spec.norm_eps).rsqrt()[:, None]
            x_RE.copy_((x_RE.float() * factor_R1).to(own_E.dtype) * own_E)


class DenseLayer(Layer):
    """A layer with a SwiGLU, or a GeGLU; gate and up rows are stacked in `gate_up`. `fp8.quantise` replaces
    each of the four matrices by an `Fp8Weight`."""

    def __init__(self, spec: ModelSpec, shards: Shards, empty: MakeWeight) -> None:
        super().__init__(spec, shards, empty)
        spec = self.spec
        self.gate_up = empty(2 * spec.ffn_width, spec.width)
        self.gate_up_bias = empty(2 * spec.ffn_width) if spec.mlp_bias else None
        self.down = empty(spec.width, spec.ffn_width)
        self.down_bias = empty(spec.width) if spec.mlp_bias else None

    def projections(self, names: TensorNames) -> dict[str, Projection]:
        ffn = self.spec.ffn_width
        modules = (names.gate, names.up) if names.gate_up is None else (names.gate_up,)
        return super().projections(names) | {
            "gate_up": (modules, (ffn, ffn), self.gate_up, self.gate_up_bias),
            "down": ((names.down,), (self.spec.width,), self.down, self.down_bias),
        }

    def feed_forward(self, normed_RD: Tensor, rows: Rows, slot_mapping_R: Tensor) -> Tensor:
        if self.spec.variant.has_gelu:
            gate_RF, up_RF = self.project("gate_up", normed_RD, rows.gate, rows.linears).chunk(2, dim=-1)
            hidden_RF = F.gelu(gate_RF, approximate="tanh") * up_RF
            return self.project("down", hidden_RF, rows.gate, rows.linears)
        weight_ED, bias_E, lora = self.operands("gate_up", rows.gate)
        hidden_RF = rows.linears.swiglu(normed_RD, weight_ED, bias_E=bias_E, lora=lora)
        return self.project("down", hidden_RF, rows.gate, rows.linears)


def norm_dtype(spec: ModelSpec, empty: MakeWeight) -> torch.dtype:
    """The dtype of norm weights in a model of the dtype that `empty` makes."""
    dtype = empty(0).dtype
    return dtype if spec.variant.norm_offset is None else torch.promote_types(dtype, torch.float32)


def add_and_norm(
    x_RD: Tensor, residual_RD: Tensor | None, norm_D: Tensor | None, spec: ModelSpec, shards: Shards
) -> tuple[Tensor, Tensor]:
    """The input of the next part, without a norm the sum itself, and the sum with the residual."""
    if norm_D is None:
        sum_RD = x_RD if residual_RD is None else residual_RD.add_(x_RD)
        return sum_RD, sum_RD
    add = add_rms_norm if spec.variant.has_output_norms else shards.add_rms_norm
    return add(x_RD, residual_RD, norm_D, eps=spec.norm_eps, groups=spec.variant.norm_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Inputs shared by all layers of a step. `gate`: rows that adapters apply to; None: no row."""

    ropes: tuple[Rope, ...]
    gate: Gate | None
    linears: Linears
    others: Collection[int] = ()
    """Numbers of the layers that rotate by the second of `ropes`."""

    def rope_of(self, number: int) -> Rope:
        return self.ropes[number in self.others]

    def select_plan_rows(
        self, rows_I: Tensor, q_RNH: Tensor, residual_RD: Tensor
    ) -> tuple[Tensor, Tensor, Rows]:
        """Queries, residual and inputs of the rows `rows_I`, in one launch."""
        tables = [table for rope in self.ropes for table in rope.tables or ()]
        gates = () if self.gate is None else (gate_of(self.gate),)
        q_INH, residual_ID, positions_I, *others = gather_rows(
            rows_I, (q_RNH, residual_RD, self.ropes[0].positions_R, *tables, *gates)
        )
        gate = None if self.gate is None else group_rows(others.pop(), num_adapters_of(self.gate))
        pairs = zip(others[::2], others[1::2], strict=True) if tables else [None] * len(self.ropes)
        ropes = (
            replace(rope, positions_R=positions_I, tables=pair)
            for rope, pair in zip(self.ropes, pairs, strict=True)
        )
        return q_INH, residual_ID, replace(self, ropes=tuple(ropes), gate=gate)

    def select_wanted_rows(
        self, rows_X: Tensor, o_RE: Tensor, residual_RD: Tensor
    ) -> tuple[Tensor, Tensor, Rows]:
        """Output of attention, residual and inputs of the rows `rows_X`; nothing rotates them any more."""
        gate = self.gate
        if gate is not None:
            gate = group_rows(gate_of(gate)[rows_X], num_adapters_of(gate))
        return o_RE[rows_X], residual_RD[rows_X], replace(self, gate=gate)


class DenseTrunk(nn.Module):
    """Embedding, layers, final norm, head. Built empty: the loader fills `weight_targets`."""

    inv_freq: Tensor
    other_inv_freq: Tensor

    def __init__(
        self, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, shards: Shards = ALONE
    ) -> None:
        super().__init__()
        self.spec, self.shards = spec, shards
        empty = partial(empty_weight, device=device, dtype=dtype)
        self.embed = empty(spec.vocab_size, spec.width)
        self.layers = nn.ModuleList(self._layer(number, empty) for number in range(spec.num_layers))
        self.final_norm = empty(spec.width, dtype=norm_dtype(spec, empty))
        own_rows_VD = self.embed[shards.part(spec.vocab_size)]
        self.head = own_rows_VD if spec.tie_embeddings else empty(*own_rows_VD.shape)
        self.register_buffer("inv_freq", torch.tensor(spec.rope_inv_freq, device=device), persistent=False)
        others = spec.variant.others
        if others is not None:
            other_inv_freq = torch.tensor(others.rope_inv_freq, device=device)
            self.register_buffer("other_inv_freq", other_inv_freq, persistent=False)
        self.embed_scale = float(torch.tensor(spec.variant.embed_scale, dtype=dtype))
        self.linears = Linears()
        self.num_adapters = 0
        self.mask_rows_LD: nn.Parameter | None = None

    def _layer(self, number: int, empty: MakeWeight) -> Layer:
        return DenseLayer(self.spec, self.shards, empty)

    def forward(
        self,
        token_ids_R: Tensor,
        positions_R: Tensor,
        kv: KVAccess,
        gate_R: Tensor | None = None,
        wanted_X: Tensor | None = None,
    ) -> Tensor:
        """Return hidden_RD after the final norm, or hidden_XD of the rows `wanted_X`; ids and positions are
        int64 on the trunk's device. `gate_R`: the rows that adapters apply to (bool), or of several adapters
        that of `RowGroups`; None: none."""
        gate_R = gate_R if self.num_adapters else None
        gate = None if gate_R is None else group_rows(gate_R, self.num_adapters)
        others = () if self.spec.variant.others is None else self.spec.variant.others.numbers
        rows = Rows(ropes=self._ropes(positions_R), gate=gate, linears=self.linears, others=others)
        x_RD, residual_RD = self._embed(token_ids_R, gate_R), None
        for index, layer in enumerate(self.layers):
            # After the last attention no row reads another one.
            rest_X = wanted_X if index + 1 == len(self.layers) else None
            x_RD, residual_RD, rows = layer(x_RD, residual_RD, index, rows, kv, rest_X)
        return add_and_norm(x_RD, residual_RD, self.final_norm, self.spec, self.shards)[0]

    def logits(self, hidden_XD: Tensor) -> Tensor:
        logits_XV = self.shards.gather(self.linears.linear(hidden_XD, self.head), self.spec.vocab_size)
        divisor = self.spec.variant.logit_divisor
        return logits_XV if divisor == 1.0 else logits_XV / divisor

    @property
    def head_weight(self) -> Tensor | None:
        """The head [V, D] for the kernel that stores no logits. None where it does not apply: on a part of
        the head, on other devices, where no bit of a row may depend on how many rows there are,
        and where logits are divided."""
        is_whole, is_free = self.shards.size == 1, not self.linears.deterministic
        is_free = is_free and self.spec.variant.logit_divisor == 1.0
        return self.head if is_whole and is_free and has_fused(self.head.device) else None

    def _ropes(self, positions_R: Tensor) -> tuple[Rope, ...]:
        """The rotation of most layers, and that of others if there are some."""
        make, others = partial(make_rope, positions_R, dtype=self.embed.dtype), self.spec.variant.others
        own = make(self.inv_freq, scaling=self.spec.rope_scaling)
        return (own,) if others is None else (own, make(self.other_inv_freq, scaling=others.rope_scaling))

    def _embed(self, token_ids_R: Tensor, gate_R: Tensor | None) -> Tensor:
        x_RD = self._embeddings(token_ids_R, gate_R)
        return x_RD if self.embed_scale == 1.0 else x_RD * self.embed_scale

    def _embeddings(self, token_ids_R: Tensor, gate_R: Tensor | None) -> Tensor:
        # Indexing takes a quarter of the time of F.embedding for the few rows of a decoding step.
        if self.mask_rows_LD is None or gate_R is None:
            return self.embed[token_ids_R]
        # The id of MASK may lie outside the table.
        is_mask_R, mask_rows = gate_R.bool(), self.mask_rows_LD[0]
        x_RD = self.embed[token_ids_R.masked_fill(is_mask_R, 0)]
        if len(self.mask_rows_LD) > 1:
            mask_rows = self.mask_rows_LD[(gate_R.long() - 1).clamp(min=0)]
        return torch.where(is_mask_R[:, None], mask_rows, x_RD)


def empty_weight(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


def weight_targets(trunk: DenseTrunk, names: TensorNames) -> dict[str, WeightTarget]:
    """Targets of all tensors that the checkpoint must have, by name: views of parameters."""
    spec, shards = trunk.spec, trunk.shards
    targets = {names.embed: target_of(trunk.embed)}
    norms = {names.final_norm: target_of(trunk.final_norm)}
    if not spec.tie_embeddings:
        rows = shards.part(spec.vocab_size)
        targets[names.head] = WeightTarget(view=trunk.head, shape=tuple(trunk.embed.shape), part=(rows,))
    for number, layer in enumerate(trunk.layers):
        assert isinstance(layer, Layer)
        norms |= _norm_targets(layer, number, names)
        targets |= layer.further_targets(number, names)
        for fused, (modules, sizes, weight, bias) in layer.projections(names).items():
            stacks = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
            if fused in SUMMED:
                module = modules[0].format(number)
                targets[f"{module}.weight"] = target_of(weight, shards, 1)
                targets |= {} if bias is None else {f"{module}.bias": target_of(bias)}
                continue
            parts = sizes if len(modules) > 1 else (sum(sizes),)
            orders = row_orders(layer.spec, shards, fused, len(modules))
            for kind, stack in stacks.items():
                for module, view, order in zip(modules, stack.split(parts), orders, strict=True):
                    targets[f"{module.format(number)}.{kind}"] = row_target(view, order, shards)
    offset = spec.variant.norm_offset or 0.0
    return targets | {name: replace(target, offset=offset) for name, target in norms.items()}


def _norm_targets(layer: Layer, number: int, names: TensorNames) -> dict[str, WeightTarget]:
    spec = layer.spec
    rows = (
        (names.attention_norm, layer.attention_norm),
        (names.attention_out_norm, layer.attention_out_norm),
        (names.mlp_norm, layer.mlp_norm),
        (names.mlp_out_norm, layer.mlp_out_norm),
    )
    targets = {name.format(number): target_of(norm) for name, norm in rows if norm is not None}
    qk_names, heads = (names.q_norm, names.k_norm), (spec.num_heads, spec.num_kv_heads)
    if layer.qk_norm is not None:
        order = head_order(spec)
        for name, view in zip(qk_names, layer.qk_norm.split(heads), strict=True):
            targets[name.format(number)] = WeightTarget(view=view, shape=(spec.head_dim,), order=order)
    if layer.whole_qk_norm is not None:
        views = layer.whole_qk_norm.split([num * spec.head_dim for num in heads])
        for name, view in zip(qk_names, views, strict=True):
            targets[name.format(number)] = target_of(view, layer.shards)
    return targets
