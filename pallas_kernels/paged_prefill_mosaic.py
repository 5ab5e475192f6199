"""Ragged paged prefill attention for Hopper GPUs, in Pallas Mosaic GPU.

The schedule is FlashAttention 3's (arXiv:2407.08608): a producer warpgroup copies key and value
blocks through the block table with the tensor copy engine, two consumer warpgroups own 64 query
rows each and take turns on the tensor cores (one multiplies while the other is in its softmax).

Around that, for ragged batches over a paged cache:

* The grid is persistent: one thread block per multiprocessor walks a work list of (tile of 128
  query rows, query head) items, longest first, in boustrophedon order, so that all blocks end
  together. Barriers, pipeline slots and the alternation of the consumers run on across items: the
  keys of the next item arrive while the last one is being written.
* One tile of keys is `block_kv / block_size` copies that complete one barrier.
* Query rows are tokens of one head, not tokens times the heads of a group: whole tiles then load
  and store as one copy for any group size, 7 included, and the heads of a group run next to each
  other on different multiprocessors, so that they share their keys in the L2 cache.
* Only tiles at the ends of a sequence or at the diagonal are masked. A tile that holds rows of two
  sequences is stored from registers, only the rows that each owns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import prefill_plan
from pallas_kernels.prefill_mosaic_attend import consume
from pallas_kernels.prefill_mosaic_items import (
    CONSUMERS,
    TILE_ROWS,
    WARPGROUP_ROWS,
    Refs,
    Shape,
)
from pallas_kernels.prefill_mosaic_load import produce, produce_widened
from pallas_kernels.tuning import MosaicPrefillConfig, mosaic_prefill_config

__all__ = ["TILE_ROWS", "paged_prefill_attention"]

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
# Of one-byte pools: the copy engine swizzles rows of at least 32 bytes, and shared memory does not
# hold a tile of 256 columns both as it is and widened.
WIDENED_HEAD_DIMS = (64, 96, 128, 192)
BLOCK_SIZES = (16, 32, 64, 128)
# Registers of each thread of the producer and of the consumers. Widening keys and values takes more
# than copying them. All together must fit what a thread block of 384 threads is launched with,
# 168 each, or a warpgroup waits for ever for registers that nobody gives back.
COPYING_REGISTERS = (24, 240)
WIDENING_REGISTERS = (56, 224)


def paged_prefill_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    return_lse: bool = False,
    single_rows: bool = True,
    causal: bool = True,
    plan: jax.Array | None = None,
    config: MosaicPrefillConfig | None = None,
    interpret: Any = None,
) -> Any:
    """See `pallas_kernels.paged_prefill_attention` for the semantics; arguments are checked there.

    Args:
        q: `[tokens, q_heads, head_dim]`, bfloat16 or float16.
        kv_pool: `[blocks, 2, kv_heads, block_size, head_dim]`, q's dtype, float8_e4m3fn or int8.
        block_tables: int32 `[seqs, max_blocks]`.
        seq_lens: int32 `[seqs]`.
        query_start: int32 `[seqs + 1]`.
        scale: factor on the scores.
        window: visible positions per query, or None.
        soft_cap: bound of the scores, or None.
        sinks: float32 `[q_heads]`, or None.
        kv_scales: float32 `[2, kv_heads]` for a quantized pool, or None.
        return_lse: also return the natural log-sum-exp, float32 `[tokens, q_heads]`.
        single_rows: False leaves the rows of sequences that own exactly one unwritten, unless a
            given `plan` lists them.
        causal: see `prefill_plan.plan_prefill`; of no effect on a given `plan`.
        plan: `prefill_plan.plan_prefill(..., tile_rows=128)`; made from the lengths if None, or if
            `tokens` is not a multiple of 8 of at least 128.
        config: tile sizes; chosen from the shape if None.
        interpret: `plgpu.InterpretGPUParams()` to run on a CPU.

    Raises:
        NotImplementedError: a dtype, head size or block size that this kernel does not cover.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, block_size = kv_pool.shape[2:4]
    widens = kv_pool.dtype != q.dtype
    _check_supported(q, kv_pool)
    config = config or mosaic_prefill_config(tokens, q_heads, kv_heads, head_dim, TILE_ROWS)
    if kv_heads % config.head_sections:
        raise ValueError(f"{config.head_sections=} must divide {kv_heads=}")
    if widens and config.separate_output:  # its place holds the tiles before they are widened
        config = dataclasses.replace(config, separate_output=False)

    # Row tiles of the copy engine: at least one whole tile, and a multiple of 8 rows.
    alignment = prefill_plan.ROW_ALIGNMENT
    padded = max(TILE_ROWS, -(-tokens // alignment) * alignment)
    if padded != tokens:
        q = jnp.pad(q, ((0, padded - tokens), (0, 0), (0, 0)))
    if plan is None or padded != tokens:
        plan = prefill_plan.plan_prefill_traced(
            seq_lens,
            query_start,
            tokens=padded,
            tile_rows=TILE_ROWS,
            single_rows=single_rows,
            causal=causal,
        )
    shape = Shape(
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=jnp.dtype(q.dtype), kv_dtype=jnp.dtype(kv_pool.dtype), scale=scale, window=window,
        soft_cap=soft_cap, has_sinks=sinks is not None, return_lse=return_lse, config=config,
        interpret=interpret is not None,
    )  # fmt: skip
    operands = [q, kv_pool.reshape(-1, head_dim), block_tables, plan]
    operands += [x for x in (sinks, kv_scales) if x is not None]
    outputs = _build(shape, padded, plan.shape[0], interpret)(*operands)
    out = outputs[0][:tokens]
    if not return_lse:
        return out
    return out, _rows_of_tiles(outputs[1], plan, padded)[:tokens]


def _check_supported(q: jax.Array, kv_pool: jax.Array) -> None:
    if not hasattr(plgpu, "warp_map"):
        raise NotImplementedError(f"needs JAX 0.11, got {jax.__version__}")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"needs bfloat16 or float16 queries, got {q.dtype}")
    head_dims = HEAD_DIMS if kv_pool.dtype == q.dtype else WIDENED_HEAD_DIMS
    if q.shape[2] not in head_dims:
        raise NotImplementedError(
            f"head_dim must be in {head_dims} for a pool of {kv_pool.dtype}, got {q.shape[2]}"
        )
    if kv_pool.shape[3] not in BLOCK_SIZES:
        raise NotImplementedError(f"block_size must be in {BLOCK_SIZES}, got {kv_pool.shape[3]}")


def _rows_of_tiles(lse_tiles: jax.Array, work: jax.Array, tokens: int) -> jax.Array:
    """Gather `[q_heads, tiles * 128]` tile-wise values into `[tokens, q_heads]`."""
    row = work[:, prefill_plan.ROW, None] + jnp.arange(TILE_ROWS, dtype=jnp.int32)[None, :]
    owned = (row >= work[:, prefill_plan.LOW, None]) & (row < work[:, prefill_plan.HIGH, None])
    source = jnp.arange(row.size, dtype=jnp.int32).reshape(row.shape)
    target = jnp.where(owned, row, jnp.int32(tokens))
    index = jnp.zeros((tokens,), jnp.int32).at[target].set(source, mode="drop")
    return lse_tiles[:, index].T


def _build(shape: Shape, tokens: int, tiles: int, interpret: Any) -> Callable[..., list[jax.Array]]:
    """The kernel as a function of (q, pool rows, block_tables, plan, sinks and scales if any)."""
    out_type = [jax.ShapeDtypeStruct((tokens, shape.q_heads, shape.head_dim), shape.dtype)]
    if shape.return_lse:
        out_type.append(jax.ShapeDtypeStruct((shape.q_heads, tiles * TILE_ROWS), jnp.float32))
    scratch = {**_memory(shape), **_barriers(shape)}
    names = ["q_ref", "kv_ref", "tables_ref", "work_ref"]
    names += ["sinks_ref"] * shape.has_sinks + ["scales_ref"] * shape.converts
    names += ["out_ref"] + ["lse_ref"] * shape.return_lse + list(scratch)
    load = produce_widened if shape.converts else produce
    registers = WIDENING_REGISTERS if shape.converts else COPYING_REGISTERS

    def body(*refs: Any) -> None:
        by_name = dict(zip(names, refs, strict=True))
        if shape.converts_queries:
            by_name["q_smem"], by_name["wide_q_smem"] = by_name["q_smem"]
        else:
            by_name["wide_q_smem"] = by_name["q_smem"]
        bound = Refs(**by_name)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == CONSUMERS)
        def _producer() -> None:
            plgpu.set_max_registers(registers[0], action="decrease")
            load(shape, bound)

        @pl.when(warpgroup < CONSUMERS)
        def _consumer() -> None:
            plgpu.set_max_registers(registers[1], action="increase")
            consume(shape, bound, warpgroup)

    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=list(scratch.values()),
        grid=(shape.config.thread_blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )


