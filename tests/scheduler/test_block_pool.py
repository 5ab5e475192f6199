"""The block pool's promises."""

import numpy as np
import pytest

from scheduler import NULL_BLOCK, BlockPool, OutOfBlocks
from scheduler.prefix_index import ROOT


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, block_size=16)


def test_every_block_but_the_null_block_is_handed_out_once():
    pool = make_pool(6)
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_take_is_all_or_nothing():
    pool = make_pool(4)
    pool.take(1)
    free = pool.free_blocks()
    with pytest.raises(OutOfBlocks, match="asked for 3 blocks, 2 are free"):
        pool.take(3)
    assert pool.free_blocks() == free
    assert pool.take(0) == []


def test_released_blocks_can_be_taken_again():
    pool = make_pool(3)
    blocks = pool.take(2)
    pool.release(blocks)
    assert [pool.num_owners(block) for block in blocks] == [0, 0]
    assert sorted(pool.take(2)) == sorted(blocks)


@pytest.mark.parametrize("extra", [[3], [3, 3], [1, 1], [2, 1, 2], [99], [-1]])
def test_releasing_more_often_than_owned_changes_nothing(extra: list[int]):
    """BM12, BM13: a block given back twice would later have two owners."""
    pool = make_pool(5)
    assert pool.take(2) == [1, 2]
    free = pool.free_blocks()
    with pytest.raises(ValueError, match=r"block -?\d+ released \d times, it is owned \d times"):
        pool.release([1, *extra])
    assert pool.free_blocks() == free
    assert [pool.num_owners(block) for block in range(5)] == [0, 1, 1, 0, 0]


def test_a_negative_block_is_not_taken_for_one_at_the_end():
    pool = make_pool(3)
    pool.take(2)
    with pytest.raises(ValueError, match="block -1 released 1 times, it is owned 0 times"):
        pool.release([-1])


def test_a_shared_block_is_free_when_its_last_owner_has_released_it():
    pool = make_pool(3)
    (block,) = pool.take(1)
    pool.index.add([block], ROOT, np.arange(16, dtype=np.int32).tobytes())
    pool.share([block])
    pool.release([block])
    assert pool.num_owners(block) == 1 and block not in pool.free_blocks()
    pool.share([block])
    pool.release([block, block])  # both owners at once
    assert pool.num_owners(block) == 0 and pool.free_blocks() == [2, block]
    pool.share([block])
    assert pool.num_owners(block) == 1 and pool.free_blocks() == [2]


@pytest.mark.parametrize("blocks", [[NULL_BLOCK], [NULL_BLOCK, 4], [4, NULL_BLOCK]])
def test_the_null_block_cannot_be_released(blocks: list[int]):
    """BM13: a placeholder among the blocks must not enter the free list."""
    pool = make_pool(6)
    pool.take(5)
    with pytest.raises(ValueError, match="block 0 released 1 times, it is owned 0 times"):
        pool.release(blocks)
    assert pool.num_free == 0


def test_a_pool_of_nothing_but_the_null_block_is_refused():
    with pytest.raises(ValueError, match="at least 2 blocks, got num_blocks=1"):
        make_pool(1)


def test_forgotten_blocks_are_blank():
    pool = make_pool(5)
    blocks = pool.take(3)
    pool.index.add(blocks, ROOT, np.arange(48, dtype=np.int32).tobytes())
    pool.release(blocks[1:])
    pool.forget()
    assert not any(block in pool.index for block in range(5)) and len(pool.index) == 0
    assert sorted(pool.free_blocks()) == [2, 3, 4]
    pool.release(blocks[:1])  # owned when it was forgotten
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
