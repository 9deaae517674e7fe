"""The trunk with experts: in all layers but the dense ones, a router chooses a few experts for each row.

The arithmetic is in kernels/experts. Ranks divide the experts by index and the shared expert by hidden units,
so a layer needs one sum; every rank has the whole router and routes all rows.
D width, E experts of this rank, F ffn of an expert."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from idlm.errors import UserError
from idlm.infer.models.base import ModelSpec, MoeSpec, Shards, TensorNames
from idlm.infer.models.dense import DenseLayer, DenseTrunk, Layer, MakeWeight, Rows
from idlm.infer.models.weights import WeightTarget, target_of
from idlm.kernels.experts import experts, route
from idlm.kernels.linear import Linears


class Experts(nn.Module):
    """A router and its experts; gate and up rows of an expert are stacked. A router with sigmoid scores is
    stored in fp32, because its scores are close together."""

    def __init__(self, moe: MoeSpec, width: int, shards: Shards, empty: MakeWeight) -> None:
        super().__init__()
        self.moe, self.shards = moe, shards
        self.here = shards.part(moe.num_experts)
        router = empty(moe.num_experts, width)
        wide = torch.promote_types(router.dtype, torch.float32)
        is_sigmoid = moe.score == "sigmoid"
        self.router = empty(moe.num_experts, width, dtype=wide) if is_sigmoid else router
        self.router_bias = empty(moe.num_experts, dtype=wide) if moe.has_bias else None
        num = self.here.stop - self.here.start
        self.gate_up = empty(num, 2 * moe.ffn_width, width)
        self.down = empty(num, width, moe.ffn_width)
        shared = moe.shared_ffn_width // shards.size
        self.shared_gate_up = empty(2 * shared, width) if shared else None
        self.shared_down = empty(width, shared) if shared else None

    def forward(
        self,
        x_RD: Tensor,
        linears: Linears,
        slot_mapping_R: Tensor | None = None,
        positions_R: Tensor | None = None,
    ) -> Tensor:
        """This rank's summand of the weighted sum of the chosen experts' outputs plus the shared expert's, in
        fp32 and in order of experts. Rows with a negative slot are padding and reach no expert. A router with
        a capacity needs positions."""
        experts_RC, weights_RC = self.route(x_RD, linears, slot_mapping_R, positions_R)
        shared_RD = None
        if self.shared_gate_up is not None and self.shared_down is not None:
            shared_RD = linears.linear(linears.swiglu(x_RD, self.shared_gate_up), self.shared_down)
        out_RD: Tensor = experts(
            x_RD,
            self.gate_up,
            self.down,
            experts_RC,
            weights_RC,
            first=self.here.start,
            num_choices=self.moe.num_experts,
            shared_RD=shared_RD,
        )
        return out_RD

    def route(
        self,
        x_RD: Tensor,
        linears: Linears,
        slot_mapping_R: Tensor | None = None,
        positions_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The chosen experts of each row and their weights (fp32), both [R, C]."""
        logits_RE = linears.linear(x_RD.to(self.router.dtype), self.router)
        return route(
            logits_RE, self.moe, bias_X=self.router_bias, slots_R=slot_mapping_R, positions_R=positions_R
        )

    def targets(self, number: int, names: TensorNames) -> dict[str, WeightTarget]:
        found: dict[str, WeightTarget] = {names.router.format(number): target_of(self.router)}
        if self.router_bias is not None:
            found[names.router_bias.format(number)] = target_of(self.router_bias)
        for expert in range(self.here.start, self.here.stop):
            gate_up_FD, down_DF = (stack[expert - self.here.start] for stack in (self.gate_up, self.down))
            gate_FD, up_FD = gate_up_FD.chunk(2)
            found[names.expert_gate.format(number, expert)] = target_of(gate_FD)
            found[names.expert_up.format(number, expert)] = target_of(up_FD)
            found[names.expert_down.format(number, expert)] = target_of(down_DF)
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate_FD, up_FD = self.shared_gate_up.chunk(2)
            found[names.shared_gate.format(number)] = target_of(gate_FD, self.shards)
            found[names.shared_up.format(number)] = target_of(up_FD, self.shards)
            found[names.shared_down.format(number)] = target_of(self.shared_down, self.shards, axis=1)
        return found


class MoeLayer(Layer):
    def __init__(self, spec: ModelSpec, shards: Shards, empty: MakeWeight) -> None:
        super().__init__(spec, shards, empty)
        assert spec.moe is not None
        self.mlp = Experts(spec.moe, spec.width, shards, empty)

    def further_targets(self, number: int, names: TensorNames) -> dict[str, WeightTarget]:
        return self.mlp.targets(number, names)

    def feed_forward(self, normed_RD: Tensor, rows: Rows, slot_mapping_R: Tensor) -> Tensor:
        return self.mlp(normed_RD, rows.linears, slot_mapping_R, rows.ropes[0].positions_R)


class MoeTrunk(DenseTrunk):
    """`DenseTrunk` with experts in all layers but `spec.moe.dense_layers`."""

    def _layer(self, number: int, empty: MakeWeight) -> Layer:
        assert self.spec.moe is not None
        kind = MoeLayer if self.spec.moe.is_in(number) else DenseLayer
        return kind(self.spec, self.shards, empty)


def check_blocks(moe: MoeSpec, *, block_size: int | None = None, feeds_parts: bool = False) -> None:
    """Raise UserError IDLM-0617 for a decoder whose blocks are not those that experts are chosen by."""
    if moe.capacity is None:
        return
    if block_size not in (None, moe.block_size):
        refuse(f"block_size={block_size} where experts are chosen by blocks (allowed: {moe.block_size})")
    if feeds_parts:
        refuse("passes over parts of a block (decoder.dual_cache=true) where experts are chosen by blocks")


def refuse(problem: str) -> NoReturn:
    """Raise UserError IDLM-0617 for a setting that models with experts do not support."""
    raise UserError(
        "IDLM-0617",
        f"a model with experts does not support {problem}",
        fix="use the allowed setting named, or leave it out",
    )
