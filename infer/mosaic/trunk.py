"""Templates of dense and mixture-of-experts trunks, from plain numbers.

Attention is whole, or in query chunks: K and V of all rows come first, then chunks of query rows, each of
which updates x in place. K and V come from products of their own: a fused product would keep both twice. The
FFN is a loop of its own after attention, not part of the query chunks: K and V are free by then, so it needs
fewer chunks.

Every product writes its own buffer, and residuals are added to x afterwards. Projections add their bias,
normalise and rotate in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from idlm.infer.mosaic.lifetimes import K_EXPERTS, K_FFN, K_LOGITS, K_QUERY, LENGTH, WANTED, Loop, Size
from idlm.infer.mosaic.template import PassTemplate

TOKEN_BYTES = 8
CONFIDENCE_BYTES = ROUTER_BYTES = SORT_BYTES = CHOICE_BYTES = 4
"""Item sizes: int64 for token ids; fp32 for confidences and routing, int32 for sorted pairs and experts."""
TILE_BYTES = 16
"""Of a tile of sorted pairs, which has at least as many pairs unless its expert has fewer."""

ATTENTION = Loop(name="attention", rows=LENGTH, chunks=K_QUERY)
KEYS_VALUES = Loop(name="keys_values", rows=LENGTH, chunks=K_QUERY)
FFN = Loop(name="ffn", rows=LENGTH, chunks=K_FFN)
EXPERTS = Loop(name="experts", rows=LENGTH, chunks=K_EXPERTS)
HEAD = Loop(name="head", rows=WANTED, chunks=K_LOGITS)
FUSED_HEAD = "masked_logits"
"""The op that takes the place of the loop HEAD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrunkShape:
    """Numbers of a trunk. `ffn` is the width of one expert when `num_experts` is set.

    `fused_head`: the workspace of one op that computes tokens and confidences without storing logits; None:
    logits are stored, in chunks."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    num_layers: int
    num_experts: int = 0
    top_k: int = 0
    item_bytes: int = 2
    fused_head: Size | None = None

    @property
    def x_bytes(self) -> int:
        """Bytes of a row of the residual stream."""
        return self.width * self.item_bytes

    @property
    def q_bytes(self) -> int:
        """Bytes of a row of q, and of the output of attention."""
        return self.num_heads * self.head_dim * self.item_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of a row of k, and of v."""
        return self.num_kv_heads * self.head_dim * self.item_bytes


class _TrunkTemplate:
    """A template being registered for one shape."""

    def __init__(self, shape: TrunkShape, name: str) -> None:
        self.shape, self.template = shape, PassTemplate(name)
        self.op = self.template.add_op
        assert 0 < shape.num_kv_heads <= shape.num_heads, shape
        assert (0 < shape.top_k <= shape.num_experts) or shape.num_experts == shape.top_k == 0, shape

    def rows(self, row_bytes: int, loop: Loop | None = None, *, repeat: int = 1, **tensors: int) -> None:
        """Register tensors of `row_bytes` times their multiple; of chunk size, given a loop."""
        for name, multiple in tensors.items():
            rows, chunks = (LENGTH, None) if loop is None else (loop.rows, loop.chunks)
            size = Size(row_bytes=row_bytes * multiple, rows=rows, chunks=chunks, repeat=repeat)
            self.template.add_tensor(name, size)


def trunk_template(shape: TrunkShape, *, chunks_queries: bool = False) -> PassTemplate:
    """Return the template of a whole forward pass, from token ids to tokens and confidences of wanted rows.

    Inputs: `token_ids`, `positions`, `wanted_rows`."""
    names = ["moe" if shape.num_experts else "dense", f"attention {'query' if chunks_queries else 'whole'}"]
    trunk = _TrunkTemplate(shape, ", ".join(names + ["no logits"] * (shape.fused_head is not None)))
    template = trunk.template
    template.add_input("token_ids", "positions", "wanted_rows")
    trunk.rows(shape.x_bytes, x=1)
    trunk.op("embed", ["token_ids"], ["x"])
    with template.layers(shape.num_layers):
        if chunks_queries:
            _add_query_chunks(trunk)
        else:
            _add_whole_attention(trunk)
        if shape.num_experts:
            _add_experts(trunk)
        else:
            _add_ffn(trunk)
    _add_head(trunk)
    assert template.lifetimes
    return template


def _add_whole_attention(trunk: _TrunkTemplate) -> None:
    """Attention over all rows."""
    shape = trunk.shape
    trunk.rows(shape.x_bytes, ATTENTION, attention_in=1, attention_out=1)
    trunk.rows(shape.q_bytes, ATTENTION, q=1, heads=1)
    trunk.rows(shape.kv_bytes, ATTENTION, k=1, v=1)
    trunk.op("attention_norm", ["x"], ["attention_in"], ATTENTION)
    trunk.op("q_proj", ["attention_in", "positions"], ["q"], ATTENTION)
    trunk.op("k_proj", ["attention_in", "positions"], ["k"], ATTENTION)
    trunk.op("v_proj", ["attention_in"], ["v"], ATTENTION)
    trunk.op("attention", ["q", "k", "v"], ["heads"], ATTENTION)
    _add_attention_output(trunk)


