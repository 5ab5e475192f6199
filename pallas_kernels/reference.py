"""Oracles: each operation in the fewest float32 operations, with no thought for speed.

Every query gathers its whole block table, so time and memory grow with the table's width. The
fast implementations are compared with these, and these with dense numpy in the tests.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.pool_parts import Pool, arrays_of, parts_of, pool_like
from pallas_kernels.quantize_kv import new_content


def write_kv(
    kv_pool: Pool,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    kv_scales: jax.Array | None,
) -> Pool:
    """Write one token after the other."""
    block_size = parts_of(kv_pool).keys.shape[3]
    content = new_content(kv_pool, k, v, kv_scales)

    def write_token(t: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        block, offset = slot_mapping[t] // block_size, slot_mapping[t] % block_size
        pairs = zip(arrays, content, strict=True)
        return tuple(array.at[block, :, :, offset].set(new[t]) for array, new in pairs)

    written = jax.lax.fori_loop(0, k.shape[0], write_token, arrays_of(kv_pool))
    return pool_like(kv_pool, written)


def paged_decode_attention(
    q: jax.Array,
    kv_pool: Pool,
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
    kv_pool: Pool,
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
    pool = parts_of(kv_pool)
    blocks, _, kv_heads, block_size, _ = pool.keys.shape
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

    table = jnp.clip(block_tables[seq], 0, blocks - 1)

    def read(array: jax.Array, index: int, scales: jax.Array | None) -> jax.Array:
        x = array[table, index].astype(jnp.float32)
        x = jnp.moveaxis(x, 1, 2).reshape(tokens, kv_heads, context, head_dim)
        x = x if scales is None else x * scales[None, :, None, None]
        return jnp.repeat(x, q_heads // kv_heads, axis=1)

    key_scales, value_scales = pool.scales(kv_scales)
    k, v = read(pool.keys, 0, key_scales), read(pool.values, pool.value_index, value_scales)
    v = jnp.where(visible[..., None], v, 0.0)  # 0 * NaN would be NaN

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
