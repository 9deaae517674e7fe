"""The ops of a trunk's template as functions: each reads and writes the positions that the plan gives it. The
head is the end of a planned pass (`CanvasRows`, `BestRows`).

What else is allocated is bounded: attention runs on pieces of at most `PIECE_ROWS` query rows, and so
do the torch ops of a CPU. The arithmetic is that of `models/dense.py` and `models/moe.py`, so on a CPU bits
are equal to theirs. Keys and values come from products of their own: a fused product would hold them twice.
Shapes: R rows of the pass, m rows of a call, N query heads, K KV heads, H head dim, D width, E output width,
C chosen experts, P pairs of a row and an expert, X wanted rows, Y rows of a slice, V vocabulary, S forbidden
ids."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.infer.models.dense import DenseTrunk, Layer
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

    def whole(
        self, step: OpCall, name: str, width: int | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A tensor of all rows, whatever rows the call has; [rows, width], the width (None) of its bytes."""
        size, sizes = self.plan.template.tensors[name], self.plan.sizes
        return self._view(step, name, sizes.num_rows(size.rows), width, dtype)

    def rows(
        self, step: OpCall, name: str, width: int | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The rows of a call in a tensor of all rows, or in one of chunk size; [m, width]."""
        if self.plan.template.tensors[name].chunks is None:
            return self.whole(step, name, width, dtype=dtype)[step.start : step.stop]
        return self._view(step, name, step.stop - step.start, width, dtype)

    def _view(
        self, step: OpCall, name: str, num_rows: int, width: int | None, dtype: torch.dtype | None
    ) -> Tensor:
        size, dtype = self.plan.template.tensors[name], dtype or self.trunk.embed.dtype
        shape = num_rows * size.repeat, size.row_bytes // dtype.itemsize if width is None else width
        return self.arena.view(step.offsets[name], shape, dtype)

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
    torch.index_select(run.trunk.embed, 0, run.token_ids_R, out=run.rows(step, "x"))


def _norm(run: CanvasPass, step: OpCall) -> None:
    """The norm before attention or before the FFN."""
    [out], layer = step.op.writes, run.layer(step)
    weight_D = layer.mlp_norm if step.op.name == "ffn_norm" else layer.attention_norm
    assert weight_D is not None
    norm_rows(run, run.rows(step, "x"), weight_D, run.rows(step, out))


def _project(run: CanvasPass, step: OpCall) -> None:
    """The product of the normed rows and the heads of q, k or v in the fused projection, at its position.

    Then q and k are normed and rotated in place; cos and sin exist for a piece of rows only."""
    trunk, layer, (source, *_), [out] = run.trunk, run.layer(step), step.op.reads, step.op.writes
    spec, eps = trunk.spec, trunk.spec.norm_eps
    first = {"q": 0, "k": spec.num_heads, "v": spec.num_heads + spec.num_kv_heads}[out]
    end = first + (spec.num_heads if out == "q" else spec.num_kv_heads)
    heads = slice(first * spec.head_dim, end * spec.head_dim)
    out_mE, bias_E = run.rows(step, out), None if layer.qkv_bias is None else layer.qkv_bias[heads]
    library_linear(run.rows(step, source), layer.qkv[heads], bias_E=bias_E, out_RE=out_mE)
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
    head_dim = run.trunk.spec.head_dim
    q_mNH, heads_mNH = (run.rows(step, name).unflatten(1, (-1, head_dim)) for name in ("q", "heads"))
    k_RKH, v_RKH = (run.whole(step, name).unflatten(1, (-1, head_dim)) for name in ("k", "v"))
    for low, high in itertools.pairwise(run.bounds):
        start, stop = max(low, step.start), min(high, step.stop)
        if start < stop:
            mine, keys = slice(start - step.start, stop - step.start), slice(low, high)
            attend(q_mNH[mine], k_RKH[keys], v_RKH[keys], heads_mNH[mine], first=start - low)
    heads_mNH[max(0, run.bounds[-1] - step.start) :] = 0


def _product(run: CanvasPass, step: OpCall) -> None:
    """A projection of a layer; `down` reads the hidden rows, which have taken the places of gates."""
    (source, *_), [out] = step.op.reads, step.op.writes
    weight_ED, bias_E, _ = run.layer(step).operands(step.op.name.removesuffix("_proj"), None)
    assert isinstance(weight_ED, Tensor)
    x_mD = run.rows(step, source)[:, : weight_ED.shape[1]]
    library_linear(x_mD, weight_ED, bias_E=bias_E, out_RE=run.rows(step, out))


def _add(run: CanvasPass, step: OpCall) -> None:
    run.rows(step, "x").add_(run.rows(step, step.op.reads[0]))


def _activate(run: CanvasPass, step: OpCall) -> None:
    """The hidden row takes the place of its gate."""
    gate_up_mE = run.rows(step, "gate_up")
    for rows in pieces(len(gate_up_mE)):
        swiglu(gate_up_mE[rows], out_RF=gate_up_mE[rows, : gate_up_mE.shape[1] // 2])


def _router_logits(run: CanvasPass, step: OpCall) -> Tensor:
    weight_ED = run.experts(step).router
    return run.rows(step, "router_logits", len(weight_ED), dtype=weight_ED.dtype)


def _router(run: CanvasPass, step: OpCall) -> None:
    weight_ED, logits_mE, x_mD = run.experts(step).router, _router_logits(run, step), run.rows(step, "ffn_in")
    for rows in pieces(len(x_mD)):
        library_linear(x_mD[rows].to(weight_ED.dtype), weight_ED, out_RE=logits_mE[rows])


def _ids(run: CanvasPass, step: OpCall) -> Tensor:
    return run.rows(step, "expert_ids", dtype=torch.int32)


def _weights(run: CanvasPass, step: OpCall) -> Tensor:
    return run.rows(step, "expert_weights", dtype=torch.float32)


def _choose_experts(run: CanvasPass, step: OpCall) -> None:
    experts, ids_mC, weights_mC = run.experts(step), _ids(run, step), _weights(run, step)
    logits_mE = _router_logits(run, step)
    for rows in pieces(len(logits_mE)):
        ids_mC[rows], weights_mC[rows] = route(logits_mE[rows], experts.moe, bias_X=experts.router_bias)


def _pairs(run: CanvasPass, step: OpCall) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen experts, positions of the sorted pairs [P], and of their tiles, flat; all int32."""
    order_P = run.rows(step, "expert_order", dtype=torch.int32).flatten()
    num_bytes = run.plan.num_bytes["expert_tiles"]
    tiles = run.arena.view(step.offsets["expert_tiles"], (num_bytes // 4,), torch.int32)
    return _ids(run, step), order_P, tiles


def _sort_pairs(run: CanvasPass, step: OpCall) -> None:
    num_experts, dtype = run.experts(step).moe.num_experts, run.trunk.embed.dtype
    sort_pairs(*_pairs(run, step), num_experts=num_experts, dtype=dtype)


def _expert_hidden(run: CanvasPass, step: OpCall) -> None:
    gate_up_EFD, out_PF = run.experts(step).gate_up, run.rows(step, "hidden")
    expert_hidden(run.rows(step, "ffn_in"), gate_up_EFD, *_pairs(run, step), out_PF)


def _expert_outputs(run: CanvasPass, step: OpCall) -> None:
    down_EDF, out_PD = run.experts(step).down, run.rows(step, "expert_out")
    expert_outputs(run.rows(step, "hidden"), down_EDF, *_pairs(run, step), out_PD)


def _add_experts(run: CanvasPass, step: OpCall) -> None:
    y_PD, x_mD = run.rows(step, "expert_out"), run.rows(step, "x")
    add_experts(y_PD, _ids(run, step), _weights(run, step), x_mD)


def _final_norm(run: CanvasPass, step: OpCall) -> None:
    """Norm all rows in place: the head that stores no logits gathers the wanted ones itself."""
    x_RD = run.whole(step, "x")
    norm_rows(run, x_RD, run.trunk.final_norm, x_RD)


def _head_norm(run: CanvasPass, step: OpCall) -> None:
    """Gather the wanted rows, then norm them in place."""
    head_in_mD, rows_m = run.rows(step, "head_in"), run.rows_X[step.start : step.stop]
    torch.index_select(run.whole(step, "x"), 0, rows_m, out=head_in_mD)
    norm_rows(run, head_in_mD, run.trunk.final_norm, head_in_mD)


def _logits(run: CanvasPass, step: OpCall) -> None:
    library_linear(run.rows(step, "head_in"), run.trunk.head, out_RE=run.rows(step, "logits"))


OPS: Mapping[str, Callable[[CanvasPass, OpCall], None]] = {
    "embed": _embed,
    "attention_norm": _norm,
    "q_proj": _project,
    "k_proj": _project,
    "v_proj": _project,
    "attention": _attention,
    "o_proj": _product,
    "add": _add,
    "ffn_norm": _norm,
    "gate_up": _product,
    "activate": _activate,
    "down": _product,
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
"""By name of op; those of the head are missing: `choose_tokens`, which is the decoder's, and
`masked_logits`."""


class CanvasRows(WantedRows):
    """`hidden_RD` is the residual stream in the workspace, valid until the next pass; `head` norms it first.
    `steps`: the calls of the head, from which `proposals` gets its chunks."""

    def __init__(self, run: CanvasPass, steps: Sequence[OpCall], *, group: int = 1) -> None:
        first = steps[0]
        super().__init__(run.whole(first, "x"), run.rows_X, self._head, group=group)
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
            logits_mV = run.rows(step, "logits")
            for start in range(step.start, step.stop, maximum):
                rows = slice(start, min(step.stop, start + maximum))
                found.append(propose(logits_mV[rows.start - step.start : rows.stop - step.start], rows))

        for step in self._steps:
            run.execute(step, choose if step.op.name == "choose_tokens" else None)
        return found[0] if len(found) == 1 else tuple(torch.cat(each) for each in zip(*found, strict=True))


class BestRows(WantedRows):
    """Rows of a pass planned for `WantedRows.best`, whose op is `step`. `hidden_RD` is in the workspace,
    after the final norm, valid until the next pass. Logits, if a request needs them, are outside of the
    plan."""

    def __init__(self, run: CanvasPass, step: OpCall) -> None:
        trunk, num_bytes = run.trunk, run.plan.num_bytes["ranges"]
        super().__init__(
            run.whole(step, "x"),
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
