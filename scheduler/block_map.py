"""What every block of the pool is used for, and the fragmentation that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.block_pool import NULL_BLOCK
from scheduler.free_lists import USEFUL_RUN
from scheduler.plan import Int32
from scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockMap:
    """A picture of the pool; the null block is left out, so entry `i` is block `i + 1`.

    Attributes:
        block_size: tokens per block.
        used: bool[blocks], whether somebody owns the block.
        cached: bool[blocks], whether it is free and still holds a prefix that may be found.
        tokens: int32[blocks], tokens that a used block holds for its owners; 0 for the others.
    """

    block_size: int
    used: NDArray[np.bool_]
    cached: NDArray[np.bool_]
    tokens: Int32

    @property
    def internal_fragmentation(self) -> float:
        """Share of the used blocks' positions that hold no token, 0 to 1; 0 if none is used.

        Sequences waste at most the end of their last block. A block that is shared counts once.
        """
        slots = int(self.used.sum()) * self.block_size
        return 1.0 - int(self.tokens.sum()) / slots if slots else 0.0

    @property
    def external_fragmentation(self) -> float:
        """As the function of this name; cached blocks count as free."""
        return external_fragmentation(self.used)

    def regions(self, count: int) -> tuple[Int32, Int32, Int32]:
        """Blocks, used ones and cached ones in `count` regions of neighbours, int32[count] each.

        Regions differ by at most one block; a pool of fewer blocks has as many regions.
        """
        count = min(count, len(self.used))
        bounds = np.arange(count) * len(self.used) // count
        size = np.diff(bounds, append=len(self.used)).astype(np.int32)
        used, cached = (
            np.add.reduceat(flags.astype(np.int32), bounds) for flags in (self.used, self.cached)
        )
        return size, used, cached


def external_fragmentation(used: NDArray[np.bool_]) -> float:
    """Share of a pool lost to whoever wants runs of neighbours, 0 to 1: free in shorter ones.

    Wanted are runs of `USEFUL_RUN` blocks, or of all free blocks if there are fewer. Nobody who
    takes blocks one by one, as the scheduler's sequences may, loses anything
    (`scheduler.free_lists` has the source and compares definitions).

    Args:
        used: bool[blocks], whether somebody owns the block.
    """
    free = np.flatnonzero(~used)
    if not free.size:
        return 0.0
    ends = np.flatnonzero(np.diff(free, append=free[-1] + 2) > 1)
    runs = np.diff(ends, prepend=-1)
    return int(runs[runs < min(USEFUL_RUN, free.size)].sum()) / used.size


def block_map(scheduler: Scheduler) -> BlockMap:
    """The pool of a scheduler as it is now; takes time in proportion to its blocks."""
    pool, size = scheduler.blocks.pool, scheduler.config.block_size
    used = np.zeros(pool.num_blocks, np.bool_)
    cached = np.zeros(pool.num_blocks, np.bool_)
    tokens = np.zeros(pool.num_blocks, np.int32)
    used[1:] = True
    free = pool.free_blocks()
    used[free] = False
    cached[[block for block in free if block in pool.index]] = True
    for seq in scheduler.sequences():
        blocks = np.array(seq.blocks, np.int32)
        starts = np.arange(len(blocks), dtype=np.int32) * size
        held = np.clip(seq.num_computed - starts, 0, size)
        tokens[blocks] = np.maximum(tokens[blocks], held)
    tokens[NULL_BLOCK] = 0
    return BlockMap(block_size=size, used=used[1:], cached=cached[1:], tokens=tokens[1:])
