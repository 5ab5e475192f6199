"""Sequences with one query row in a prefill call: the decode kernel's share of a mixed batch.

The prefill kernels work in tiles of query rows, and a sequence that owns a single row would take a
whole tile of every head. The decode kernel is made for such rows: it does no arithmetic for rows
that are not there, and divides one long context among many thread blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.pool_parts import Pool


def attend_mixed_batch(
    prefill: Callable[..., Any],
    decode: Callable[..., Any],
    q: jax.Array,
    kv_pool: Pool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    *,
    return_lse: bool,
    **options: Any,
) -> Any:
    """See `pallas_kernels.paged_prefill_attention`; every default is filled in by the caller.

    A batch of one sequence is not mixed: it is left to the prefill kernel, as is every case that
    the decode kernel declines.

    Args:
        prefill: a backend's `paged_prefill_attention`, which leaves the rows of sequences with one
            row unwritten if called with `single_rows=False`.
        decode: a backend's `paged_decode_attention`, of the same one or another.
        q: `[tokens, q_heads, head_dim]`.
        kv_pool: a pool in either form (`pallas_kernels.pool_parts`).
        block_tables: int32 `[seqs, max_blocks]`.
        seq_lens: int32 `[seqs]`.
        query_start: int32 `[seqs + 1]`.
        return_lse: also return the natural log-sum-exp, float32 `[tokens, q_heads]`.
        options: what both kernels take: scale, window, soft_cap, sinks, kv_scales.

    Raises:
        NotImplementedError: the prefill kernel does not support the case.
    """
    tokens, seqs = q.shape[0], seq_lens.shape[0]
    batch = (q, kv_pool, block_tables, seq_lens, query_start)
    if seqs < 2:
        return prefill(*batch, return_lse=return_lse, **options)
    single = query_start[1:] - query_start[:-1] == 1
    # The others read zeros and write nowhere: their places past the array are dropped, and distinct
    # like all, so that the scatter needs no atomics.
    row = jnp.where(single, query_start[:-1], tokens + jnp.arange(seqs, dtype=jnp.int32))
    row_q = q.at[row].get(mode="fill", fill_value=0)
    row_lens = jnp.where(single, seq_lens, 0)
    try:
        decoded = decode(row_q, kv_pool, block_tables, row_lens, return_lse=return_lse, **options)
    except NotImplementedError:
        return prefill(*batch, return_lse=return_lse, **options)
    rest = prefill(*batch, return_lse=return_lse, single_rows=False, **options)
    return jax.tree.map(
        lambda x, rows: x.at[row].set(rows, mode="drop", unique_indices=True), rest, decoded
    )
