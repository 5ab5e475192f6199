"""Copies whole blocks inside the KV pool: what copy-on-write asks of the device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from pagedjax.engine.buckets import ladder
from pagedjax.engine.kv_pool import KVPool

_SMALLEST, _GROWTH = 8, 8


def copy_blocks(pool: KVPool, pairs: Int[Array, "copies 2"]) -> KVPool:
    """The pool with some blocks overwritten by others, in every layer. Pure; donate the pool.

    All sources are read before any destination is written.

    Args:
        pool: arrays whose first axis is the block.
        pairs: source and destination block of each copy; (0, 0) is padding and changes nothing.
    """
    source, destination = pairs[:, 0], pairs[:, 1]
    return jax.tree.map(lambda blocks: blocks.at[destination].set(blocks[source]), pool)


class BlockCopier:
    """`copy_blocks`, compiled ahead of time for a few numbers of copies.

    Args:
        pool: abstract arrays of the pool, with their shardings.
        max_copies: most copies of one step.
    """

    def __init__(self, pool: Any, max_copies: int) -> None:
        self._pool = pool
        self._compiled: dict[int, Any] = {}
        self.sizes = ladder(min(_SMALLEST, max_copies), max_copies, _GROWTH)

    def compile(self, size: int) -> Any:
        """Compile for `size` copies, unless that has been done; the pool is donated."""
        if size not in self._compiled:
            where = jax.tree.leaves(self._pool)[0].sharding
            pairs = jax.ShapeDtypeStruct((size, 2), np.int32, sharding=where)
            traced = jax.jit(copy_blocks, donate_argnums=(0,)).lower(self._pool, pairs)
            self._compiled[size] = traced.compile()
        return self._compiled[size]

    def is_compiled(self, num_copies: int) -> bool:
        """Whether a step with so many copies compiles nothing."""
        return self._fit(num_copies) in self._compiled

    def __call__(self, pool: KVPool, copies: np.ndarray) -> KVPool:
        """The pool after `copies`, int32[num_copies, 2]; does not wait for the device."""
        size = self._fit(len(copies))
        padded = np.zeros((size, 2), np.int32)
        padded[: len(copies)] = copies
        return self.compile(size)(pool, padded)

    def _fit(self, num_copies: int) -> int:
        return next(size for size in self.sizes if num_copies <= size)
