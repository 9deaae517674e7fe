"""Checks of ops that write to given positions, on any device: bits of the ops that allocate, poisoned
positions.

R rows, N query heads, K KV heads, H head dim, C chosen experts, D width, F ffn of an expert."""

from __future__ import annotations

import torch

from idlm.kernels.experts import (
    Routing,
    add_experts,
    expert_hidden,
    expert_outputs,
    experts,
    route,
    sort_pairs,
    tile_bytes,
)
from idlm.kernels.qkv_rope_cache import make_rope, qkv_rope_cache, rotate_heads

N, K, H = 5, 2, 16
NUM_EXPERTS, C = 8, 3
GUARD = 5


def check_heads_in_place(num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """`rotate_heads` of queries and of keys against `qkv_rope_cache`, with a norm and without."""
    generator = torch.Generator().manual_seed(num_rows)
    qkv = torch.randn(num_rows, N + 2 * K, H, generator=generator).to(device, dtype)
    weight = torch.randn(N + K, H, generator=generator).to(device, dtype)
    positions = torch.randint(0, 900, (num_rows,), generator=generator).to(device)
    rope = make_rope(positions, torch.rand(H // 2, generator=generator).to(device), dtype=dtype)
    keys, values = (torch.zeros(num_rows, K, H, device=device, dtype=dtype) for _ in range(2))
    slots = torch.arange(num_rows, device=device)
    for norm in (None, weight):
        q, k = qkv[:, :N].contiguous(), qkv[:, N : N + K].contiguous()
        expected = qkv_rope_cache(qkv.clone(), keys, values, rope=rope, slot_mapping_R=slots, qk_norm_YH=norm)
        rotate_heads(q, rope=rope, norm_YH=None if norm is None else norm[:N])
        rotate_heads(k, rope=rope, norm_YH=None if norm is None else norm[N:])
        assert torch.equal(q, expected) and torch.equal(k, keys)


def check_expert_steps(
    num_rows: int, dtype: torch.dtype, device: torch.device, *, D: int = 32, F: int = 24
) -> None:
    """The steps of `experts` against the op, in poisoned positions; nothing is written beside them."""
    generator = torch.Generator().manual_seed(num_rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, residual = draw(num_rows, D), draw(num_rows, D)
    gate_up, down = draw(NUM_EXPERTS, 2 * F, D) / 5, draw(NUM_EXPERTS, D, F) / 5
    routing = Routing(num_chosen=C, score="softmax", is_normalised=False)
    chosen, weights = route(draw(num_rows, NUM_EXPERTS), routing)
    out = experts(x, gate_up, down, chosen, weights)
    num_pairs, (by_pair, constant) = num_rows * C, tile_bytes(NUM_EXPERTS)
    num_tiles = (by_pair * num_pairs + constant) // 4
    ids = chosen.to(torch.int32).contiguous()
    order, tiles = (
        torch.full((size + GUARD,), -7, dtype=torch.int32, device=device) for size in (num_pairs, num_tiles)
    )
    hidden, outputs = (
        torch.full((num_pairs + GUARD, width), float("nan"), device=device, dtype=dtype) for width in (F, D)
    )
    sorted_pairs = (ids, order[:num_pairs], tiles[:num_tiles])
    sort_pairs(*sorted_pairs, num_experts=NUM_EXPERTS, dtype=dtype)
    expert_hidden(x, gate_up, *sorted_pairs, hidden[:num_pairs])
    expert_outputs(hidden[:num_pairs], down, *sorted_pairs, outputs[:num_pairs])
    expected = residual.float() + out.float()
    add_experts(outputs[:num_pairs], ids, weights, residual)
    limit = 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (residual.float() - expected).abs().max() <= limit
    assert (order[num_pairs:] == -7).all() and (tiles[num_tiles:] == -7).all()
    assert hidden[num_pairs:].isnan().all() and outputs[num_pairs:].isnan().all()
