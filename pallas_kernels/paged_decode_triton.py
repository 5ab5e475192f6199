"""Paged decode attention in Pallas Triton, for GPUs without the Mosaic kernel's instructions.

Each program works off an equal part of the batch's tiles of keys (`decode_plan`), one segment
after the other. Block ids are read one iteration ahead and carried through the loop: Triton
pipelines a load only if its address does not hang on another load of the same iteration.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.decode_merge import merge_parts
from pallas_kernels.decode_plan import (
    BEGIN,
    Column,
    DecodePlan,
    first_tile,
    plan_decode,
    visible_tiles,
)
from pallas_kernels.pool_parts import Pool, PoolParts, parts_of
from pallas_kernels.triton_attention import (
    LOG2_E,
    Softmax,
    attend_tile,
    check_addresses,
    head_scales,
    power_of_two_parts,
    product_dtype,
    store_rows,
)
from pallas_kernels.tuning import DecodeConfig, decode_config


def paged_decode_attention(
    q: jax.Array,
    kv_pool: Pool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    return_lse: bool,
    plan: DecodePlan | None = None,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> Any:
    """See `pallas_kernels.paged_decode_attention`; every default is filled in by the caller."""
    check_addresses(kv_pool)
    seqs, q_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    rows = q.reshape(seqs, -1, q_heads, head_dim)
    pool = parts_of(kv_pool)
    kv_heads = pool.keys.shape[2]
    if config is None:
        config = decode_config("triton", q, pool.keys, block_tables)
    span = None if window is None else window + rows.shape[1] - 1
    if plan is None:
        parts = config.parts(kv_heads)
        planned = plan_decode(seq_lens, tile=config.tile, parts=parts, window=span)
    else:
        planned = plan
    parts, product_rows = planned.parts.shape[0], rows.shape[1] * (q_heads // kv_heads)
    padded_rows = max(16, pl.next_power_of_2(product_rows))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    kernel = functools.partial(
        _decode_kernel,
        value_index=pool.value_index,
        tile=config.tile,
        padded_rows=padded_rows,
        scale=scale,
        window=window,
        span=span,
        soft_cap=soft_cap,
        with_sinks=sinks is not None,
        with_scales=kv_scales is not None,
        interpret=interpret,
    )
    extras = [x for x in (sinks, kv_scales) if x is not None]
    out, lse, part, part_lse = pl.pallas_call(
        kernel,
        grid=(kv_heads, parts),  # heads of one part next to each other
        in_specs=[whole] * (6 + len(extras)),
        out_specs=[whole] * 4,
        out_shape=[
            jax.ShapeDtypeStruct(rows.shape, q.dtype),
            jax.ShapeDtypeStruct(rows.shape[:3], jnp.float32),
            jax.ShapeDtypeStruct((2, parts, kv_heads, product_rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((2, parts, kv_heads, product_rows), jnp.float32),
        ],
        interpret=interpret,
        name="paged_decode",
        compiler_params=plt.CompilerParams(
            # A warp holds the sums of 16 rows without spilling.
            num_warps=max(config.num_warps, min(16, padded_rows // 16)),
            num_stages=config.stages,
        ),
    )(rows, pool.keys, pool.values, block_tables, planned.line, planned.parts, *extras)
    out, lse = merge_parts(out, lse, part, part_lse, planned.parts, sinks, interpret=interpret)
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:-1])
    return (out, lse) if return_lse else out


def _decode_kernel(
    q_ref: Any,
    key_ref: Any,
    value_ref: Any,
    table_ref: Any,
    line_ref: Any,
    plan_ref: Any,
    *refs: Any,
    value_index: int,
    tile: int,
    padded_rows: int,
    scale: float,
    window: int | None,
    span: int | None,
    soft_cap: float | None,
    with_sinks: bool,
    with_scales: bool,
    interpret: bool,
) -> None:
    sink_ref = refs[0] if with_sinks else None
    scale_ref = refs[int(with_sinks)] if with_scales else None
    out_ref, lse_ref, part_ref, part_lse_ref = refs[-4:]
    seqs, queries, q_heads, head_dim = q_ref.shape
    kv_heads, block_size = key_ref.shape[2:4]
    pool = PoolParts(key_ref, value_ref, value_index)
    group = q_heads // kv_heads
    dims = power_of_two_parts(head_dim)
    compute = product_dtype(q_ref.dtype, key_ref.dtype)
    head, plan_row = pl.program_id(0), pl.program_id(1)
    row = jnp.arange(padded_rows, dtype=jnp.int32)
    real = row < queries * group
    row = jnp.minimum(row, queries * group - 1)  # padding rows repeat the last one
    query, heads = row // group, head * group + row % group
    key = jnp.arange(tile, dtype=jnp.int32)
    put = functools.partial(store_rows, interpret=interpret)

    def put_row(seq: jax.Array, outs: Any, lse: jax.Array) -> None:
        for part, out in zip(dims, outs, strict=True):
            put(out_ref.at[seq, query, heads, part], out.astype(out_ref.dtype), real[:, None])
        put(lse_ref.at[seq, query, heads], lse, real)

    def zero(i: jax.Array, carry: jax.Array) -> jax.Array:
        seq = line_ref[plan_ref[plan_row, Column.EMPTY_PLACE] + i, 0]
        zeros = [jnp.zeros((padded_rows, part.size), jnp.float32) for part in dims]
        put_row(seq, zeros, jnp.full((padded_rows,), -jnp.inf, jnp.float32))
        return carry

    lax.fori_loop(0, plan_ref[plan_row, Column.EMPTIES], zero, jnp.int32(0))

    def segment(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        line_place, seq, length, start_tile, done = carry
        tiles = visible_tiles(length, tile, span)
        count = jnp.minimum(tiles - start_tile, plan_ref[plan_row, Column.TILES] - done)
        base = (first_tile(length, tile, span) + start_tile) * tile
        oldest = 0 if span is None else jnp.maximum(length - span, 0)
        newest = jnp.maximum(length - 1, 0)
        q = [q_ref[seq, query, heads, part].astype(compute) for part in dims]
        key_scale, value_scale = head_scales(pool, scale_ref, head)
        factor = scale * key_scale

        def place(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            # Clamped to positions that a query sees: an unused slot, which may hold NaN, is never
            # read, and a masked weight of 0 always meets a finite value.
            position = jnp.clip(base + i * tile + key, oldest, newest)
            return table_ref[seq, position // block_size], position % block_size

        def visible(position: jax.Array) -> jax.Array:
            if queries == 1:
                return ((position >= oldest) & (position < length))[None, :]
            behind = (length - queries + query)[:, None] - position[None, :]
            return (behind >= 0) if window is None else (behind >= 0) & (behind < window)

        def step(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            state, (block, slot) = carry
            following = place(jnp.minimum(i + 1, count - 1))
            state = attend_tile(
                state, q, pool, (block, head, slot), dims=dims,
                visible=visible(base + i * tile + key), factor=factor, soft_cap=soft_cap,
            )  # fmt: skip
            return state, following

        init = (Softmax.start(padded_rows, dims), place(jnp.int32(0)))
        state, _ = lax.fori_loop(0, count, step, init)
        complete = count == tiles
        if sink_ref is not None:
            state = state.add_sink(sink_ref[heads], where=complete)
        outs, lse = state.finish(value_scale)

        @pl.when(complete)
        def _() -> None:
            put_row(seq, outs, lse / LOG2_E)

        @pl.when(jnp.logical_not(complete))
        def _() -> None:
            which = jnp.where(start_tile == 0, 0, 1)
            for part, out in zip(dims, outs, strict=True):
                put(part_ref.at[which, plan_row, head, row, part], out, real[:, None])
            put(part_lse_ref.at[which, plan_row, head, row], lse, real)

        following = jnp.minimum(line_place + 1, seqs - 1)
        seq, length = line_ref[following, 0], line_ref[following, 1]
        # The loop cannot carry a literal, hence the product.
        return following, seq, length, start_tile * 0, done + count

    begin = [plan_ref[plan_row, c] for c in BEGIN]
    lax.fori_loop(0, plan_ref[plan_row, Column.SEGMENTS], segment, (*begin, jnp.int32(0)))
