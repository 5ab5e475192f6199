"""Decoding of sequences that begin with the same cached blocks (cascade attention).

Each decode would read the shared keys for itself. Here they are read once: the queries of all
sequences become the rows of a prefill over the shared positions, which every row sees as a whole,
so that tensor cores do the products. Heads of a group are rows, too. The positions are cut into
pieces, one for each multiprocessor that the rows and heads leave without work. A decode over the
positions that are left supplies the last partial result of each sequence, and all of them are
merged by their denominators, as in Juravsky et al. (arXiv:2402.05099).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.pool_parts import Pool, parts_of
from pallas_kernels.prefill_plan import ROW_ALIGNMENT
from pallas_kernels.tuning import core_count

# Shared positions are worked off in multiples of this, a multiple of the tiles of all kernels: a
# tile that is not full would need a mask. The rest is left to the decode.
GRANULE = 128
ROW_TILE = 128  # rows that a thread block of the prefill kernels computes at once
MOST_PIECES = 32


def attend_shared_prefix(
    prefill: Callable[..., Any],
    decode: Callable[..., Any],
    q: jax.Array,
    kv_pool: Pool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    shared_blocks: jax.Array,
    *,
    sinks: jax.Array | None,
    return_lse: bool,
    **options: Any,
) -> Any:
    """See `pallas_kernels.paged_decode_attention`; every default is filled in by the caller.

    Args:
        prefill: a kernel's `paged_prefill_attention`, which takes `causal=False`.
        decode: a `paged_decode_attention`.
        q: `[seqs, q_heads, head_dim]` or `[seqs, rows, q_heads, head_dim]`.
        kv_pool: a pool in either form (`pallas_kernels.pool_parts`).
        block_tables: int32 `[seqs, max_blocks]`.
        seq_lens: int32 `[seqs]`.
        shared_blocks: int32 scalar.
        sinks: float32 `[q_heads]` or None.
        return_lse: also return the natural log-sum-exp.
        options: what both kernels take: scale, window (None), soft_cap, kv_scales.

    Raises:
        NotImplementedError: one of the kernels does not support the case.
    """
    block_size = parts_of(kv_pool).keys.shape[3]
    granule = math.lcm(GRANULE, block_size)
    most = block_tables.shape[1] * block_size // granule  # granules that can be shared
    if most == 0:
        return decode(
            q, kv_pool, block_tables, seq_lens, sinks=sinks, return_lse=return_lse, **options
        )
    granules = jnp.minimum(shared_blocks * block_size // granule, most)
    shared = granules * granule  # positions
    longest = block_tables[jnp.argmax(seq_lens)]  # a row that is not padding, if there is one
    column = shared // block_size + jnp.arange(block_tables.shape[1], dtype=jnp.int32)
    own_tables = jnp.take(block_tables, column, axis=1, mode="clip")
    own_lens = jnp.maximum(seq_lens - shared, 0)
    own, own_lse = decode(q, kv_pool, own_tables, own_lens, sinks=None, return_lse=True, **options)
    outs, lses = _attend_pieces(
        prefill, q, kv_pool, longest, granules, granule=granule, most=most, options=options
    )
    lses = jnp.concatenate([lses, own_lse.reshape(1, *lses.shape[1:])])
    lses = jnp.where((seq_lens > 0)[None, :, None, None], lses, -jnp.inf)
    own = own.reshape(1, *outs.shape[1:])
    out, lse = _merge(outs, own, lses, sinks)
    out, lse = out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:-1])
    return (out, lse) if return_lse else out


def num_pieces(rows: int, kv_heads: int, cores: int) -> int:
    """Pieces of the shared positions: as many as keep the multiprocessors busy, and no more.

    Args:
        rows: queries of all sequences times the heads of a group.
        kv_heads: key/value heads.
        cores: multiprocessors of the device.
    """
    items = -(-rows // ROW_TILE) * kv_heads

    def cost(pieces: int) -> float:
        # Rounds of the grid, of a length of 1 / pieces; a piece more costs 2 % to set up and merge.
        return math.ceil(pieces * items / cores) / pieces * (1 + 0.02 * pieces)

    return min(range(1, MOST_PIECES + 1), key=cost)


def _attend_pieces(
    prefill: Callable[..., Any],
    q: jax.Array,
    kv_pool: Pool,
    table: jax.Array,
    granules: jax.Array,
    *,
    granule: int,
    most: int,
    options: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """Attention of all queries over each piece of the shared positions.

    Args:
        prefill: see `attend_shared_prefix`, as for `q`, `kv_pool` and `options`.
        q: likewise.
        kv_pool: likewise.
        table: int32 `[max_blocks]`, which begins with the shared blocks.
        granules: int32 scalar, the shared positions divided by `granule`.
        granule: positions; a multiple of the block size.
        most: the most granules that `table` holds.
        options: likewise.

    Returns:
        `[pieces, seqs, rows, q_heads, head_dim]` in q's dtype and the natural log-sum-exp, float32
        without the last axis. A piece without positions has 0 and -inf.
    """
    seqs, q_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    kv_heads, block_size = parts_of(kv_pool).keys.shape[2:4]
    group = q_heads // kv_heads
    folded = q.reshape(-1, kv_heads, group, head_dim).swapaxes(1, 2)
    folded = folded.reshape(-1, kv_heads, head_dim)  # (sequence, row, head of the group) rows
    rows = folded.shape[0]
    pieces = min(num_pieces(rows, kv_heads, core_count()), most)
    padding = -rows % ROW_ALIGNMENT
    folded = jnp.pad(folded, ((0, padding), (0, 0), (0, 0)))
    batch = jnp.tile(folded, (pieces, 1, 1))

    piece = jnp.arange(pieces, dtype=jnp.int32)
    length = -(-granules // pieces)
    lens = jnp.clip(granules - piece * length, 0, length) * granule
    blocks = granule // block_size
    column = jnp.arange(-(-most // pieces) * blocks, dtype=jnp.int32)
    column = (piece * length * blocks)[:, None] + column[None, :]
    tables = jnp.take(table, column, mode="clip")
    start = jnp.arange(pieces + 1, dtype=jnp.int32) * (rows + padding)
    outs, lses = prefill(
        batch, kv_pool, tables, lens, start, sinks=None, return_lse=True, causal=False, **options
    )

    def unfold(x: jax.Array) -> jax.Array:
        x = x.reshape(pieces, rows + padding, *x.shape[1:])[:, :rows]
        x = x.reshape(pieces, rows // group, group, *x.shape[2:]).swapaxes(2, 3)
        return x.reshape(pieces, seqs, -1, q_heads, *x.shape[4:])

    return unfold(outs), unfold(lses)


def _merge(
    outs: jax.Array, own: jax.Array, lses: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Weighted mean of the pieces and the own result; `lses` has both, own last."""
    peak = jnp.max(lses, axis=0)
    if sinks is not None:
        peak = jnp.maximum(peak, jnp.where(peak == -jnp.inf, peak, sinks[None, None, :]))
    finite = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(lses - finite[None])
    total = jnp.sum(weights, axis=0)
    if sinks is not None:
        total = total + jnp.where(total > 0, jnp.exp(sinks[None, None, :] - finite), 0.0)
    weights = weights / jnp.where(total > 0, total, 1.0)[None]
    weights = weights[..., None]
    out = jnp.sum(outs.astype(jnp.float32) * weights[:-1], axis=0)
    out = out + own[0].astype(jnp.float32) * weights[-1]
    return out, finite + jnp.log(total)
