"""Paged attention in plain XLA: the default on a CPU, and the fallback on any GPU.

Both attention ops walk the context in chunks with an online softmax (Milakov and Gimelshein,
arXiv:1805.02867) in float32. The number of chunks is a run-time value, so the cost follows the
contexts that are really there and temporary memory depends neither on the pool's size nor on the
width of the block table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool_parts import Pool, PoolParts, arrays_of, parts_of, pool_like
from pallas_kernels.quantize_kv import new_content

CHUNK_TOKENS = 128  # context positions per iteration; with the next, best of 128-512 on two cores
TILE_ROWS = 32  # query rows of one sequence per iteration of prefill; best of 16-128


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What every score goes through; arrays are traced, the rest is static."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: jax.Array | None
    kv_scales: jax.Array | None
    return_lse: bool


def write_kv(
    kv_pool: Pool,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    kv_scales: jax.Array | None,
) -> Pool:
    """One scatter for each array; in place when the pool is donated."""
    block_size = parts_of(kv_pool).keys.shape[3]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    # Indexing by block keeps every index small where a flat slot * width would pass 2**31.
    arrays = zip(arrays_of(kv_pool), new_content(kv_pool, k, v, kv_scales), strict=True)
    written = (array.at[block, :, :, offset].set(new, mode="drop") for array, new in arrays)
    return pool_like(kv_pool, tuple(written))


def add_rms_norm(
    x: jax.Array, delta: jax.Array, scale: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.add_rms_norm`."""
    total = (x.astype(jnp.float32) + sum_of_pieces(delta)).astype(x.dtype)
    return total, rms_norm(total, scale, eps, x.dtype)


