"""Templates of dense and mixture-of-experts trunks, from plain numbers.

Attention is whole, or in query chunks: K and V of all rows come first, from products of their own (a fused
one would hold both twice), then chunks of query rows, each of which updates x in place. The FFN is a loop of
its own after attention: K and V are free by then, so it needs fewer chunks. Every product writes its own
buffer, and residuals are added to x afterwards. Projections add their bias, normalise and rotate in place."""

from __future__ import annotations

from dataclasses import dataclass

from idlm.infer.mosaic.template import (
    K_EXPERTS,
    K_FFN,
    K_LOGITS,
    K_QUERY,
    LENGTH,
    WANTED,
    Loop,
    PassTemplate,
    Size,
)

ROUTER_BYTES = SORT_BYTES = CHOICE_BYTES = 4
"""Item sizes: fp32 for routing, int32 for sorted pairs and experts."""
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
    """Numbers of a trunk; `*_bytes` are those of a row of the residual stream, of q, and of k or v. `ffn` is
    the width of one expert when `num_experts` is set. `fused_head`: the workspace of one op that computes
    tokens and confidences without storing logits; None: logits are stored, in chunks."""

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
        return self.width * self.item_bytes

    @property
    def q_bytes(self) -> int:
        return self.num_heads * self.head_dim * self.item_bytes

    @property
    def kv_bytes(self) -> int:
        return self.num_kv_heads * self.head_dim * self.item_bytes


def trunk_template(shape: TrunkShape, *, chunks_queries: bool = False) -> PassTemplate:
    """Return the template of a whole forward pass, from token ids to the logits of wanted rows, or the best
    tokens of them.

    Inputs: `token_ids`, `positions`, `wanted_rows`."""
    names = ["moe" if shape.num_experts else "dense", f"attention {'query' if chunks_queries else 'whole'}"]
    assert 0 < shape.num_kv_heads <= shape.num_heads, shape
    assert (0 < shape.top_k <= shape.num_experts) or shape.num_experts == shape.top_k == 0, shape
    template = PassTemplate(", ".join(names + ["no logits"] * (shape.fused_head is not None)))
    template.add_rows(shape.x_bytes, x=1)
    template.add_op("embed", ["token_ids"], ["x"])
    with template.layers(shape.num_layers):
        (_add_query_chunks if chunks_queries else _add_whole_attention)(template, shape)
        (_add_experts if shape.num_experts else _add_ffn)(template, shape)
    _add_head(template, shape)
    return template


def _add_whole_attention(template: PassTemplate, shape: TrunkShape) -> None:
    template.add_rows(shape.x_bytes, ATTENTION, attention_in=1, attention_out=1)
    template.add_rows(shape.q_bytes, ATTENTION, q=1, heads=1)
    template.add_rows(shape.kv_bytes, ATTENTION, k=1, v=1)
    template.add_op("attention_norm", ["x"], ["attention_in"], ATTENTION)
    template.add_op("q_proj", ["attention_in", "positions"], ["q"], ATTENTION)
    template.add_op("k_proj", ["attention_in", "positions"], ["k"], ATTENTION)
    template.add_op("v_proj", ["attention_in"], ["v"], ATTENTION)
    template.add_op("attention", ["q", "k", "v"], ["heads"], ATTENTION)
    _add_attention_output(template)


def _add_query_chunks(template: PassTemplate, shape: TrunkShape) -> None:
    """K and V of all rows in chunks of the norm, then attention of each chunk of query rows."""
    template.add_rows(shape.kv_bytes, k=1, v=1)
    template.add_rows(shape.x_bytes, KEYS_VALUES, keys_values_in=1)
    template.add_rows(shape.x_bytes, ATTENTION, attention_in=1, attention_out=1)
    template.add_rows(shape.q_bytes, ATTENTION, q=1, heads=1)
    template.add_op("attention_norm", ["x"], ["keys_values_in"], KEYS_VALUES)
    template.add_op("k_proj", ["keys_values_in", "positions"], ["k"], KEYS_VALUES)
    template.add_op("v_proj", ["keys_values_in"], ["v"], KEYS_VALUES)
    template.add_op("attention_norm", ["x"], ["attention_in"], ATTENTION)
    template.add_op("q_proj", ["attention_in", "positions"], ["q"], ATTENTION)
    template.add_op("attention", ["q", "k", "v"], ["heads"], ATTENTION)
    _add_attention_output(template)


