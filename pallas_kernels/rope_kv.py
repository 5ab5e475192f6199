"""From the rows of a layer's query-key-value product to what attention works with.

Between the product and attention lie a normalisation of queries and keys in some models, the
rotation, and the write of keys and values into the pool. One kernel does all of it: a decode step
has so few rows that what counts is the number of kernels.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import api, xla
from pallas_kernels.checks import check_pool, check_scales, check_shape, check_slot_mapping
from pallas_kernels.pool_parts import Pool, arrays_of, is_quantized, parts_of


def rotary_heads(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    dtype: jnp.dtype,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys, normalised if the model does so and rotated, and values.

    Rotation is that of arXiv:2104.09864 over pairs (i, i + head_dim / 2), normalisation that of
    arXiv:1910.07467 over each head; both compute in float32.

    Args:
        qkv: `[pieces, tokens, kv_heads, group + 2, head_dim]`: for each key/value head the queries
            that share it, then its key, then its value; a sum that is still in pieces, as a product
            with a divided inner dimension leaves it.
        cos: float32 `[tokens, head_dim / 2]`, of each token's angles.
        sin: like `cos`.
        dtype: of the results; a normalised head is rounded to it before it is scaled.
        q_norm: scales of the queries' normalisation, `[head_dim]`; None for no normalisation.
        k_norm: of the keys'; both or neither.
        eps: added to the mean square.

    Returns:
        `[tokens, kv_heads * group, head_dim]`, and twice `[tokens, kv_heads, head_dim]`.
    """
    qkv = xla.sum_of_pieces(qkv)
    tokens, kv_heads, rows, head_dim = qkv.shape
    group = rows - 2
    q = qkv[:, :, :group].reshape(tokens, kv_heads * group, head_dim)
    k, v = qkv[:, :, group], qkv[:, :, group + 1]
    if q_norm is not None and k_norm is not None:
        q, k = (xla.rms_norm(x, scale, eps, dtype) for x, scale in ((q, q_norm), (k, k_norm)))
    q, k = (_rotate(x, cos, sin).astype(dtype) for x in (q, k))
    return q, k, v.astype(dtype)


def rope_and_write_kv(
    kv_pool: Pool,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    *,
    dtype: jnp.dtype,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
    key_mean: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    implementation: api.Implementation | None = None,
) -> tuple[jax.Array, Pool]:
    """`rotary_heads`, and `write_kv` of its keys and values.

    Args:
        kv_pool: see `write_kv`, donated for an update in place.
        qkv: see `rotary_heads`, as for all that is not explained here.
        cos: likewise.
        sin: likewise.
        slot_mapping: see `write_kv`.
        dtype: likewise; that of the pool unless it is quantized.
        q_norm: likewise.
        k_norm: likewise.
        eps: likewise.
        key_mean: float32 `[kv_heads, head_dim]`, taken from the keys before they are written.
        kv_scales: see `write_kv`.
        implementation: "mosaic" and "triton" stand for the kernel, "xla" and "reference" for
            `rotary_heads` and that `write_kv`; None for the default.

    Returns:
        The queries `[tokens, kv_heads * group, head_dim]`, and the updated pool.

    Raises:
        ValueError: a shape or dtype does not fit; the text names got and wanted.
    """
    _check(kv_pool, qkv, cos, sin, slot_mapping, dtype, q_norm, k_norm, key_mean, kv_scales)
    return api.first_that_can(
        _lookup, ("triton", "xla", "reference"),
        "triton" if implementation == "mosaic" else implementation,
        kv_pool, qkv, cos, sin, slot_mapping, key_mean, kv_scales,
        q_norm=q_norm, k_norm=k_norm, eps=eps, dtype=dtype,
    )  # fmt: skip


def _lookup(name: str) -> Callable[..., tuple[jax.Array, Pool]]:
    """The function that implements `rope_and_write_kv`."""
    if name == "triton":
        return importlib.import_module("pallas_kernels.rope_kv_triton").rope_and_write_kv
    return functools.partial(_one_after_another, name)


def _one_after_another(
    implementation: str,
    kv_pool: Pool,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    key_mean: jax.Array | None,
    kv_scales: jax.Array | None,
    **normalisation: Any,
) -> tuple[jax.Array, Pool]:
    """`rotary_heads`, then an implementation of `write_kv`."""
    q, k, v = rotary_heads(qkv, cos, sin, **normalisation)
    if key_mean is not None:
        k, v = k.astype(jnp.float32) - key_mean[None], v.astype(jnp.float32)
    how: dict[str, Any] = {"kv_scales": kv_scales, "implementation": implementation}
    return q, api.write_kv(kv_pool, k, v, slot_mapping, **how)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn pair (i, i + dim / 2) of every head by the token's i-th angle, float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _check(
    kv_pool: Pool,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    dtype: jnp.dtype,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    key_mean: jax.Array | None,
    kv_scales: jax.Array | None,
) -> None:
    """Raise ValueError for whatever does not fit."""
    check_pool(kv_pool)
    _, _, kv_heads, _, head_dim = parts_of(kv_pool).keys.shape
    shape = qkv.shape
    if qkv.ndim != 5 or not shape[0] or shape[2::2] != (kv_heads, head_dim) or shape[3] < 3:
        raise ValueError(
            f"qkv must be [pieces, tokens, {kv_heads}, group + 2, {head_dim}] for this pool, "
            f"got {qkv.shape}"
        )
    if head_dim % 2:
        raise ValueError(f"rotation wants an even head_dim, got {head_dim}")
    tokens = qkv.shape[1]
    for name, angles in (("cos", cos), ("sin", sin)):
        check_shape(name, angles, (tokens, head_dim // 2), "[tokens, head_dim / 2]")
    check_slot_mapping(kv_pool, slot_mapping, tokens)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm go together, got one of them")
    for name, scale in (("q_norm", q_norm), ("k_norm", k_norm)):
        if scale is not None:
            check_shape(name, scale, (head_dim,), "[head_dim]")
    if key_mean is not None:
        check_shape("key_mean", key_mean, (kv_heads, head_dim), "[kv_heads, head_dim]")
    check_scales(kv_pool, kv_scales)
    for array in arrays_of(kv_pool):
        if not is_quantized(array.dtype) and array.dtype != dtype:
            raise ValueError(f"dtype must be the pool's {array.dtype}, got {jnp.dtype(dtype)}")
