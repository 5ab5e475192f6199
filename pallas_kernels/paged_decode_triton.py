"""Paged decode attention in Pallas Triton, for GPUs without the Mosaic kernel's instructions.

Each program works off an equal part of the batch's tiles of keys (`decode_plan`), one segment
after the other. Block ids are read one iteration ahead and carried through the loop: Triton
pipelines a load only if its address does not hang on another load of the same iteration.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.decode_merge import merge_parts, power_of_two_parts
from pallas_kernels.decode_plan import Column, first_tile, plan_decode, visible_tiles
from pallas_kernels.tuning import DecodeConfig, decode_config

LOG2_E = math.log2(math.e)
# The running maximum before any key is seen: finite, so that masked scores (-inf) weigh 0.
LOWEST = -1e30


def paged_decode_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    return_lse: bool,
    plan: jax.Array | None = None,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> Any:
    """See `pallas_kernels.paged_decode_attention`; every default is filled in by the caller."""
    seqs, q_heads, head_dim = q.shape
    kv_heads = kv_pool.shape[2]
    if kv_pool.dtype.itemsize == 1 and 2**31 < kv_pool.size <= 2**32:
        raise NotImplementedError(
            f"Triton addresses a pool of {kv_pool.size} one-byte elements with 32 bits, "
            "which wrap at 2**31"
        )
    if head_dim % 16:
        raise NotImplementedError(f"head_dim must be a multiple of 16, got {head_dim}")
    if config is None:
        config = decode_config("triton", q, kv_pool, block_tables)
    if plan is None:
        parts = config.parts(kv_heads)
        planned = plan_decode(seq_lens, tile=config.tile, parts=parts, window=window)
    else:
        planned = plan
    parts, group = planned.shape[0], q_heads // kv_heads
    whole = pl.BlockSpec(memory_space=pl.ANY)
    kernel = functools.partial(
        _decode_kernel,
        tile=config.tile,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        with_sinks=sinks is not None,
        with_scales=kv_scales is not None,
        interpret=interpret,
    )
    extras = [x for x in (sinks, kv_scales) if x is not None]
    out, lse, part, part_lse = pl.pallas_call(
        kernel,
        grid=(kv_heads, parts),  # heads of one part next to each other
        in_specs=[whole] * (5 + len(extras)),
        out_specs=[whole] * 4,
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((seqs, q_heads), jnp.float32),
            jax.ShapeDtypeStruct((2, parts, kv_heads, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((2, parts, kv_heads, group), jnp.float32),
        ],
        interpret=interpret,
        name="paged_decode",
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.stages),
    )(q, kv_pool, block_tables, seq_lens, planned, *extras)
    out, lse = merge_parts(out, lse, part, part_lse, planned, sinks, interpret=interpret)
    return (out, lse) if return_lse else out


def _decode_kernel(
    q_ref: Any,
    kv_ref: Any,
    table_ref: Any,
    len_ref: Any,
    plan_ref: Any,
    *refs: Any,
    tile: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    with_sinks: bool,
    with_scales: bool,
    interpret: bool,
) -> None:
    sink_ref = refs[0] if with_sinks else None
    scale_ref = refs[int(with_sinks)] if with_scales else None
    out_ref, lse_ref, part_ref, part_lse_ref = refs[-4:]
    seqs, q_heads, head_dim = q_ref.shape
    kv_heads, block_size = kv_ref.shape[2:4]
    group = q_heads // kv_heads
    rows = max(16, pl.next_power_of_2(group))
    dims = power_of_two_parts(head_dim)
    compute = jnp.float16 if kv_ref.dtype.itemsize == 1 else q_ref.dtype
    precision = lax.Precision.HIGHEST if compute == jnp.float32 else None
    head, plan_row = pl.program_id(0), pl.program_id(1)
    row = jnp.arange(rows, dtype=jnp.int32)
    in_group = row < group
    row = jnp.minimum(row, group - 1)  # padding rows repeat the last one
    key = jnp.arange(tile, dtype=jnp.int32)

    def put(ref: Any, value: jax.Array, mask: jax.Array) -> None:
        if interpret:  # no masked store there; the padding rows write what the last row writes
            ref[...] = value
        else:
            plt.store(ref, value, mask=mask)

    def segment(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        seq, length, start_tile, done = carry
        tiles = visible_tiles(length, tile, window)
        count = jnp.minimum(tiles - start_tile, plan_ref[plan_row, Column.TILES] - done)
        base = (first_tile(length, tile, window) + start_tile) * tile
        oldest = 0 if window is None else jnp.maximum(length - window, 0)
        newest = jnp.maximum(length - 1, 0)
        heads = head * group + row
        q = [q_ref[seq, heads, part].astype(compute) for part in dims]
        factor = scale if scale_ref is None else scale * scale_ref[0, head]

        def place(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            # Clamped to positions that the query sees: an unused slot, which may hold NaN, is
            # never read, and a masked weight of 0 always meets a finite value.
            position = jnp.clip(base + i * tile + key, oldest, newest)
            return table_ref[seq, position // block_size], position % block_size

        def step(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            accs, peak, total, (block, offset) = carry
            following = place(jnp.minimum(i + 1, count - 1))
            scores = jnp.zeros((rows, tile), jnp.float32)
            for part, q_part in zip(dims, q, strict=True):
                k = kv_ref[block, 0, head, offset, part].astype(compute)
                scores += plt.dot(q_part, k, trans_b=True, precision=precision)
            if soft_cap is None:
                scores = scores * (factor * LOG2_E)
            else:
                scores = jnp.tanh(scores * (factor / soft_cap)) * (soft_cap * LOG2_E)
            position = base + i * tile + key
            visible = (position >= oldest) & (position < length)
            scores = jnp.where(visible[None, :], scores, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
            fade = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(scores - new_peak[:, None])
            total = total * fade + jnp.sum(weights, axis=1)
            weights = weights.astype(compute)
            accs = tuple(
                acc * fade[:, None]
                + plt.dot(
                    weights, kv_ref[block, 1, head, offset, part].astype(compute),
                    precision=precision,
                )
                for part, acc in zip(dims, accs, strict=True)
            )  # fmt: skip
            return accs, new_peak, total, following

        init = (
            tuple(jnp.zeros((rows, part.size), jnp.float32) for part in dims),
            jnp.full((rows,), LOWEST, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            place(jnp.int32(0)),
        )
        accs, peak, total, _ = lax.fori_loop(0, count, step, init)
        complete = count == tiles
        if sink_ref is not None:
            sink = sink_ref[heads] * LOG2_E
            total = total + jnp.where(complete & (total > 0), jnp.exp2(sink - peak), 0.0)
        seen = total > 0  # false in a padding row, where the null block may have held NaN
        safe = jnp.where(seen, total, 1.0)
        lse = jnp.where(seen, peak + jnp.log2(safe), -jnp.inf)
        factor = 1.0 if scale_ref is None else scale_ref[1, head]
        outs = [jnp.where(seen[:, None], acc * (factor / safe)[:, None], 0.0) for acc in accs]

        @pl.when(complete)
        def _() -> None:
            for part, out in zip(dims, outs, strict=True):
                put(out_ref.at[seq, heads, part], out.astype(out_ref.dtype), in_group[:, None])
            put(lse_ref.at[seq, heads], lse / LOG2_E, in_group)

        @pl.when(jnp.logical_not(complete))
        def _() -> None:
            which = jnp.where(start_tile == 0, 0, 1)
            for part, out in zip(dims, outs, strict=True):
                put(part_ref.at[which, plan_row, head, row, part], out, in_group[:, None])
            put(part_lse_ref.at[which, plan_row, head, row], lse, in_group)

        following = jnp.minimum(seq + 1, seqs - 1)
        # The loop cannot carry a literal, hence the product.
        return following, len_ref[following], start_tile * 0, done + count

    begin = [plan_ref[plan_row, c] for c in (Column.SEQ, Column.SEQ_LEN, Column.TILE)]
    lax.fori_loop(0, plan_ref[plan_row, Column.SEGMENTS], segment, (*begin, jnp.int32(0)))
