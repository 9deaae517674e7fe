"""The ops of a trunk's template as functions: each reads and writes the positions that the plan gives it. The
head is the end of a planned pass (`CanvasRows`, `BestRows`).

What else is allocated is bounded: attention runs on pieces of at most `PIECE_ROWS` query rows, and so
do the torch ops of a CPU. The arithmetic is that of `models/dense.py` and `models/moe.py`, so on a CPU bits
are equal to theirs. Keys and values come from products of their own: a fused product would hold them twice.
Shapes: R rows of the pass, m rows of a call, N query heads, K KV heads, H head dim, D width, E output width,
C chosen experts, P pairs of a row and an expert, X wanted rows, Y rows of a slice, V vocabulary, S forbidden
ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.infer.models.dense import DenseLayer, DenseTrunk, Layer
from idlm.infer.models.moe import Experts, MoeLayer
from idlm.infer.mosaic.arena import Arena
from idlm.infer.mosaic.canvas import PIECE_ROWS, PROPOSAL_BYTES, attend
from idlm.infer.mosaic.planner import ArenaPlan
from idlm.infer.mosaic.template import OpCall
from idlm.infer.state.batch import Propose, WantedRows
from idlm.kernels.experts import add_experts, expert_hidden, expert_outputs, route, sort_pairs
from idlm.kernels.linear import library_linear
from idlm.kernels.masked_logits import Proposals
from idlm.kernels.qkv_rope_cache import make_rope, rotate_heads
from idlm.kernels.rms_norm import add_rms_norm
from idlm.kernels.swiglu import swiglu


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasPass:
    """One pass: its plan in an arena of at least `plan.peak_bytes`, and the inputs of the template.

    `bounds`: rows bounds[b] : bounds[b + 1] are the canvas of sequence b; rows after the last are padding."""

    trunk: DenseTrunk
    plan: ArenaPlan
    arena: Arena
    token_ids_R: Tensor
    positions_R: Tensor
    rows_X: Tensor
    bounds: tuple[int, ...]

    def execute(self, step: OpCall, op: Callable[[CanvasPass, OpCall], None] | None = None) -> None:
        """Run one call of the template; `op` in place of the function of its name."""
        (op or OPS[step.op.name])(self, step)

    def whole(self, step: OpCall, name: str, *width: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of all rows, whatever rows the call has; [rows, *width]."""
        size, sizes = self.plan.template.tensors[name], self.plan.sizes
        num_rows = sizes.num_rows(size.rows) * size.repeat
        return self.arena.view(step.offsets[name], (num_rows, *width), dtype or self.trunk.embed.dtype)

    def rows(self, step: OpCall, name: str, *width: int, dtype: torch.dtype | None = None) -> Tensor:
        """The rows of a call in a tensor of all rows, or in one of chunk size; [m, *width]."""
        size = self.plan.template.tensors[name]
        if size.chunks is None:
            return self.whole(step, name, *width, dtype=dtype)[step.start : step.stop]
        num_rows = (step.stop - step.start) * size.repeat
        return self.arena.view(step.offsets[name], (num_rows, *width), dtype or self.trunk.embed.dtype)

    def layer(self, step: OpCall) -> Layer:
        layer = self.trunk.layers[step.layer]
        assert isinstance(layer, Layer)
        return layer

    def experts(self, step: OpCall) -> Experts:
        layer = self.trunk.layers[step.layer]
        assert isinstance(layer, MoeLayer)
        return layer.mlp


def pieces(num_rows: int) -> Iterator[slice]:
    """Slices of at most PIECE_ROWS rows."""
    return (slice(start, min(num_rows, start + PIECE_ROWS)) for start in range(0, num_rows, PIECE_ROWS))


def norm_rows(run: CanvasPass, x_mD: Tensor, weight_D: Tensor, out_mD: Tensor) -> None:
    """RMSNorm of rows, which may be in place."""
    for rows in pieces(len(x_mD)):
        add_rms_norm(x_mD[rows], None, weight_D, eps=run.trunk.spec.norm_eps, out_RD=out_mD[rows])


def _embed(run: CanvasPass, step: OpCall) -> None:
    x_RD = run.rows(step, "x", run.trunk.spec.width)
    torch.index_select(run.trunk.embed, 0, run.token_ids_R, out=x_RD)


