"""A digest of parameters: whether what was computed with some weights is of use with others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

_SEEDS = (0x9E3779B9, 0x85EBCA6B)


def weights_digest(params: Mapping[str, jax.Array]) -> bytes:
    """16 bytes that change, but for an accident of 2^-64, when any parameter changes in any bit.

    Each array is reduced where it lies, to 64 bits that depend on every element and its place: a
    pass over the weights at memory speed, without a copy. It guards against mistakes, not
    against somebody who looks for weights with the same digest.

    Args:
        params: arrays by name.
    """
    sums = {name: _checksum(array) for name, array in params.items()}
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(params):
        digest.update(f"{name} {params[name].shape} {params[name].dtype};".encode())
        digest.update(np.asarray(sums[name]).tobytes())
    return digest.digest()


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """Two sums, modulo 2^32, of mixed (element, position) pairs; uint32[2]."""
    unsigned = jnp.dtype(f"uint{8 * min(array.dtype.itemsize, 4)}")
    bits = jax.lax.bitcast_convert_type(array, unsigned).reshape(-1).astype(jnp.uint32)
    place = jax.lax.iota(jnp.uint32, bits.size) * jnp.uint32(2) + jnp.uint32(1)
    return jnp.stack([_mixed(bits, place, seed).sum(dtype=jnp.uint32) for seed in _SEEDS])


def _mixed(bits: jax.Array, place: jax.Array, seed: int) -> jax.Array:
    """Spread every bit over the word, differently at every place (Murmur3's finalizer)."""
    mixed = (bits ^ jnp.uint32(seed)) * place
    mixed = (mixed ^ (mixed >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> jnp.uint32(16))
