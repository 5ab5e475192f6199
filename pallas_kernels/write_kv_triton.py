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

from pallas_kernels.quantize_kv import to_pool_dtype
from pallas_kernels.triton_attention import check_addresses, power_of_two_parts

MOST_HEADS = 8  # of one program


def write_kv(
    kv_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    kv_scales: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.write_kv`; one program writes one token of some heads."""
    check_addresses(kv_pool)
    tokens, kv_heads, _ = k.shape
    heads = min(MOST_HEADS, kv_heads & -kv_heads)  # a power of two that divides them
    whole = pl.BlockSpec(memory_space=pl.ANY)
    extras = [] if kv_scales is None else [kv_scales]
    return pl.pallas_call(
        functools.partial(_write_kernel, heads=heads),
        grid=(kv_heads // heads, tokens),
        in_specs=[whole] * (4 + len(extras)),
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype),
        input_output_aliases={0: 0},
        interpret=interpret,
        name="write_kv",
        compiler_params=plt.CompilerParams(num_warps=2, num_stages=1),
    )(kv_pool, k, v, slot_mapping, *extras)


def _write_kernel(
    _pool_in_ref: Any, k_ref: Any, v_ref: Any, slot_ref: Any, *refs: Any, heads: int
) -> None:
    pool_ref, scale_ref = refs[-1], refs[0] if len(refs) > 1 else None
    block_size = pool_ref.shape[3]
    head = pl.program_id(0) * heads + jnp.arange(heads, dtype=jnp.int32)
    token = pl.program_id(1)
    slot = slot_ref[token]
    block, offset = slot // block_size, slot % block_size
    for index, ref in enumerate((k_ref, v_ref)):
        scale = None if scale_ref is None else scale_ref[index, head][:, None]
        for part in power_of_two_parts(ref.shape[2]):
            x = ref[token, head, part]
            pool_ref[block, index, head, offset, part] = to_pool_dtype(
                x, pool_ref.dtype, scale, rounded=_rounded
            )


def _rounded(x: jax.Array) -> jax.Array:
    """To the nearest integer, ties to even; Pallas Triton has no instruction for it."""
    low = jnp.floor(x)
    above = x - low
    odd = low - 2.0 * jnp.floor(low * 0.5) > 0.5
    return low + jnp.where((above > 0.5) | ((above == 0.5) & odd), 1.0, 0.0)
