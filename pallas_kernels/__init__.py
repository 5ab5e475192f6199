"""Paged attention over a pooled KV cache, for any JAX code: Pallas kernels and plain XLA."""

from pallas_kernels.api import (
    Implementation,
    add_rms_norm,
    paged_decode_attention,
    paged_prefill_attention,
    write_kv,
)
from pallas_kernels.rope_kv import rope_and_write_kv, rotary_heads

__all__ = [
    "Implementation",
    "add_rms_norm",
    "paged_decode_attention",
    "paged_prefill_attention",
    "rope_and_write_kv",
    "rotary_heads",
    "write_kv",
]
