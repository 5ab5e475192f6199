"""The pool of KV blocks: who owns which block, and which are free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

NULL_BLOCK = 0
"""Padding rows of a step write here; it holds no real data and is never handed out."""


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for."""


class BlockPool:
    """Reference-counted KV blocks.

    Invariant: a block other than the null block is free if and only if nobody owns it.

    Args:
        num_blocks: blocks of the pool, the null block included.

    Raises:
        ValueError: there is no block besides the null block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool has at least 2 blocks, got {num_blocks=}")
        self._owners = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: lowest ids first

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return len(self._owners)

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._blank)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return len(self._owners) - 1 - self.num_free

    def num_owners(self, block: int) -> int:
        """How many owners a block has."""
        return self._owners[block]

    def free_blocks(self) -> list[int]:
        """Free blocks, the next one to be handed out first."""
        return self._blank[::-1]

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks with one owner each, or none at all.

        Raises:
            OutOfBlocks: fewer than `count` blocks are free; nothing has changed.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"asked for {count} blocks, {self.num_free} are free")
        blocks = [self._blank.pop() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one ownership per entry; a block that nobody owns becomes free.

        A block may be listed as often as it has owners. Nobody owns the null block.

        Raises:
            ValueError: a block is listed more often than it is owned; nothing has changed.
        """
        blocks = list(blocks)
        for block, times in Counter(blocks).items():
            owned = self._owners[block] if 0 <= block < len(self._owners) else 0
            if times > owned:
                raise ValueError(f"block {block} released {times} times, it is owned {owned} times")
        for block in blocks:
            self._owners[block] -= 1
            if not self._owners[block]:
                self._blank.append(block)
