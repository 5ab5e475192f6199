"""The pool of KV blocks: who owns which block, and which are free."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from scheduler.free_lists import BuddyFreeList, FreeList, StackFreeList
from scheduler.prefix_index import PrefixIndex

NULL_BLOCK = 0
"""Padding rows of a step write here; it holds no real data and is never handed out."""


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for."""


class BlockPool:
    """Reference-counted KV blocks, of which the free ones may still hold a known prefix.

    Invariant: a block other than the null block is free if and only if nobody owns it. A free
    block whose content is in the index keeps it until it is handed out again, which happens to
    blocks without content first and then in the order in which they became free.

    Args:
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens per block.
        contiguous: whether runs of neighbouring blocks are kept together and handed out together
            (`BuddyFreeList`), or the blocks are handed out as they come (`StackFreeList`).
        durable: as for `PrefixIndex`.

    Attributes:
        index: what the blocks hold; the owners of full blocks add them.
        num_evicted: free blocks with content in the index that were handed out so far.

    Raises:
        ValueError: there is no block besides the null block.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, contiguous: bool = False, durable: bool = False
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool has at least 2 blocks, got {num_blocks=}")
        self.index = PrefixIndex(num_blocks, block_size, durable=durable)
        self._owners = [0] * num_blocks
        free_list = BuddyFreeList if contiguous else StackFreeList
        self._blank: FreeList = free_list(NULL_BLOCK + 1, num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.num_evicted = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return len(self._owners)

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content is in the index."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return len(self._owners) - 1 - self.num_free

    def num_owners(self, block: int) -> int:
        """How many owners a block has."""
        return self._owners[block]

    def free_blocks(self) -> list[int]:
        """Free blocks, those without content before the others."""
        return [*self._blank.blocks(), *self._cached]

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Hand out `count` blocks with one owner each, or none at all.

        Args:
            count: how many.
            after: the block that they follow in a sequence, None if there is none.

        Raises:
            OutOfBlocks: fewer than `count` blocks are free; nothing has changed.
        """
        short = count - len(self._blank)
        if short > len(self._cached):
            raise OutOfBlocks(f"asked for {count} blocks, {self.num_free} are free")
        for _ in range(short):
            block, _ = self._cached.popitem(last=False)
            self.index.discard(block)
            self._blank.give([block])
            self.num_evicted += 1
        blocks = self._blank.take(count, after)
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Become one more owner of each block; each is owned already, or is in the index."""
        for block in blocks:
            assert self._owners[block] or block in self.index, f"block {block} holds nothing"
            if not self._owners[block]:
                del self._cached[block]
            self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one ownership per entry; a block that nobody owns becomes free.

        Blocks that are listed first are evicted first. A block may be listed as often as it has
        owners. Nobody owns the null block.

        Raises:
            ValueError: a block is listed more often than it is owned; nothing has changed.
        """
        listed = Counter(blocks)
        for block, times in listed.items():
            owned = self._owners[block] if 0 <= block < len(self._owners) else 0
            if times > owned:
                raise ValueError(f"block {block} released {times} times, it is owned {owned} times")
        blank: list[int] = []
        for block, times in listed.items():
            self._owners[block] -= times
            if not self._owners[block]:
                if block in self.index:
                    self._cached[block] = None
                else:
                    blank.append(block)
        self._blank.give(blank)

    def forget(self) -> None:
        """Drop all content from the index; owners keep their blocks."""
        self._blank.give(self._cached)
        self._cached.clear()
        self.index.clear()
