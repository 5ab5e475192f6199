"""What the Triton kernels have in common: attention over one tile of keys, and the end of a row.

The softmax is computed online (Milakov and Gimelshein, arXiv:1805.02867), in powers of two.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.pool_parts import Pool, PoolParts, arrays_of, is_quantized

LOG2_E = math.log2(math.e)
# The running maximum before any key is seen: finite, so that masked scores (-inf) weigh 0.
LOWEST = -1e30


class Softmax(NamedTuple):
    """Sums over the keys seen so far.

    Attributes:
        accs: weighted values, float32 `[rows, part]` for each part of the head.
        peak: largest score of each row, in powers of two, float32 `[rows]`.
        total: sum of the weights relative to `peak`, float32 `[rows]`.
    """

    accs: tuple[jax.Array, ...]
    peak: jax.Array
    total: jax.Array

    @classmethod
    def start(cls, rows: int, dims: list[pl.Slice]) -> Softmax:
        """Before any key."""
        return cls(
            tuple(jnp.zeros((rows, part.size), jnp.float32) for part in dims),
            jnp.full((rows,), LOWEST, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
        )

    def add_sink(self, sink: jax.Array, where: Any = True) -> Softmax:
        """Let a logit without a value take part, in rows that have seen a key."""
        seen = where & (self.total > 0)
        weight = jnp.where(seen, jnp.exp2(sink * LOG2_E - self.peak), 0.0)
        return self._replace(total=self.total + weight)

    def finish(self, factor: Any) -> tuple[list[jax.Array], jax.Array]:
        """Outputs times `factor`, and the base-2 logarithms of the denominators.

        A row that has seen no key gets 0 and -inf, whatever was in the slots it was pointed at.
        """
        seen = self.total > 0
        safe = jnp.where(seen, self.total, 1.0)
        outs = [jnp.where(seen[:, None], acc * (factor / safe)[:, None], 0.0) for acc in self.accs]
        return outs, jnp.where(seen, self.peak + jnp.log2(safe), -jnp.inf)


def attend_tile(
    state: Softmax,
    q: list[jax.Array],
    pool: PoolParts,
    slots: tuple[Any, Any, Any],
    *,
    dims: list[pl.Slice],
    visible: jax.Array | None,
    factor: Any,
    soft_cap: float | None,
) -> Softmax:
    """Fold a tile of keys and values into the sums.

    Args:
        state: the sums so far.
        q: queries in the dtype of the products, `[rows, part]` for each part of the head.
        pool: references to keys and values.
        slots: block of each key, key/value head, and place of each key in its block.
        dims: the parts of the head, see `power_of_two_parts`.
        visible: bool, `[rows, tile]` or `[1, tile]`; every key is if None.
        factor: on the scores.
        soft_cap: as for `paged_decode_attention`.
    """
    block, head, slot = slots
    compute = q[0].dtype
    precision = _precision(compute)
    scores = jnp.zeros((q[0].shape[0], block.shape[0]), jnp.float32)
    for part, q_part in zip(dims, q, strict=True):
        k = pool.keys[block, 0, head, slot, part].astype(compute)
        scores += plt.dot(q_part, k, trans_b=True, precision=precision)
    if soft_cap is None:
        scores = scores * (factor * LOG2_E)
    else:
        scores = jnp.tanh(scores * (factor / soft_cap)) * (soft_cap * LOG2_E)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=1))
    fade = jnp.exp2(state.peak - peak)
    weights = jnp.exp2(scores - peak[:, None])
    total = state.total * fade + jnp.sum(weights, axis=1)
    compute = product_dtype(pool.values.dtype, pool.values.dtype)
    weights, precision = weights.astype(compute), _precision(compute)
    accs = []
    for part, acc in zip(dims, state.accs, strict=True):
        v = pool.values[block, pool.value_index, head, slot, part].astype(compute)
        accs.append(acc * fade[:, None] + plt.dot(weights, v, precision=precision))
    return Softmax(tuple(accs), peak, total)


def head_scales(pool: PoolParts, scale_ref: Any, head: Any) -> tuple[Any, Any]:
    """What a head's keys and values are to be multiplied by; 1 for those that are not quantized."""
    if scale_ref is None:
        return 1.0, 1.0
    keys, values = is_quantized(pool.keys.dtype), is_quantized(pool.values.dtype)
    return scale_ref[0, head] if keys else 1.0, scale_ref[1, head] if values else 1.0


def product_dtype(q_dtype: Any, kv_dtype: Any) -> Any:
    """Dtype of the products: one-byte numbers are exact in float16, and cheaper to get there."""
    return jnp.float16 if jnp.dtype(kv_dtype).itemsize == 1 else q_dtype


def _precision(dtype: Any) -> lax.Precision | None:
    """Of products of this dtype."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def store_rows(ref: Any, value: jax.Array, mask: jax.Array, *, interpret: bool) -> None:
    """Store the rows of the mask.

    The interpreter has no masked store: the other rows must repeat what one of the mask writes.
    """
    if interpret:
        ref[...] = value
    else:
        plt.store(ref, value, mask=mask)


def check_addresses(kv_pool: Pool) -> None:
    """Decline a pool that Triton cannot address, or a head that it cannot cut into parts.

    Raises:
        NotImplementedError: offsets are 32 bits up to 2**32 bytes, but count elements; the parts of
            a head have at least 16 columns.
    """
    for array in arrays_of(kv_pool):
        if array.dtype.itemsize == 1 and 2**31 < array.size <= 2**32:
            raise NotImplementedError(
                f"Triton addresses a pool of {array.size} one-byte elements with 32 bits, "
                "which wrap at 2**31"
            )
        if array.shape[4] % 16:
            raise NotImplementedError(f"head_dim must be a multiple of 16, got {array.shape[4]}")


def power_of_two_parts(size: int) -> list[pl.Slice]:
    """Cut a head into pieces that Triton can load: 80 is 64 + 16."""
    parts, start = [], 0
    while start < size:
        part = 1 << ((size - start).bit_length() - 1)
        parts.append(pl.ds(start, part))
        start += part
    return parts


def sum_of_pieces(ref: Any, *where: Any) -> jax.Array:
    """What a reference holds at an index behind its first axis, summed over that; float32."""
    pieces = [ref[piece, *where].astype(jnp.float32) for piece in range(ref.shape[0])]
    return functools.reduce(lambda a, b: a + b, pieces)