def _memory(shape: Shape) -> dict[str, Any]:
    """Shared memory by its name in `Refs`."""
    config, columns = shape.config, shape.swizzle_columns

    def swizzled(dims: tuple[int, ...], dtype: Any, columns: int = columns) -> Any:
        layout = (
            plgpu.TilingTransform((8, columns)),
            plgpu.SwizzleTransform(columns * dtype.itemsize),
        )
        return plgpu.SMEM(dims, dtype, transforms=layout)

    rows = (CONSUMERS, WARPGROUP_ROWS, shape.head_dim)
    tiles = (config.stages, config.block_kv, shape.head_dim)
    queries = swizzled(rows, shape.dtype)
    if shape.converts_queries:  # in their place
        queries = plgpu.RefUnion(queries, swizzled(rows, shape.product_dtype))
    memory = {
        "q_smem": queries,
        "k_smem": swizzled(tiles, shape.product_dtype),
        "v_smem": swizzled(tiles, shape.product_dtype),
    }
    if config.separate_output:
        memory["o_smem"] = swizzled(rows, shape.dtype)
    if shape.converts:
        memory["raw_smem"] = swizzled((2, *tiles[1:]), shape.kv_dtype, shape.raw_columns)
    if shape.return_lse:
        memory["lse_smem"] = plgpu.SMEM(rows[:2], jnp.float32)
    return memory


def _barriers(shape: Shape) -> dict[str, Any]:
    """Barriers by their name in `Refs`."""
    stages = shape.config.stages
    filled = plgpu.Barrier(num_arrivals=1 if shape.converts else shape.copies, num_barriers=stages)
    freed = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages)
    each = plgpu.Barrier(num_barriers=CONSUMERS)
    barriers = {"q_full": each, "q_free": each, "turn": each}
    barriers |= {"k_full": filled, "v_full": filled, "k_free": freed, "v_free": freed}
    if shape.converts:
        barriers["raw_full"] = plgpu.Barrier(num_arrivals=shape.copies, num_barriers=2)
    else:
        barriers["tail_full"] = plgpu.Barrier(num_arrivals=shape.copies)
    return barriers
