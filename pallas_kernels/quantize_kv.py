"""Conversion of keys and values to the dtype of the pool."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pool_parts import Pool, arrays_of, is_quantized


def to_pool_dtype(
    x: jax.Array,
    dtype: np.dtype,
    scales: jax.Array | None,
    rounded: Callable[[jax.Array], jax.Array] = jnp.round,
) -> jax.Array:
    """Convert keys or values to the pool's dtype, dividing by their scales if it is quantized.

    Values outside the dtype's range are clamped before the cast: float32 above 464 would become
    NaN in float8_e4m3fn, whose largest number is 448.

    Args:
        x: any shape, floating point.
        dtype: dtype of the pool.
        scales: float32, broadcastable to `x` rank by rank; None for a pool that is not quantized.
        rounded: rounds float32 of up to 127 to the nearest integer.

    Returns:
        `x` in `dtype`; int8 is rounded to nearest, ties to even.
    """
    if scales is None:
        return x.astype(dtype)
    scaled = x.astype(jnp.float32) / scales
    if dtype == jnp.int8:
        return rounded(jnp.clip(scaled, -127.0, 127.0)).astype(dtype)
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -limit, limit).astype(dtype)


def new_content(
    kv_pool: Pool, k: jax.Array, v: jax.Array, kv_scales: jax.Array | None
) -> list[jax.Array]:
    """What goes into the slots of new tokens, for each array of the pool.

    Args:
        kv_pool: see `pallas_kernels.write_kv`, as for all arguments.
        k: likewise.
        v: likewise.
        kv_scales: likewise.

    Returns:
        `[tokens, 2, kv_heads, head_dim]`, or twice `[tokens, 1, kv_heads, head_dim]`, in the dtype
        of the array.
    """
    new = jnp.stack([k, v], axis=1)
    scales = None if kv_scales is None else kv_scales[None, :, :, None]
    content, start = [], 0
    for array in arrays_of(kv_pool):
        part = slice(start, start + array.shape[1])
        own = scales[:, part] if scales is not None and is_quantized(array.dtype) else None
        content.append(to_pool_dtype(new[:, part], array.dtype, own))
        start = part.stop
    return content
