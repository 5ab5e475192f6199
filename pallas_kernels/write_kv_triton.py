"""Writing keys and values into the pool in Pallas Triton.

XLA's scatter moves numbers one by one, this kernel rows of `head_dim`, and many of them at the
memory's rate: on an H200 the scatter takes 3 times as long for 512 tokens and 7 times for 2048
(`python -m benchmarks.bench_kernels write_kv`). Both write in place.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.pool_parts import (
    Pool,
    PoolParts,
    arrays_of,
    is_quantized,
    parts_of,
    pool_like,
)
from pallas_kernels.quantize_kv import to_pool_dtype
from pallas_kernels.triton_attention import check_addresses, power_of_two_parts

MOST_HEADS = 8  # of one program


def write_kv(
    kv_pool: Pool,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    kv_scales: jax.Array | None,
    *,
    interpret: bool = False,
) -> Pool:
    """See `pallas_kernels.write_kv`; one program writes one token of some heads."""
    check_addresses(kv_pool)
    tokens, kv_heads, _ = k.shape
    heads = min(MOST_HEADS, kv_heads & -kv_heads)  # a power of two that divides them
    whole = pl.BlockSpec(memory_space=pl.ANY)
    arrays = arrays_of(kv_pool)
    operands = [*arrays, k, v, slot_mapping, *([] if kv_scales is None else [kv_scales])]
    written = pl.pallas_call(
        functools.partial(
            _write_kernel, num_arrays=len(arrays), value_index=parts_of(kv_pool).value_index,
            heads=heads,
        ),
        grid=(kv_heads // heads, tokens),
        in_specs=[whole] * len(operands),
        out_specs=[whole] * len(arrays),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={index: index for index in range(len(arrays))},
        interpret=interpret,
        name="write_kv",
        compiler_params=plt.CompilerParams(num_warps=2, num_stages=1),
    )(*operands)  # fmt: skip
    return pool_like(kv_pool, tuple(written))


def _write_kernel(*refs: Any, num_arrays: int, value_index: int, heads: int) -> None:
    k_ref, v_ref, slot_ref, *scale_refs = refs[num_arrays:-num_arrays]
    pool = PoolParts(refs[-num_arrays], refs[-1], value_index)
    head = pl.program_id(0) * heads + jnp.arange(heads, dtype=jnp.int32)
    token = pl.program_id(1)
    slot = slot_ref[token]
    for row, ref in enumerate((k_ref, v_ref)):
        for part in power_of_two_parts(ref.shape[2]):
            store_heads(pool, row, slot, head, part, ref[token, head, part], *scale_refs)


def store_heads(
    pool: PoolParts,
    row: int,
    slot: jax.Array,
    head: jax.Array,
    part: Any,
    x: jax.Array,
    scale_ref: Any = None,
) -> None:
    """Write a part of some heads of one token into its slot, inside a kernel.

    Args:
        pool: references to keys and values.
        row: 0 for keys, 1 for values; also the row of the scales.
        slot: where the token goes.
        head: int32[heads].
        part: columns of the head, a slice.
        x: `[heads, part]`.
        scale_ref: reference to float32 `[2, kv_heads]`, if the pool has scales.
    """
    target, index = ((pool.keys, 0), (pool.values, pool.value_index))[row]
    block_size = target.shape[3]
    scale = None
    if scale_ref is not None and is_quantized(target.dtype):
        scale = scale_ref[row, head][:, None]
    target[slot // block_size, index, head, slot % block_size, part] = to_pool_dtype(
        x, target.dtype, scale, rounded=_rounded
    )


def _rounded(x: jax.Array) -> jax.Array:
    """To the nearest integer, ties to even; Pallas Triton has no instruction for it."""
    low = jnp.floor(x)
    above = x - low
    odd = low - 2.0 * jnp.floor(low * 0.5) > 0.5
    return low + jnp.where((above > 0.5) | ((above == 0.5) & odd), 1.0, 0.0)