def _norm(run: CanvasPass, step: OpCall) -> None:
    """The norm before attention or before the FFN."""
    [out], width, layer = step.op.writes, run.trunk.spec.width, run.layer(step)
    weight_D = layer.mlp_norm if step.op.name == "ffn_norm" else layer.attention_norm
    assert weight_D is not None
    norm_rows(run, run.rows(step, "x", width), weight_D, run.rows(step, out, width))


def _project(run: CanvasPass, step: OpCall) -> None:
    """The product of the normed rows and the heads of q, k or v in the fused projection, at its position.

    Then q and k are normed and rotated in place; cos and sin exist for a piece of rows only."""
    trunk, layer, (source, *_), [out] = run.trunk, run.layer(step), step.op.reads, step.op.writes
    spec, eps = trunk.spec, trunk.spec.norm_eps
    first = {"q": 0, "k": spec.num_heads, "v": spec.num_heads + spec.num_kv_heads}[out]
    end = first + (spec.num_heads if out == "q" else spec.num_kv_heads)
    heads = slice(first * spec.head_dim, end * spec.head_dim)
    out_mE = run.rows(step, out, heads.stop - heads.start)
    bias_E = None if layer.qkv_bias is None else layer.qkv_bias[heads]
    library_linear(run.rows(step, source, spec.width), layer.qkv[heads], bias_E=bias_E, out_RE=out_mE)
    if out == "v":
        return
    x_mYH = out_mE.view(len(out_mE), end - first, spec.head_dim)
    norm_YH = None if layer.qk_norm is None else layer.qk_norm[first:end]
    for rows in pieces(len(x_mYH)):
        positions_m = run.positions_R[step.start + rows.start : step.start + rows.stop]
        rope = make_rope(positions_m, trunk.inv_freq, scaling=spec.rope_scaling, dtype=x_mYH.dtype)
        rotate_heads(x_mYH[rows], rope=rope, norm_YH=norm_YH, norm_eps=eps)


def _attention(run: CanvasPass, step: OpCall) -> None:
    """Every row sees the whole canvas of its sequence, and no other."""
    spec = run.trunk.spec
    q_mNH, heads_mNH = (run.rows(step, name, spec.num_heads, spec.head_dim) for name in ("q", "heads"))
    k_RKH, v_RKH = (run.whole(step, name, spec.num_kv_heads, spec.head_dim) for name in ("k", "v"))
    for low, high in itertools.pairwise(run.bounds):
        start, stop = max(low, step.start), min(high, step.stop)
        if start < stop:
            mine, keys = slice(start - step.start, stop - step.start), slice(low, high)
            attend(q_mNH[mine], k_RKH[keys], v_RKH[keys], heads_mNH[mine], first=start - low)
    heads_mNH[max(0, run.bounds[-1] - step.start) :] = 0


def _o_proj(run: CanvasPass, step: OpCall) -> None:
    spec, layer = run.trunk.spec, run.layer(step)
    heads_mE = run.rows(step, "heads", spec.num_heads * spec.head_dim)
    out_mD = run.rows(step, "attention_out", spec.width)
    library_linear(heads_mE, layer.o, bias_E=layer.o_bias, out_RE=out_mD)


def _add(run: CanvasPass, step: OpCall) -> None:
    source, width = step.op.reads[0], run.trunk.spec.width
    run.rows(step, "x", width).add_(run.rows(step, source, width))


def _dense(run: CanvasPass, step: OpCall) -> tuple[DenseLayer, Tensor]:
    """The layer of a call and its gate and up rows [m, 2F]."""
    layer = run.layer(step)
    assert isinstance(layer, DenseLayer)
    return layer, run.rows(step, "gate_up", 2 * layer.spec.ffn_width)


def _gate_up(run: CanvasPass, step: OpCall) -> None:
    layer, gate_up_mE = _dense(run, step)
    normed_mD = run.rows(step, "ffn_in", run.trunk.spec.width)
    library_linear(normed_mD, layer.gate_up, bias_E=layer.gate_up_bias, out_RE=gate_up_mE)


def _activate(run: CanvasPass, step: OpCall) -> None:
    """The hidden row takes the place of its gate."""
    layer, gate_up_mE = _dense(run, step)
    for rows in pieces(len(gate_up_mE)):
        swiglu(gate_up_mE[rows], out_RF=gate_up_mE[rows, : layer.spec.ffn_width])


