"""Copies of blocks inside the pool, beside numpy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.engine.block_copies import BlockCopier, copy_blocks

SHAPE = (40, 2, 2, 16, 8)


def make_pool(layers=3):
    keys = jax.random.split(jax.random.key(0), layers)
    return [jax.random.normal(key, SHAPE) for key in keys]


def copier_for(pool, max_copies):
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in pool]
    return BlockCopier(abstract, max_copies)


@pytest.mark.parametrize(
    "pairs",
    [
        [(3, 4)],
        [(3, 4), (3, 5), (3, 6)],
        [(3, 4), (5, 3)],  # a source that is a destination is read before it is written
        [(7, 8), (8, 7)],
        [(i, 39 - i) for i in range(1, 19)],
    ],
)
def test_destinations_hold_what_the_sources_held_before(pairs):
    pool = make_pool()
    before = [np.asarray(layer) for layer in pool]
    copied = copier_for(pool, 32)(pool, np.array(pairs, np.int32))
    sources, destinations = zip(*pairs, strict=True)
    for old, new in zip(before, copied, strict=True):
        want = old.copy()
        want[list(destinations)] = old[list(sources)]
        np.testing.assert_array_equal(np.asarray(new), want)


def test_keys_and_values_of_two_arrays_are_copied_together():
    keys, values = make_pool(2)
    pool = [(keys[:, :1], values[:, :1].astype(jnp.int8))]
    before = [np.asarray(array) for array in pool[0]]
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), pool
    )
    (copied,) = BlockCopier(abstract, 8)(pool, np.array([(3, 4)], np.int32))
    for old, new in zip(before, copied, strict=True):
        want = old.copy()
        want[4] = old[3]
        np.testing.assert_array_equal(np.asarray(new), want)


def test_compiled_sizes_hold_every_number_of_copies_up_to_the_limit():
    pool = make_pool(1)
    copier = copier_for(pool, 20)
    for size in copier.sizes:
        copier.compile(size)
    assert copier.sizes[-1] == 20
    assert all(copier.is_compiled(number) for number in range(1, 21))


def test_the_pool_is_copied_in_place():
    """A donated pool whose copy needed a second pool would halve what fits."""
    pool = [jnp.zeros((1000, *SHAPE[1:])) for _ in range(2)]
    compiled = (
        jax.jit(copy_blocks, donate_argnums=(0,)).lower(pool, jnp.zeros((8, 2), int)).compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool[0].nbytes
    assert memory.temp_size_in_bytes < pool[0].nbytes / 10
