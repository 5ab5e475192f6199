"""Conversion of keys and values to the dtype of the pool."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


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
