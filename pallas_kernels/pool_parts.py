"""The two forms of a layer's pool: keys and values in one array, or in an array each.

One array `[blocks, 2, kv_heads, block_size, head_dim]` has keys at 0 and values at 1 of its second
axis. A pair of arrays `[blocks, 1, kv_heads, block_size, head_dim]`, keys first, may differ in
dtype: keys lose more by being compressed than values do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Pool = jax.Array | tuple[jax.Array, jax.Array]

QUANTIZED_DTYPES = (jnp.float8_e4m3fn, jnp.int8)


class PoolParts(NamedTuple):
    """Where keys and values are; arrays, or a kernel's references to them.

    Attributes:
        keys: keys are at 0 of its second axis.
        values: the same array, or the other one of a pair.
        value_index: where on its second axis the values are.
    """

    keys: Any
    values: Any
    value_index: int

    def scales(self, kv_scales: Any) -> tuple[Any, Any]:
        """What keys and values are to be multiplied by; None for those that are not quantized.

        Args:
            kv_scales: `[2, kv_heads]` or None.
        """
        arrays = (self.keys, self.values)
        key_scales, value_scales = (
            kv_scales[part] if kv_scales is not None and is_quantized(array.dtype) else None
            for part, array in enumerate(arrays)
        )
        return key_scales, value_scales


def parts_of(kv_pool: Pool) -> PoolParts:
    """Keys and values of a pool in either form."""
    if isinstance(kv_pool, tuple):
        keys, values = kv_pool
        return PoolParts(keys, values, 0)
    return PoolParts(kv_pool, kv_pool, 1)


def arrays_of(kv_pool: Pool) -> tuple[jax.Array, ...]:
    """Each array of a pool once."""
    return kv_pool if isinstance(kv_pool, tuple) else (kv_pool,)


def pool_like(kv_pool: Pool, arrays: tuple[jax.Array, ...]) -> Pool:
    """A pool in the form of another one, of what `arrays_of` gives."""
    if isinstance(kv_pool, tuple):
        keys, values = arrays
        return keys, values
    (joined,) = arrays
    return joined


def is_quantized(dtype: Any) -> bool:
    """Whether numbers of this dtype are stored divided by scales."""
    return np.dtype(dtype) in tuple(map(np.dtype, QUANTIZED_DTYPES))
