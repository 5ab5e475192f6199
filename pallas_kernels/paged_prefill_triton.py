"""Ragged paged prefill attention in Pallas Triton, for any GPU and for quantized pools.

One program computes one tile of a sequence's new tokens for all query heads of one key/value head:
its rows are (token, head of the group) pairs, so that keys are read once per group. The tiles come
from a work list (`prefill_plan`), longest first. Block ids are read one iteration ahead and carried
through the loop: Triton pipelines a load only if its address does not hang on another load of the
same iteration.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import prefill_plan
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
from pallas_kernels.tuning import TritonPrefillConfig, triton_prefill_config


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
    single_rows: bool = True,
    causal: bool = True,
    plan: jax.Array | None = None,
    config: TritonPrefillConfig | None = None,
    interpret: bool = False,
) -> Any:
    """See `pallas_kernels.paged_prefill_attention`; every default is filled in by the caller.

    `plan` is a work list for `tile_tokens` rows and no alignment, if the caller has made one; of
    the list made here, `single_rows=False` leaves out the sequences that own exactly one row, and
    `causal=False` lets every row see all positions of its sequence.
    """
    tokens, q_heads, head_dim = q.shape
    pool = parts_of(kv_pool)
    kv_heads = pool.keys.shape[2]
    check_addresses(kv_pool)
    config = config or triton_prefill_config(head_dim, q.dtype.itemsize)
    if plan is None:
        plan = prefill_plan.plan_prefill_traced(
            seq_lens,
            query_start,
            tokens=tokens,
            tile_rows=tile_tokens(config, q_heads // kv_heads),
            alignment=1,
            single_rows=single_rows,
            causal=causal,
        )
    extras = [x for x in (sinks, kv_scales) if x is not None]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if return_lse:
        outputs.append(jax.ShapeDtypeStruct((tokens, q_heads), jnp.float32))
    kernel = functools.partial(
        _prefill_kernel,
        value_index=pool.value_index,
        config=config,
        kv_heads=kv_heads,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        with_sinks=sinks is not None,
        with_scales=kv_scales is not None,
        with_lse=return_lse,
        interpret=interpret,
    )
    out = pl.pallas_call(
        kernel,
        grid=(kv_heads, plan.shape[0]),
        in_specs=[whole] * (5 + len(extras)),
        out_specs=[whole] * len(outputs),
        out_shape=outputs,
        interpret=interpret,
        name="paged_prefill",
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
    )(q, pool.keys, pool.values, block_tables, plan, *extras)
    return tuple(out) if return_lse else out[0]


def tile_tokens(config: TritonPrefillConfig, group: int) -> int:
    """Tokens of one tile: its rows shared by the heads of a group, rounded up to a power of two."""
    return max(1, config.rows // pl.next_power_of_2(group))


def _prefill_kernel(
    q_ref: Any,
    key_ref: Any,
    value_ref: Any,
    table_ref: Any,
    work_ref: Any,
    *refs: Any,
    value_index: int,
    config: TritonPrefillConfig,
    kv_heads: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    with_sinks: bool,
    with_scales: bool,
    with_lse: bool,
    interpret: bool,
) -> None:
    sink_ref = refs[0] if with_sinks else None
    scale_ref = refs[int(with_sinks)] if with_scales else None
    out_ref, lse_ref = (refs[-2], refs[-1]) if with_lse else (refs[-1], None)
    q_heads, head_dim = q_ref.shape[1:]
    block_size, block_kv = key_ref.shape[3], config.block_kv
    group = q_heads // kv_heads
    padded_group = pl.next_power_of_2(group)
    rows = tile_tokens(config, group) * padded_group
    dims = power_of_two_parts(head_dim)
    pool = PoolParts(key_ref, value_ref, value_index)
    compute = product_dtype(q_ref.dtype, key_ref.dtype)
    head, tile = pl.program_id(0), pl.program_id(1)
    key = jnp.arange(block_kv, dtype=jnp.int32)
    put = functools.partial(store_rows, interpret=interpret)  # clamped rows repeat their original

    @pl.when(tile < work_ref[0, prefill_plan.COUNT])
    def _() -> None:
        low, high = work_ref[tile, prefill_plan.LOW], work_ref[tile, prefill_plan.HIGH]
        offset, seq = work_ref[tile, prefill_plan.OFFSET], work_ref[tile, prefill_plan.SEQ]
        length = work_ref[tile, prefill_plan.SEQ_LEN]
        row = jnp.arange(rows, dtype=jnp.int32)
        member = jnp.minimum(row % padded_group, group - 1)
        token = jnp.minimum(low + row // padded_group, high - 1)
        owned = (row % padded_group < group) & (low + row // padded_group < high)
        heads = head * group + member
        position = token + offset
        q = [q_ref[token, heads, part].astype(compute) for part in dims]
        key_scale, value_scale = head_scales(pool, scale_ref, head)
        factor = scale * key_scale

        newest = jnp.minimum(high + offset, length) - 1  # last position that any row sees
        end = (newest + block_kv) // block_kv
        # Tiles full_first .. full_end - 1 are visible to every row.
        full_end = jnp.clip((low + offset + 1) // block_kv, 0, end)
        first = full_first = jnp.int32(0)
        if window is not None:
            first = jnp.clip((low + offset - (window - 1)) // block_kv, 0, end)
            full_first = jnp.clip((newest - window + block_kv) // block_kv, first, end)
            full_end = jnp.maximum(full_end, full_first)

        def place(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            # Clamped to positions of the sequence: an unused slot, which may hold NaN, is never
            # read, and a masked weight of 0 always meets a finite value.
            at = jnp.maximum(jnp.minimum(i * block_kv + key, newest), 0)
            return table_ref[seq, at // block_size], at % block_size

        def step(i: jax.Array, carry: tuple[Any, ...], *, masked: bool) -> tuple[Any, ...]:
            state, (block, slot) = carry
            following = place(i + 1)
            visible = None
            if masked:
                behind = position[:, None] - (i * block_kv + key)[None, :]
                visible = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
            state = attend_tile(
                state, q, pool, (block, head, slot), dims=dims, visible=visible, factor=factor,
                soft_cap=soft_cap,
            )  # fmt: skip
            return state, following

        carry = (Softmax.start(rows, dims), place(first))
        if window is not None:
            carry = lax.fori_loop(first, full_first, functools.partial(step, masked=True), carry)
        carry = lax.fori_loop(full_first, full_end, functools.partial(step, masked=False), carry)
        state, _ = lax.fori_loop(full_end, end, functools.partial(step, masked=True), carry)
        if sink_ref is not None:
            state = state.add_sink(sink_ref[heads])
        outs, lse = state.finish(value_scale)
        for part, out in zip(dims, outs, strict=True):
            put(out_ref.at[token, heads, part], out.astype(out_ref.dtype), owned[:, None])
        if lse_ref is not None:
            put(lse_ref.at[token, heads], lse / LOG2_E, owned)
