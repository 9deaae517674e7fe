"""QK norm, rotary embedding and KV write after the fused projection; contract in README.md."""

from idlm.kernels.qkv_rope_cache.op import Rope, make_rope, qkv_rope_cache, rotate_heads