def _add_query_chunks(trunk: _TrunkTemplate) -> None:
    """K and V of all rows in chunks of the norm, then attention of each chunk of query rows."""
    shape = trunk.shape
    trunk.rows(shape.kv_bytes, k=1, v=1)
    trunk.rows(shape.x_bytes, KEYS_VALUES, keys_values_in=1)
    trunk.rows(shape.x_bytes, ATTENTION, attention_in=1, attention_out=1)
    trunk.rows(shape.q_bytes, ATTENTION, q=1, heads=1)
    trunk.op("attention_norm", ["x"], ["keys_values_in"], KEYS_VALUES)
    trunk.op("k_proj", ["keys_values_in", "positions"], ["k"], KEYS_VALUES)
    trunk.op("v_proj", ["keys_values_in"], ["v"], KEYS_VALUES)
    trunk.op("attention_norm", ["x"], ["attention_in"], ATTENTION)
    trunk.op("q_proj", ["attention_in", "positions"], ["q"], ATTENTION)
    trunk.op("attention", ["q", "k", "v"], ["heads"], ATTENTION)
    _add_attention_output(trunk)


def _add_attention_output(trunk: _TrunkTemplate) -> None:
    trunk.op("o_proj", ["heads"], ["attention_out"], ATTENTION)
    trunk.op("add", ["attention_out", "x"], ["x"], ATTENTION)


def _add_ffn(trunk: _TrunkTemplate) -> None:
    """A gated FFN; the activation overwrites the gate half of each row, which `hidden` names."""
    shape, template = trunk.shape, trunk.template
    trunk.rows(shape.x_bytes, FFN, ffn_in=1, ffn_out=1)
    trunk.rows(shape.ffn * shape.item_bytes, FFN, gate_up=2)
    template.add_alias("hidden", "gate_up")
    trunk.op("ffn_norm", ["x"], ["ffn_in"], FFN)
    trunk.op("gate_up", ["ffn_in"], ["gate_up"], FFN)
    trunk.op("activate", ["gate_up"], ["hidden"], FFN)
    trunk.op("down", ["hidden"], ["ffn_out"], FFN)
    trunk.op("add", ["ffn_out", "x"], ["x"], FFN)


def _add_experts(trunk: _TrunkTemplate) -> None:
    """Routed experts, as in kernels/experts: pairs of a row and an expert are sorted by expert, and the
    grouped products read and write rows at the positions of their pairs, so no row is copied."""
    shape, template, k = trunk.shape, trunk.template, trunk.shape.top_k
    trunk.rows(shape.x_bytes, EXPERTS, ffn_in=1)
    trunk.rows(ROUTER_BYTES, EXPERTS, router_logits=shape.num_experts, expert_weights=k)
    trunk.rows(CHOICE_BYTES, EXPERTS, expert_ids=k)
    trunk.rows(SORT_BYTES, EXPERTS, repeat=k, expert_order=1)
    row_bytes, constant = 1, TILE_BYTES * shape.num_experts
    tiles = Size(row_bytes=row_bytes, rows=LENGTH, chunks=EXPERTS.chunks, repeat=k, constant=constant)
    template.add_tensor("expert_tiles", tiles)
    trunk.rows(shape.ffn * shape.item_bytes, EXPERTS, repeat=k, hidden=1)
    trunk.rows(shape.x_bytes, EXPERTS, repeat=k, expert_out=1)
    trunk.op("ffn_norm", ["x"], ["ffn_in"], EXPERTS)
    trunk.op("router", ["ffn_in"], ["router_logits"], EXPERTS)
    trunk.op("choose_experts", ["router_logits"], ["expert_weights", "expert_ids"], EXPERTS)
    trunk.op("sort_pairs", ["expert_ids"], ["expert_order", "expert_tiles"], EXPERTS)
    sorted_pairs = ["expert_ids", "expert_order", "expert_tiles"]
    trunk.op("expert_hidden", ["ffn_in", *sorted_pairs], ["hidden"], EXPERTS)
    trunk.op("expert_outputs", ["hidden", *sorted_pairs], ["expert_out"], EXPERTS)
    trunk.op("add_experts", ["expert_out", "expert_ids", "expert_weights", "x"], ["x"], EXPERTS)


def _add_head(trunk: _TrunkTemplate) -> None:
    """Tokens and confidences of the wanted rows, from logits in chunks or from one fused op."""
    shape, template = trunk.shape, trunk.template
    template.add_tensor("tokens", Size(row_bytes=TOKEN_BYTES, rows=WANTED))
    template.add_tensor("confidences", Size(row_bytes=CONFIDENCE_BYTES, rows=WANTED))
    if shape.fused_head is not None:
        template.add_tensor("ranges", shape.fused_head)
        trunk.op("final_norm", ["x"], ["x"])
        trunk.op(FUSED_HEAD, ["x", "wanted_rows"], ["tokens", "confidences", "ranges"])
    else:
        trunk.rows(shape.x_bytes, HEAD, head_in=1)
        trunk.rows(shape.vocab * shape.item_bytes, HEAD, logits=1)
        trunk.op("head_norm", ["x", "wanted_rows"], ["head_in"], HEAD)
        trunk.op("logits", ["head_in"], ["logits"], HEAD)
        trunk.op("choose_tokens", ["logits"], ["tokens", "confidences"], HEAD)
    template.add_barrier("tokens", "confidences")