def _down(run: CanvasPass, step: OpCall) -> None:
    layer, gate_up_mE = _dense(run, step)
    hidden_mF, out_mD = gate_up_mE[:, : layer.spec.ffn_width], run.rows(step, "ffn_out", run.trunk.spec.width)
    library_linear(hidden_mF, layer.down, bias_E=layer.down_bias, out_RE=out_mD)


def _router(run: CanvasPass, step: OpCall) -> None:
    weight_ED = run.experts(step).router
    logits_mE = run.rows(step, "router_logits", len(weight_ED), dtype=weight_ED.dtype)
    x_mD = run.rows(step, "ffn_in", run.trunk.spec.width)
    for rows in pieces(len(x_mD)):
        library_linear(x_mD[rows].to(weight_ED.dtype), weight_ED, out_RE=logits_mE[rows])


def _ids(run: CanvasPass, step: OpCall) -> Tensor:
    return run.rows(step, "expert_ids", run.experts(step).moe.num_chosen, dtype=torch.int32)


def _weights(run: CanvasPass, step: OpCall) -> Tensor:
    return run.rows(step, "expert_weights", run.experts(step).moe.num_chosen, dtype=torch.float32)


def _choose_experts(run: CanvasPass, step: OpCall) -> None:
    experts, ids_mC, weights_mC = run.experts(step), _ids(run, step), _weights(run, step)
    logits_mE = run.rows(step, "router_logits", len(experts.router), dtype=experts.router.dtype)
    for rows in pieces(len(logits_mE)):
        ids_mC[rows], weights_mC[rows] = route(logits_mE[rows], experts.moe, bias_X=experts.router_bias)