def sum_of_pieces(pieces: jax.Array) -> jax.Array:
    """The sum over the first axis, float32."""
    return jnp.sum(pieces, axis=0, dtype=jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, dtype: Any) -> jax.Array:
    """The last axis normalised in float32, then rounded to `dtype`, then times `scale`."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = (wide * lax.rsqrt(mean_square + eps)).astype(dtype)
    return normed * scale.astype(dtype).reshape((1,) * (x.ndim - 1) + scale.shape)


def paged_decode_attention(
    q: jax.Array,
    kv_pool: Pool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    **options: Any,
) -> Any:
    """See `pallas_kernels.paged_decode_attention`; every default is filled in by the caller."""
    opts = _Options(**options)
    out, lse = _decode(q, parts_of(kv_pool), block_tables, seq_lens, opts)
    return (out, lse) if opts.return_lse else out


def paged_prefill_attention(
    q: jax.Array,
    kv_pool: Pool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    **options: Any,
) -> Any:
    """See `pallas_kernels.paged_prefill_attention`; every default is filled in by the caller.

    Sequences that own a single row are computed together as decodes, the others tile by tile: a
    mixed batch pays for neither a tile per decode nor a whole batch per tile.
    """
    opts = _Options(**options)
    rows = query_start[1:] - query_start[:-1]
    pool = parts_of(kv_pool)
    out, lse = _prefill_tiles(q, pool, block_tables, seq_lens, query_start, rows, opts)

    single_lens = jnp.where(rows == 1, seq_lens, 0)
    single_row = jnp.where(rows == 1, query_start[:-1], q.shape[0])  # out of range: dropped below
    row_q = q.at[single_row].get(mode="fill", fill_value=0)
    row_out, row_lse = _decode(row_q, pool, block_tables, single_lens, opts)
    out = out.at[single_row].set(row_out, mode="drop")
    lse = lse.at[single_row].set(row_lse, mode="drop")
    return (out, lse) if opts.return_lse else out


def _decode(
    q: jax.Array, pool: PoolParts, block_tables: jax.Array, seq_lens: jax.Array, opts: _Options
) -> tuple[jax.Array, jax.Array]:
    """All sequences side by side, one chunk of each per iteration."""
    seqs, q_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    kv_heads = pool.keys.shape[2]
    group = q_heads // kv_heads
    chunk = _chunk_tokens(pool, block_tables)
    grouped = q.reshape(seqs, -1, kv_heads, group, head_dim).swapaxes(1, 2)
    rows = grouped.shape[2]  # queries of one sequence: its last positions
    grouped = grouped.reshape(seqs, kv_heads, rows * group, head_dim).astype(jnp.float32)
    position = seq_lens[:, None] - rows + jnp.arange(rows, dtype=jnp.int32)[None, :]
    first, end = _chunk_range(jnp.maximum(position, 0), position, chunk, opts.window)
    state = _init_state((seqs, kv_heads, rows * group), head_dim)

    def body(i: jax.Array, state: _State) -> _State:
        start = (first + i) * chunk  # each sequence starts where its own window does
        k, v, key_position = _gather(pool, block_tables, start, seq_lens, chunk, opts)
        visible = _visible(position, key_position, opts.window)  # [seqs, rows, chunk]
        return _attend(state, grouped, k, v, jnp.repeat(visible, group, axis=1)[:, None], opts)

    state = lax.fori_loop(0, jnp.max(end - first, initial=0), body, state)
    state = jax.tree.map(lambda x: x.reshape(seqs, kv_heads, rows, group, *x.shape[3:]), state)
    sinks = None if opts.sinks is None else opts.sinks.reshape(1, kv_heads, 1, group)
    out, lse = (x.swapaxes(1, 2) for x in _finish(state, sinks))
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:-1])


def _prefill_tiles(
    q: jax.Array,
    pool: PoolParts,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    rows: jax.Array,
    opts: _Options,
) -> tuple[jax.Array, jax.Array]:
    """Tiles of query rows one after the other; sequences of a single row are left 0."""
    tokens, q_heads, head_dim = q.shape
    kv_heads = pool.keys.shape[2]
    group = q_heads // kv_heads
    tile_rows = min(TILE_ROWS, tokens)
    chunk = _chunk_tokens(pool, block_tables)
    tile_end = jnp.cumsum(jnp.where(rows > 1, -(-rows // tile_rows), 0))
    # A tile may hang over the end of the array; its rows past the sequence are masked.
    padded_q = jnp.pad(q, ((0, tile_rows), (0, 0), (0, 0)))
    out = jnp.zeros((tokens + tile_rows, q_heads, head_dim), q.dtype)
    lse = jnp.full((tokens + tile_rows, q_heads), -jnp.inf, jnp.float32)
    row = jnp.arange(tile_rows, dtype=jnp.int32)
    sinks = None if opts.sinks is None else opts.sinks.reshape(1, kv_heads, 1, group)

    def tile_body(tile: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
        out, lse = carry
        seq = jnp.searchsorted(tile_end, tile, side="right").astype(jnp.int32)
        tiles = -(-rows[seq] // tile_rows)
        offset = (tile - (tile_end[seq] - tiles)) * tile_rows  # first row, within the sequence
        start_row = query_start[seq] + offset
        mine = offset + row < rows[seq]
        length = lax.dynamic_slice_in_dim(seq_lens, seq, 1)
        # Positions of the tile's rows; -1 sees nothing.
        position = jnp.where(mine, length - rows[seq] + offset + row, -1)[None, :]
        table = lax.dynamic_slice_in_dim(block_tables, seq, 1)

        tile_q = lax.dynamic_slice_in_dim(padded_q, start_row, tile_rows).astype(jnp.float32)
        tile_q = tile_q.reshape(1, tile_rows, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
        tile_q = tile_q.reshape(1, kv_heads, tile_rows * group, head_dim)
        lowest = jnp.where(mine[None, :], position, jnp.iinfo(jnp.int32).max)
        first, end = _chunk_range(lowest, position, chunk, opts.window)

        def chunk_body(i: jax.Array, state: _State) -> _State:
            start = (first + i) * chunk
            k, v, key_position = _gather(pool, table, start, length, chunk, opts)
            visible = _visible(position, key_position, opts.window)  # [1, tile_rows, chunk]
            visible = jnp.repeat(visible, group, axis=1)[:, None]
            return _attend(state, tile_q, k, v, visible, opts)

        state = _init_state((1, kv_heads, tile_rows * group), head_dim)
        state = lax.fori_loop(0, (end - first)[0], chunk_body, state)
        state = jax.tree.map(
            lambda x: x.reshape(1, kv_heads, tile_rows, group, *x.shape[3:]), state
        )
        tile_out, tile_lse = _finish(state, sinks)
        tile_out = tile_out[0].swapaxes(0, 1).reshape(tile_rows, q_heads, head_dim)
        tile_lse = tile_lse[0].swapaxes(0, 1).reshape(tile_rows, q_heads)
        out = _put_rows(out, tile_out.astype(q.dtype), start_row, mine[:, None, None])
        lse = _put_rows(lse, tile_lse, start_row, mine[:, None])
        return out, lse

    out, lse = lax.fori_loop(0, tile_end[-1], tile_body, (out, lse))
    return out[:tokens], lse[:tokens]


def _put_rows(rows: jax.Array, new: jax.Array, start: jax.Array, mask: jax.Array) -> jax.Array:
    """Overwrite the masked rows from `start` on; the others belong to a neighbour."""
    old = lax.dynamic_slice_in_dim(rows, start, new.shape[0])
    return lax.dynamic_update_slice_in_dim(rows, jnp.where(mask, new, old), start, axis=0)


def _chunk_tokens(pool: PoolParts, block_tables: jax.Array) -> int:
    """Context positions per iteration: whole blocks, no more than the table holds."""
    block_size = pool.keys.shape[3]
    return block_size * min(max(1, CHUNK_TOKENS // block_size), block_tables.shape[1])


def _chunk_range(
    lowest: jax.Array, highest: jax.Array, chunk: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """First and exclusive last chunk that queries at these positions `[seqs, rows]` can see."""
    end = -(-(jnp.max(highest, axis=1) + 1) // chunk)
    if window is None:
        return jnp.zeros_like(end), end
    first = jnp.maximum(jnp.min(lowest, axis=1) - window + 1, 0) // chunk
    return jnp.minimum(first, end), end


def _gather(
    pool: PoolParts,
    block_tables: jax.Array,
    start: jax.Array,
    seq_lens: jax.Array,
    chunk: int,
    opts: _Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values at `start .. start + chunk` of each sequence, and their positions.

    Returns:
        float32 `[seqs, kv_heads, chunk, head_dim]` twice, positions int32 `[seqs, chunk]`. Values
        at unused slots are 0: a weight of 0 would not silence a NaN there.
    """
    _, _, kv_heads, block_size, head_dim = pool.keys.shape
    seqs, max_blocks = block_tables.shape
    column = start[:, None] // block_size + jnp.arange(chunk // block_size, dtype=jnp.int32)[None]
    block = jnp.take_along_axis(block_tables, jnp.minimum(column, max_blocks - 1), axis=1)
    # Columns past the last used block may hold anything; they read the null block.
    block = jnp.where(column * block_size < seq_lens[:, None], block, 0)[:, None, :]
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    position = start[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
    used = position < seq_lens[:, None]

    def read(array: jax.Array, index: int, scales: jax.Array | None) -> jax.Array:
        x = array.at[block, index, head].get(mode="clip")  # [seqs, kv_heads, n, block_size, dim]
        x = x.reshape(seqs, kv_heads, chunk, head_dim).astype(jnp.float32)
        return x if scales is None else x * scales.reshape(1, kv_heads, 1, 1)

    key_scales, value_scales = pool.scales(opts.kv_scales)
    keys = read(pool.keys, 0, key_scales)
    values = read(pool.values, pool.value_index, value_scales)
    return keys, jnp.where(used[:, None, :, None], values, 0.0), position


def _visible(position: jax.Array, key_position: jax.Array, window: int | None) -> jax.Array:
    """Which keys `[seqs, chunk]` a query position `[seqs, rows]` may see: `[seqs, rows, chunk]`."""
    query, key = position[:, :, None], key_position[:, None, :]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


_State = tuple[jax.Array, jax.Array, jax.Array]  # unnormalised output, maximum, denominator


def _init_state(rows: tuple[int, ...], head_dim: int) -> _State:
    return (
        jnp.zeros((*rows, head_dim), jnp.float32),
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )


def _attend(
    state: _State, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, opts: _Options
) -> _State:
    """Fold one chunk into the online softmax; q `[seqs, kv_heads, rows, head_dim]`."""
    acc, peak, total = state
    precision = lax.Precision.HIGHEST
    # Keys on the left: with few query rows that product is four times faster on a CPU.
    scores = jnp.einsum("shcd,shrd->shcr", k, q, precision=precision).swapaxes(2, 3) * opts.scale
    if opts.soft_cap is not None:
        scores = opts.soft_cap * jnp.tanh(scores / opts.soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
    shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)  # nothing visible yet
    weights = jnp.exp(scores - shift[..., None])
    fade = jnp.exp(peak - shift)
    acc = acc * fade[..., None] + jnp.einsum("shrc,shcd->shrd", weights, v, precision=precision)
    return acc, new_peak, total * fade + jnp.sum(weights, axis=-1)


def _finish(state: _State, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Normalise; a row that saw nothing becomes 0, with lse -inf."""
    acc, peak, total = state
    if sinks is not None:
        new_peak = jnp.where(peak == -jnp.inf, peak, jnp.maximum(peak, sinks))
        shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        fade = jnp.exp(peak - shift)
        seen = jnp.where(new_peak == -jnp.inf, 0.0, jnp.exp(sinks - shift))
        acc, peak, total = acc * fade[..., None], new_peak, total * fade + seen
    out = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out, peak + jnp.log(total)
