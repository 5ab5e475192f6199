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
    block_size = pool.keys.shape[3]
    head = pl.program_id(0) * heads + jnp.arange(heads, dtype=jnp.int32)
    token = pl.program_id(1)
    slot = slot_ref[token]
    block, offset = slot // block_size, slot % block_size
    targets = ((pool.keys, 0), (pool.values, value_index))
    for row, (ref, (target, index)) in enumerate(zip((k_ref, v_ref), targets, strict=True)):
        scale = None
        if scale_refs and is_quantized(target.dtype):
            scale = scale_refs[0][row, head][:, None]
        for part in power_of_two_parts(ref.shape[2]):
            x = ref[token, head, part]
            target[block, index, head, offset, part] = to_pool_dtype(
                x, target.dtype, scale, rounded=rounded_to_integer
            )


def rounded_to_integer(x: jax.Array) -> jax.Array:
    """To the nearest integer, ties to even; Pallas Triton has no instruction for it."""
    low = jnp.floor(x)
    above = x - low
    odd = low - 2.0 * jnp.floor(low * 0.5) > 0.5
    return low + jnp.where((above > 0.5) | ((above == 0.5) & odd), 1.0, 0.0)