def _sorted_pairs(run: CanvasPass, step: OpCall) -> tuple[Tensor, Tensor]:
    """Positions of the sorted pairs [P] and of their tiles, flat; both int32."""
    order_P = run.rows(step, "expert_order", dtype=torch.int32)
    num_bytes = run.plan.num_bytes["expert_tiles"]
    tiles = run.arena.view(step.offsets["expert_tiles"], (num_bytes // 4,), torch.int32)
    return order_P, tiles


def _sort_pairs(run: CanvasPass, step: OpCall) -> None:
    num_experts, dtype = run.experts(step).moe.num_experts, run.trunk.embed.dtype
    sort_pairs(_ids(run, step), *_sorted_pairs(run, step), num_experts=num_experts, dtype=dtype)


def _expert_hidden(run: CanvasPass, step: OpCall) -> None:
    experts, ids_mC = run.experts(step), _ids(run, step)
    x_mD = run.rows(step, "ffn_in", run.trunk.spec.width)
    out_PF = run.rows(step, "hidden", experts.moe.ffn_width)
    expert_hidden(x_mD, experts.gate_up, ids_mC, *_sorted_pairs(run, step), out_PF)


def _expert_outputs(run: CanvasPass, step: OpCall) -> None:
    experts, ids_mC = run.experts(step), _ids(run, step)
    hidden_PF = run.rows(step, "hidden", experts.moe.ffn_width)
    out_PD = run.rows(step, "expert_out", run.trunk.spec.width)
    expert_outputs(hidden_PF, experts.down, ids_mC, *_sorted_pairs(run, step), out_PD)


def _add_experts(run: CanvasPass, step: OpCall) -> None:
    width = run.trunk.spec.width
    y_PD, x_mD = run.rows(step, "expert_out", width), run.rows(step, "x", width)
    add_experts(y_PD, _ids(run, step), _weights(run, step), x_mD)


def _final_norm(run: CanvasPass, step: OpCall) -> None:
    """Norm all rows in place: the head that stores no logits gathers the wanted ones itself."""
    x_RD = run.whole(step, "x", run.trunk.spec.width)
    norm_rows(run, x_RD, run.trunk.final_norm, x_RD)


def _head_norm(run: CanvasPass, step: OpCall) -> None:
    """Gather the wanted rows, then norm them in place."""
    width = run.trunk.spec.width
    head_in_mD = run.rows(step, "head_in", width)
    rows_m = run.rows_X[step.start : step.stop]
    torch.index_select(run.whole(step, "x", width), 0, rows_m, out=head_in_mD)
    norm_rows(run, head_in_mD, run.trunk.final_norm, head_in_mD)


def _logits(run: CanvasPass, step: OpCall) -> None:
    spec = run.trunk.spec
    logits_mV = run.rows(step, "logits", spec.vocab_size)
    library_linear(run.rows(step, "head_in", spec.width), run.trunk.head, out_RE=logits_mV)


OPS: Mapping[str, Callable[[CanvasPass, OpCall], None]] = {
    "embed": _embed,
    "attention_norm": _norm,
    "q_proj": _project,
    "k_proj": _project,
    "v_proj": _project,
    "attention": _attention,
    "o_proj": _o_proj,
    "add": _add,
    "ffn_norm": _norm,
    "gate_up": _gate_up,
    "activate": _activate,
    "down": _down,
    "router": _router,
    "choose_experts": _choose_experts,
    "sort_pairs": _sort_pairs,
    "expert_hidden": _expert_hidden,
    "expert_outputs": _expert_outputs,
    "add_experts": _add_experts,
    "final_norm": _final_norm,
    "head_norm": _head_norm,
    "logits": _logits,
}
"""By name of op; the ops of `canvas_rows.py` are missing: `choose_tokens`, which is the decoder's, and
`masked_logits`."""


LOGITS, CHOICE = "logits", "choose_tokens"


class CanvasRows(WantedRows):
    """`hidden_RD` is the residual stream in the workspace, valid until the next pass; `head` norms it first.
    `steps`: the calls of the head, from which `proposals` gets its chunks."""

    def __init__(self, run: CanvasPass, steps: Sequence[OpCall], *, group: int = 1) -> None:
        first = steps[0]
        super().__init__(run.whole(first, "x", run.trunk.spec.width), run.rows_X, self._head, group=group)
        self._run, self._steps = run, steps

    def _head(self, hidden_YD: Tensor) -> Tensor:
        """Logits [Y, V] of any hidden states, outside of the workspace."""
        normed_YD = torch.empty_like(hidden_YD)
        norm_rows(self._run, hidden_YD, self._run.trunk.final_norm, normed_YD)
        return self._run.trunk.logits(normed_YD)

    @torch.inference_mode()
    def proposals(self, propose: Propose, *, row_bytes: int = 0) -> tuple[Tensor, ...]:
        """Apply `propose` to consecutive slices, as the base does: to parts of the planned chunks for which
        `propose` allocates at most PROPOSAL_BYTES (and to one group of rows at least)."""
        run, found = self._run, []
        maximum = self.group * max(1, PROPOSAL_BYTES // max(1, self.group * row_bytes))

        def choose(run: CanvasPass, step: OpCall) -> None:
            logits_mV = run.rows(step, LOGITS, run.trunk.spec.vocab_size)
            for start in range(step.start, step.stop, maximum):
                rows = slice(start, min(step.stop, start + maximum))
                found.append(propose(logits_mV[rows.start - step.start : rows.stop - step.start], rows))

        for step in self._steps:
            run.execute(step, choose if step.op.name == CHOICE else None)
        return found[0] if len(found) == 1 else tuple(torch.cat(each) for each in zip(*found, strict=True))


class BestRows(WantedRows):
    """Rows of a pass planned for `WantedRows.best`, whose op is `step`. `hidden_RD` is in the workspace,
    after the final norm, valid until the next pass. Logits, if a request needs them, are outside of the
    plan."""

    def __init__(self, run: CanvasPass, step: OpCall) -> None:
        trunk, num_bytes = run.trunk, run.plan.num_bytes["ranges"]
        super().__init__(
            run.whole(step, "x", trunk.spec.width),
            run.rows_X,
            trunk.logits,
            weight_VD=trunk.head_weight,
            workspace=run.arena.view(step.offsets["ranges"], (num_bytes // 4,), torch.float32),
        )
        self._run, self._step = run, step

    def best(self, forbidden_S: Tensor, is_wanted_X: Tensor, *, entropy: bool = False) -> Proposals | None:
        found: list[Proposals | None] = []
        compute_best = super().best

        def op(run: CanvasPass, step: OpCall) -> None:
            found.append(compute_best(forbidden_S, is_wanted_X, entropy=entropy))

        self._run.execute(self._step, op)
        return found[0]
