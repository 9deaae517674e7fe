"""Real models as plain numbers, and the KiB a token that their arms must keep alive."""

from __future__ import annotations

from idlm.infer.mosaic.trunk import TrunkShape

LLADA_8B = TrunkShape(
    width=4096, num_heads=32, num_kv_heads=32, head_dim=128, ffn=12288, vocab=126464, num_layers=32
)
DREAM_7B = TrunkShape(
    width=3584, num_heads=28, num_kv_heads=4, head_dim=128, ffn=18944, vocab=152064, num_layers=28
)
LLADA_MOE = TrunkShape(
    width=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    ffn=1024,
    vocab=157184,
    num_layers=16,
    num_experts=64,
    top_k=8,
)
SHAPES = {"llada_8b": LLADA_8B, "dream_7b": DREAM_7B, "llada_moe": LLADA_MOE}
KIB_A_ROW = {
    ("llada_8b", "paper"): 48,
    ("llada_8b", "mosaic"): 40,
    ("llada_8b", "ours"): 24,
    ("dream_7b", "paper"): 30,
    ("dream_7b", "mosaic"): 23,
    ("dream_7b", "ours"): 9,
    ("llada_moe", "paper"): 24,
    ("llada_moe", "mosaic"): 20,
    ("llada_moe", "ours"): 12,
}
