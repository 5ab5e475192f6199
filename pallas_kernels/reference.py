"""Oracles: each operation in the fewest float32 operations, with no thought for speed.

Every query gathers its whole block table, so time and memory grow with the table's width. The
fast implementations are compared with these, and these with dense numpy in the tests.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantize_kv import to_pool_dtype


def write_kv(
    kv_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    kv_scales: jax.Array | None,
) -> jax.Array:
    """Write one token after the other."""
    block_size = kv_pool.shape[3]
    new = jnp.stack([k, v], axis=1)  # [tokens, 2, kv_heads, head_dim]
    scales = None if kv_scales is None else kv_scales[None, :, :, None]
    new = to_pool_dtype(new, kv_pool.dtype, scales)

    def write_token(t: jax.Array, pool: jax.Array) -> jax.Array:
        block, offset = slot_mapping[t] // block_size, slot_mapping[t] % block_size
        return pool.at[block, :, :, offset].set(new[t])

    return jax.lax.fori_loop(0, k.shape[0], write_token, kv_pool)


def paged_decode_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    **options: Any,
) -> Any:
    """Decode is the ragged case in which every sequence owns equally many rows."""
    rows = q.shape[1] if q.ndim == 4 else 1
    query_start = jnp.arange(seq_lens.shape[0] + 1, dtype=jnp.int32) * rows
    flat = q.reshape(-1, *q.shape[-2:])
    result = paged_prefill_attention(flat, kv_pool, block_tables, seq_lens, query_start, **options)
    return jax.tree.map(lambda x: x.reshape(*q.shape[:-2], *x.shape[1:]), result)


def paged_prefill_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    return_lse: bool,
) -> Any:
    """See `pallas_kernels.paged_prefill_attention`; every default is filled in by the caller."""
    tokens, q_heads, head_dim = q.shape
    kv_heads, block_size = kv_pool.shape[2:4]
    context = block_tables.shape[1] * block_size

    token = jnp.arange(tokens, dtype=jnp.int32)
    seq = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    owned = seq < seq_lens.shape[0]  # past query_start[-1]: padding
    seq = jnp.minimum(seq, seq_lens.shape[0] - 1)
    position = seq_lens[seq] - (query_start[seq + 1] - token)  # [tokens]
    key_position = jnp.arange(context, dtype=jnp.int32)[None, :]
    visible = owned[:, None] & (key_position <= position[:, None])
    if window is not None:
        visible &= key_position > position[:, None] - window
    visible = visible[:, None, :]  # [tokens, 1, context]

    table = jnp.clip(block_tables[seq], 0, kv_pool.shape[0] - 1)
    kv = kv_pool[table].astype(
        jnp.float32
    )  # [tokens, max_blocks, 2, kv_heads, block_size, head_dim]
    kv = jnp.moveaxis(kv, 1, 3).reshape(tokens, 2, kv_heads, context, head_dim)
    if kv_scales is not None:
        kv = kv * kv_scales[None, :, :, None, None]
    kv = jnp.repeat(kv, q_heads // kv_heads, axis=2)
    k, v = kv[:, 0], jnp.where(visible[..., None], kv[:, 1], 0.0)  # 0 * NaN would be NaN

    scores = jnp.einsum("thd,thcd->thc", q.astype(jnp.float32), k, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.where(visible.any(-1), sinks[None, :], -jnp.inf)
        scores = jnp.concatenate([scores, sink[..., None]], axis=-1)
    lse = jax.nn.logsumexp(scores, axis=-1)  # -inf where nothing is visible
    weights = jnp.exp(scores[..., :context] - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
    out = jnp.einsum("thc,thcd->thd", weights, v, precision="highest").astype(q.dtype)
    return (out, lse) if return_lse else out
