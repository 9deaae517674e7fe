"""QK norm, rotary embedding and KV write after the fused projection; contract in README.md."""

from idlm.kernels.qkv_rope_cache.op import make_rope, qkv_rope_cache
from idlm.kernels.qkv_rope_cache.reference import qkv_rope_cache_reference
from idlm.kernels.qkv_rope_cache.types import Rope

__all__ = ["Rope", "make_rope", "qkv_rope_cache", "qkv_rope_cache_reference"]
