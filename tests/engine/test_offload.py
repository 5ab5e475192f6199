"""Copies of whole blocks to host memory and back, in the order of the steps around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.engine import offload
from pagedjax.engine.offload import BlockMover

BLOCKS = 40
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int8"]


def make_pool(dtype, layers=3, seed=0, num_blocks=BLOCKS):
    """Random values of all sizes, NaN, infinities and both zeros among them where there are."""
    rng = np.random.default_rng(seed)
    shape = (num_blocks, 2, 2, 16, 4)
    values = rng.normal(size=(layers, *shape)) * 2.0 ** rng.integers(-6, 7, (layers, *shape))
    if dtype != "int8":
        values.ravel()[::17] = rng.choice([np.nan, np.inf, -np.inf, -0.0], values[..., 0].size)[
            : len(values.ravel()[::17])
        ]
    return [jnp.asarray(layer.astype(np.dtype(dtype))) for layer in values]


def raw(pool):
    """uint8[layers, blocks, bytes]."""
    return np.stack([np.asarray(x).reshape(BLOCKS, -1).view(np.uint8) for x in pool])


def mover_for(pool, num_slots=60):
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in pool]
    return BlockMover(abstract, num_slots)


def pairs(*columns):
    return np.stack([np.asarray(c, np.int32) for c in columns], axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 5, 39])
def test_blocks_come_back_with_the_same_bits(dtype, count):
    rng = np.random.default_rng(count)
    pool = make_pool(dtype)
    before = raw(pool)
    mover = mover_for(pool)
    blocks = rng.permutation(np.arange(1, BLOCKS))[:count]
    slots = rng.permutation(60)[:count]
    targets = rng.permutation(np.arange(1, BLOCKS))[:count]
    mover.store(pool, pairs(blocks, slots))
    other = make_pool(dtype, seed=1)
    untouched = raw(other)
    after = raw(mover.load(other, pairs(slots, targets)))
    np.testing.assert_array_equal(after[:, targets], before[:, blocks])
    rest = np.setdiff1d(np.arange(BLOCKS), targets)
    np.testing.assert_array_equal(after[:, rest], untouched[:, rest])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_pool_is_updated_in_place(dtype):
    """Temporary memory does not grow with the pool, for dtypes that XLA scatters on a CPU."""
    temporary = []
    for num_blocks in (BLOCKS, 50 * BLOCKS):
        scatter = mover_for(make_pool(dtype, num_blocks=num_blocks))._scatter(16)
        temporary.append(scatter.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1]


def test_a_slot_holds_the_bytes_of_all_layers_in_order():
    pool = make_pool("bfloat16")
    mover = mover_for(pool)
    mover.store(pool, pairs([7], [3]))
    content = np.asarray(mover.content(3)).view(np.uint8)
    assert content.nbytes == mover.block_bytes == 3 * 2 * 2 * 16 * 4 * 2
    np.testing.assert_array_equal(content, raw(pool)[:, 7].ravel())


def test_bytes_from_elsewhere_fill_a_slot():
    pool = make_pool("float32")
    mover = mover_for(pool)
    data = np.random.default_rng(1).integers(0, 256, mover.block_bytes + 1, np.uint8)[1:]
    mover.fill(5, data)
    np.testing.assert_array_equal(raw(mover.load(pool, pairs([5], [9])))[:, 9].ravel(), data)


def test_a_store_takes_the_block_as_it_is_between_two_steps():
    """OF05: the step before writes it and is not done yet; the step behind overwrites it."""
    pool = make_pool("float32")
    mover = mover_for(pool)
    mover.warm_up()
    spin = jnp.ones((300, 300))

    @jax.jit
    def slow_step(pool, value, spin):
        spin = jax.lax.fori_loop(0, 5, lambda _, x: x @ x / 300, spin)
        return [x.at[4].set(value + 0 * spin[0, 0]) for x in pool]

    for turn in range(1, 30):
        pool = slow_step(pool, jnp.float32(turn), spin)
        mover.store(pool, pairs([4], [turn]))
        pool = slow_step(pool, jnp.float32(-1), spin)
    for turn in range(1, 30):
        assert (np.asarray(mover.content(turn)).view(np.float32) == turn).all()


def test_pairs_can_be_overwritten_as_soon_as_the_call_returns():
    """OF11: one array of pairs for all steps, changed right after each."""
    pool = make_pool("float32")
    before = raw(pool)
    mover = mover_for(pool, num_slots=BLOCKS)
    reused = np.zeros((1, 2), np.int32)
    for block in range(1, BLOCKS):
        reused[:] = block
        mover.store(pool, reused)
        reused[:] = 0
    for block in range(1, BLOCKS):
        content = np.asarray(mover.content(block)).view(np.uint8)
        np.testing.assert_array_equal(content, before[:, block].ravel())


def test_what_was_prefetched_is_loaded_unless_the_slot_was_filled_again():
    pool = make_pool("float32")
    before = raw(pool)
    mover = mover_for(pool)
    mover.store(pool, pairs([1, 2, 3], [10, 11, 12]))
    mover.prefetch([10, 11])
    mover.store(pool, pairs([4], [11]))
    mover.fill(12, before[:, 5].ravel())
    after = raw(mover.load(pool, pairs([10, 11, 12], [20, 21, 22])))
    np.testing.assert_array_equal(after[:, [20, 21, 22]], before[:, [1, 4, 5]])


def test_a_sequence_larger_than_the_staging_memory_goes_through_in_parts(monkeypatch):
    pool = make_pool("float32")
    before = raw(pool)
    block_bytes = mover_for(pool).block_bytes
    monkeypatch.setattr(offload, "STAGED_BYTES", 8 * block_bytes)
    mover = mover_for(pool)
    assert mover.sizes == (1, 4)
    everything = np.arange(1, BLOCKS)
    mover.prefetch([])
    mover.store(pool, pairs(everything, everything))
    assert mover._staged_bytes <= 8 * block_bytes
    after = raw(mover.load(make_pool("float32", seed=2), pairs(everything, everything)))
    np.testing.assert_array_equal(after[:, 1:], before[:, 1:])


def test_nothing_is_compiled_after_the_warm_up():
    pool = make_pool("bfloat16")
    mover = mover_for(pool)
    mover.warm_up()
    everything = np.arange(1, BLOCKS)
    for count in range(BLOCKS):
        some = pairs(everything[:count], everything[:count])
        mover.store(pool, some)
        pool = mover.load(pool, some)
    assert mover.compiles_after_warmup == 0


def test_measuring_the_link_changes_nothing():
    pool = make_pool("float32")
    before = raw(pool)
    pool, rates = mover_for(pool).measure(pool)
    np.testing.assert_array_equal(raw(pool), before)
    assert rates.store_bytes_per_s > 0 and rates.load_bytes_per_s > 0


def test_blocks_that_are_no_whole_words_are_refused():
    pool = [jnp.zeros((BLOCKS, 3), jnp.int8)]
    with pytest.raises(ValueError, match="has 3 bytes"):
        mover_for(pool)


def test_a_device_without_pinned_memory_is_refused():
    class Memory:
        kind = "device"

    class Device:
        def addressable_memories(self):
            return [Memory()]

        def __str__(self):
            return "toaster:0"

    with pytest.raises(ValueError, match=r"toaster:0 has \['device'\]"):
        offload.pinned_memory(Device())