def _add_attention_output(template: PassTemplate) -> None:
    template.add_op("o_proj", ["heads"], ["attention_out"], ATTENTION)
    template.add_op("add", ["attention_out", "x"], ["x"], ATTENTION)


def _add_ffn(template: PassTemplate, shape: TrunkShape) -> None:
    """A gated FFN; the activation overwrites the gate half of each row."""
    template.add_rows(shape.x_bytes, FFN, ffn_in=1, ffn_out=1)
    template.add_rows(shape.ffn * shape.item_bytes, FFN, gate_up=2)
    template.add_op("ffn_norm", ["x"], ["ffn_in"], FFN)
    template.add_op("gate_up", ["ffn_in"], ["gate_up"], FFN)
    template.add_op("activate", ["gate_up"], ["gate_up"], FFN)
    template.add_op("down", ["gate_up"], ["ffn_out"], FFN)
    template.add_op("add", ["ffn_out", "x"], ["x"], FFN)


def _add_experts(template: PassTemplate, shape: TrunkShape) -> None:
    """Routed experts, as in kernels/experts: pairs of a row and an expert are sorted by expert, and the
    grouped products read and write rows at the positions of their pairs, so no row is copied."""
    k = shape.top_k
    template.add_rows(shape.x_bytes, EXPERTS, ffn_in=1)
    template.add_rows(ROUTER_BYTES, EXPERTS, router_logits=shape.num_experts, expert_weights=k)
    template.add_rows(CHOICE_BYTES, EXPERTS, expert_ids=k)
    template.add_rows(SORT_BYTES, EXPERTS, repeat=k, expert_order=1)
    row_bytes, constant = 1, TILE_BYTES * shape.num_experts
    tiles = Size(row_bytes=row_bytes, rows=LENGTH, chunks=EXPERTS.chunks, repeat=k, constant=constant)
    template.add_tensor("expert_tiles", tiles)
    template.add_rows(shape.ffn * shape.item_bytes, EXPERTS, repeat=k, hidden=1)
    template.add_rows(shape.x_bytes, EXPERTS, repeat=k, expert_out=1)
    template.add_op("ffn_norm", ["x"], ["ffn_in"], EXPERTS)
    template.add_op("router", ["ffn_in"], ["router_logits"], EXPERTS)
    template.add_op("choose_experts", ["router_logits"], ["expert_weights", "expert_ids"], EXPERTS)
    template.add_op("sort_pairs", ["expert_ids"], ["expert_order", "expert_tiles"], EXPERTS)
    sorted_pairs = ["expert_ids", "expert_order", "expert_tiles"]
    template.add_op("expert_hidden", ["ffn_in", *sorted_pairs], ["hidden"], EXPERTS)
    template.add_op("expert_outputs", ["hidden", *sorted_pairs], ["expert_out"], EXPERTS)
    template.add_op("add_experts", ["expert_out", "expert_ids", "expert_weights", "x"], ["x"], EXPERTS)


def _add_head(template: PassTemplate, shape: TrunkShape) -> None:
    if shape.fused_head is not None:
        template.add_tensor("ranges", shape.fused_head)
        template.add_op("final_norm", ["x"], ["x"])
        template.add_op(FUSED_HEAD, ["x", "wanted_rows"], ["ranges"])
    else:
        template.add_rows(shape.x_bytes, HEAD, head_in=1)
        template.add_rows(shape.vocab * shape.item_bytes, HEAD, logits=1)
        template.add_op("head_norm", ["x", "wanted_rows"], ["head_in"], HEAD)
        template.add_op("logits", ["head_in"], ["logits"], HEAD)
        template.add_op("choose_tokens", ["logits"], [], HEAD)
