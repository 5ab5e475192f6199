"""Paged decode attention for Hopper GPUs, in Pallas Mosaic GPU.

Decoding is bound by the rate at which keys and values arrive, so everything serves that rate:

* The grid is persistent and each thread block works off an equal part of all tiles of keys in the
  batch (`decode_plan`). Its producer warpgroup runs ahead of the arithmetic by as many tiles as fit
  into shared memory, across the boundaries of sequences and heads: the stream never drains.
* A tile is gathered block by block through the block table by the tensor copy engine. The block
  ids of the next tile are read while this one is being requested.
* The products are transposed: keys are the M side of `S^T = K q^T` and head_dim the M side of
  `O^T = V^T P^T`, while the few query rows of a group are the N side, which may be as narrow as 8.
  Tensor cores then spend nothing on padding a group to 64 rows, and a softmax is four numbers per
  thread and tile.
* A context that several thread blocks share is put together by the last of them
  (`decode_mosaic_merge`); a second kernel would cost a fifth of a short call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_mosaic_stages import Problem, aligned, consume, produce
from pallas_kernels.decode_plan import DecodePlan, plan_decode
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.mosaic_registers import in_key_order
from pallas_kernels.tuning import MOSAIC_SUMS, DecodeConfig, decode_config


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
    plan: DecodePlan | None = None,
    config: DecodeConfig | None = None,
    interpret: Any = None,
) -> Any:
    """See `pallas_kernels.paged_decode_attention`; every default is filled in by the caller."""
    _check_supported(q, kv_pool)
    kv_heads, queries = kv_pool.shape[2], q.shape[1] if q.ndim == 4 else 1
    # Eight-bit keys and values are exact in float16, and converted to it on the way.
    compute = q.dtype if kv_scales is None else jnp.float16
    if config is None:
        config = decode_config("mosaic", q, kv_pool, block_tables)
    if kv_pool.dtype.itemsize == 1 and config.tile > 128:  # as many rows as `zero_rows` covers
        raise NotImplementedError(f"a float8 pool needs a tile of at most 128, got {config.tile}")
    problem = Problem(
        seqs=q.shape[0],
        queries=queries,
        q_heads=q.shape[-2],
        kv_heads=kv_heads,
        head_dim=q.shape[-1],
        block_size=kv_pool.shape[3],
        tile=config.tile,
        stages=config.stages,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        with_sinks=sinks is not None,
        with_scales=kv_scales is not None,
        with_lse=return_lse,
        interpret=interpret is not None,
    )
    parts = config.parts(kv_heads)
    planned = plan
    if planned is None:
        planned = plan_decode(seq_lens, tile=config.tile, parts=parts, window=problem.span)
    kernel = (problem, q.dtype, compute, kv_pool.dtype, planned.parts.shape[0], interpret)
    # All steps with prompts have the same one, whatever their number of tokens.
    call = lowered_once(_build, *kernel) if interpret is None else _build(*kernel)
    rows = _padded_rows(_by_head(q, problem).astype(compute), problem)
    if kv_scales is not None and interpret is None:
        rows = in_key_order(rows)
    query = jnp.arange(queries, dtype=jnp.int32)[:, None]
    out, lse, *_ = call(
        rows,
        kv_pool.reshape(-1, problem.head_dim),
        block_tables,
        planned.line,
        planned.parts,
        # Counters of the pieces of shared contexts. The kernel leaves them as it finds them, so
        # one array of zeros, which XLA fills once a program, serves all calls in it: they follow
        # each other on the device's one stream.
        jnp.zeros((planned.parts.shape[0], kv_heads), jnp.int32),
        *([] if queries == 1 else [_repeated(query, problem)]),
        *([] if sinks is None else [_repeated(sinks[None, :], problem)]),
        *([] if kv_scales is None else [kv_scales]),
    )
    out, lse = (_by_query(x, problem) for x in (out, lse))
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:-1])
    return (out, lse) if return_lse else out


def _by_head(q: jax.Array, problem: Problem) -> jax.Array:
    """Query rows in the order of the kernel: sequence, key/value head, query, head of the group."""
    shape = (problem.seqs, problem.queries, problem.kv_heads, -1, problem.head_dim)
    return jnp.swapaxes(q.reshape(shape), 1, 2).reshape(-1, problem.head_dim)


def _by_query(x: jax.Array, problem: Problem) -> jax.Array:
    """Inverse of `_by_head`."""
    group = problem.rows // problem.queries
    shape = (problem.seqs, problem.kv_heads, problem.queries, group, *x.shape[1:])
    return jnp.swapaxes(x.reshape(shape), 1, 2)


def _check_supported(q: jax.Array, kv_pool: jax.Array) -> None:
    head_dim, block_size = q.shape[-1], kv_pool.shape[3]
    rows = q.size // (q.shape[0] * kv_pool.shape[2] * head_dim)
    if not hasattr(plgpu, "InterpretGPUParams"):
        raise NotImplementedError(f"needs the Mosaic GPU of JAX 0.11, got {jax.__version__}")
    if q.dtype.itemsize != 2 or kv_pool.dtype not in (q.dtype, jnp.float8_e4m3fn):
        raise NotImplementedError(
            f"q must have 16 bits and the pool its dtype or float8_e4m3fn, "
            f"got {q.dtype} and {kv_pool.dtype}"
        )
    if kv_pool.dtype.itemsize == 1 and head_dim % 128:
        raise NotImplementedError(f"a float8 pool needs head_dim 128 or 256, got {head_dim}")
    if kv_pool.size // head_dim >= 2**31:
        raise NotImplementedError(f"rows of the pool are int32, got {kv_pool.size // head_dim}")
    if head_dim % 64 or head_dim > 256:
        raise NotImplementedError(f"head_dim must be 64, 128, 192 or 256, got {head_dim}")
    if rows * head_dim > MOSAIC_SUMS:
        raise NotImplementedError(
            f"at most {MOSAIC_SUMS // head_dim} queries of a sequence may share a key/value head, "
            f"got {rows}"
        )
    if block_size not in (8, 16, 32, 64, 128):
        raise NotImplementedError(f"block_size must be 8, 16, 32, 64 or 128, got {block_size}")


def _padded_rows(q: jax.Array, problem: Problem) -> jax.Array:
    """All query rows under each other; a copy of `columns` rows from any group stays inside."""
    rows, columns = problem.seqs * problem.seq_rows, problem.columns
    fits = aligned(problem.rows) and rows % columns == 0
    padded = rows if fits else -(-(rows + columns) // 8) * 8
    return jnp.pad(q.reshape(rows, problem.head_dim), ((0, padded - rows), (0, 0)))


def _repeated(x: jax.Array, problem: Problem) -> jax.Array:
    """What belongs to a query or a query head, under each other for all rows.

    A product's rows begin at a multiple of 8 in it: the kernel loads two at once, which faults at
    odd places.

    Args:
        x: broadcastable to `[queries, q_heads]`.
        problem: the call.
    """
    each = jnp.broadcast_to(x, (problem.queries, problem.q_heads))
    by_head = each.reshape(problem.queries, problem.kv_heads, -1).swapaxes(0, 1).reshape(-1)
    return jnp.tile(by_head, -(-(problem.row_period + problem.columns) // problem.seq_rows))


def _build(
    problem: Problem, dtype: Any, compute: Any, kv_dtype: Any, parts: int, interpret: Any
) -> Any:
    """The kernel.

    It takes query rows, pool rows, tables, line and parts of the plan, counters and, if any, what
    query each row is, sinks and scales; and returns out, lse, and the pieces of contexts.
    """
    rows, columns = problem.seqs * problem.seq_rows, problem.columns
    tile_shape = (problem.stages, problem.tile, problem.head_dim)
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    kv_tiled = (plgpu.TilingTransform((8, 128 // kv_dtype.itemsize)), plgpu.SwizzleTransform(128))
    several = problem.queries > 1
    num_inputs = 6 + several + problem.with_sinks + problem.with_scales
    per_column = (2, parts, problem.kv_heads, columns)
    piece = (*per_column[:3], problem.head_dim, columns)

    def body(*refs: Any) -> None:
        q_ref, kv_ref, table_ref, line_ref, plan_ref, counter_ref, *more = refs[:num_inputs]
        query_ref = more[0] if several else None
        sink_ref = more[several] if problem.with_sinks else None
        scale_ref = more[-1] if problem.with_scales else None
        out, lse, acc, peak, total, q, k, v, p, o, lse_row, flag, *bars = refs[num_inputs:]
        q_bar, k_bar, v_bar, k_free, v_free = bars
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _() -> None:
            sources = (q_ref, line_ref, plan_ref, query_ref, sink_ref, scale_ref)
            outputs = (out, lse, o, lse_row, (acc, peak, total), counter_ref, flag)
            barriers = (q_bar, k_bar, v_bar, k_free, v_free)
            consume(problem, sources, outputs, (q, k, v, p), barriers)

        @pl.when(warpgroup == 1)
        def _() -> None:
            sources = (kv_ref, table_ref, line_ref, plan_ref)
            produce(problem, sources, (k, v), (k_bar, v_bar, k_free, v_free))

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((rows, problem.head_dim), dtype),  # out
            jax.ShapeDtypeStruct((rows,), jnp.float32),  # lse
            jax.ShapeDtypeStruct(piece, jnp.float32),  # of a context that is shared: acc,
            jax.ShapeDtypeStruct(per_column, jnp.float32),  # peak
            jax.ShapeDtypeStruct(per_column, jnp.float32),  # and total
        ],
        scratch_types=[
            plgpu.SMEM((columns, problem.head_dim), compute, transforms=tiled),  # q
            plgpu.SMEM(tile_shape, kv_dtype, transforms=kv_tiled),  # k, a slot for each stage
            plgpu.SMEM(tile_shape, kv_dtype, transforms=kv_tiled),  # v
            plgpu.SMEM((columns, problem.tile), compute, transforms=tiled),  # p, the weights
            plgpu.SMEM((columns, problem.head_dim), dtype),  # o, on its way to out
            plgpu.SMEM((columns,), jnp.float32),  # lse_row
            plgpu.SMEM((1,), jnp.int32),  # flag, of `arrive`
            plgpu.Barrier(),  # q is there
            plgpu.Barrier(num_arrivals=problem.copies, num_barriers=problem.stages),  # k is there
            plgpu.Barrier(num_arrivals=problem.copies, num_barriers=problem.stages),  # v is there
            plgpu.Barrier(num_barriers=problem.stages),  # k has been used: its slot is free
            plgpu.Barrier(num_barriers=problem.stages),  # v has been used
        ],
        grid=(parts, problem.kv_heads),  # the last axis runs fastest
        grid_names=("part", "head"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
