"""Blocks without owner and content: a stack of single blocks, or a buddy system of runs.

Any block serves as well as any other for attention, which reads through the block table, and for
the copies to host memory and back, which gather blocks on the device first, many times as fast as
the link to the host. So the stack is the default: nothing is ever refused for want of neighbours,
and it takes next to no time, some 0.01 to 0.03 us per block; the buddy system takes 0.08 to 0.7.
`contiguous_blocks` is for whoever reads the pool in runs, by a kernel or a copy of their own.

External fragmentation is the loss in storage utilisation because free storage lies in pieces that
are too small (Randell, A Note on Storage Fragmentation and Program Segmentation, CACM 1969). No
request of this pool ever loses any, with either list, since one block at a time will do. What is
lost to those who want runs is measured: the share of the pool that is free in runs shorter than
the `USEFUL_RUN` that a growing sequence is given where there is one. Three traces, requests at
their times (`python -m benchmarks.bench_kv_memory`, table in the README): 0.04 to 0.2 % with the
buddy system, 7 to 33 % with the stack; a sequence lies in 1 to 2 runs, with the stack in 76 to 711.

In a pool that is always full nobody keeps together what little is free: 2 to 4.5 % of the pool is
lost of 3 to 7 % that is free, with the stack 2 to 4.4 %. A sequence still lies in 29 to 78 runs
against 75 to 764. By the share of the free blocks alone instead of the whole pool, as in Gorman and
Whitcroft's index of unusable free space (2006), a full pool is therefore badly fragmented, 79 to
99 %, and rightly has next to nothing to offer. The share of the free blocks outside the longest run
is 6 to 98 % and says little: free blocks in two long runs are half outside.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

USEFUL_RUN = 16
"""Blocks in a row that a growing sequence gets where it can: of 1 to 32 the best as measured."""

_ROOM_TO_GROW = USEFUL_RUN.bit_length() - 1


class FreeList(Protocol):
    """Some of the blocks `0 .. num_blocks`, to be handed out and given back."""

    def __len__(self) -> int:
        """How many blocks it holds."""
        ...

    def take(self, count: int, after: int | None) -> list[int]:
        """Hand out `count` blocks, of which it holds enough.

        Args:
            count: how many.
            after: the block that they follow in a sequence; None if they are the first.
        """
        ...

    def give(self, blocks: Iterable[int]) -> None:
        """Take blocks back that it does not hold."""
        ...

    def blocks(self) -> list[int]:
        """All blocks that it holds."""
        ...


class StackFreeList:
    """Single blocks: the one given back last is handed out first, in constant time.

    Args:
        first: the lowest block; handed out first at the beginning.
        end: the one behind the highest.
    """

    def __init__(self, first: int, end: int) -> None:
        self._stack = list(range(end - 1, first - 1, -1))

    def __len__(self) -> int:
        return len(self._stack)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """As in `FreeList`; where the blocks lie is left to chance."""
        split = len(self._stack) - count
        blocks = self._stack[split:]
        del self._stack[split:]
        blocks.reverse()
        return blocks

    def give(self, blocks: Iterable[int]) -> None:
        """As in `FreeList`."""
        self._stack += blocks

    def blocks(self) -> list[int]:
        """As in `FreeList`, the next one first."""
        return self._stack[::-1]


class BuddyFreeList:
    """Runs of a power of two blocks, each aligned to its length (Knowlton, 1965).

    A run is split in halves until it fits what is asked for, and merged with its buddy, the other
    half, as soon as both are free: O(log blocks) steps each. A sequence grows into the block
    behind its last one where that is free, else into the shortest run with room for more, so that
    two that grow in turns do not get into each other's way. What else is asked for comes from the
    shortest run that holds it, or from the longest ones there are.

    Args:
        first: the lowest block.
        end: the one behind the highest.
    """

    def __init__(self, first: int, end: int) -> None:
        self._order_at = [-1] * (1 << (end - 1).bit_length())  # of the free run that starts there
        self._runs: list[dict[int, None]] = [{} for _ in range(end.bit_length() + 1)]
        self._num_free = 0
        self._give_range(first, end)

    def __len__(self) -> int:
        return self._num_free

    def take(self, count: int, after: int | None = None) -> list[int]:
        """As in `FreeList`."""
        blocks: list[int] = []
        while after is not None and len(blocks) < count and self._take_block(after + 1):
            after += 1
            blocks.append(after)
        while len(blocks) < count:
            start, order = self._run_for(count - len(blocks), after is not None)
            length = min(1 << order, count - len(blocks))
            self._remove(start, order)
            self._give_range(start + length, start + (1 << order))
            blocks += range(start, start + length)
        return blocks

    def give(self, blocks: Iterable[int]) -> None:
        """As in `FreeList`."""
        ordered = sorted(blocks)
        start = 0
        for at in range(1, len(ordered) + 1):
            if at == len(ordered) or ordered[at] != ordered[at - 1] + 1:
                self._give_range(ordered[start], ordered[at - 1] + 1)
                start = at

    def blocks(self) -> list[int]:
        """As in `FreeList`, in ascending order."""
        return [
            block for start, order in self.runs() for block in range(start, start + (1 << order))
        ]

    def runs(self) -> list[tuple[int, int]]:
        """The free runs, as the first block and the binary logarithm of the length, ascending."""
        return sorted((start, order) for order, runs in enumerate(self._runs) for start in runs)

    def _run_for(self, count: int, grows: bool) -> tuple[int, int]:
        """A free run for `count` blocks or some of them: its start and order."""
        wanted = (count - 1).bit_length()
        roomy = range(max(wanted, _ROOM_TO_GROW), len(self._runs)) if grows else ()
        orders = (*roomy, *range(wanted, len(self._runs)), *range(wanted - 1, -1, -1))
        order = next(order for order in orders if self._runs[order])
        return next(reversed(self._runs[order])), order

    def _take_block(self, block: int) -> bool:
        """Cut one block out of the free run that holds it, if one does."""
        for order in range(len(self._runs)):
            start = block >> order << order
            if start < len(self._order_at) and self._order_at[start] == order:
                self._remove(start, order)
                self._give_range(start, block)
                self._give_range(block + 1, start + (1 << order))
                return True
        return False

    def _give_range(self, start: int, end: int) -> None:
        """Give back neighbouring blocks as the longest aligned runs."""
        while start < end:
            order = (end - start).bit_length() - 1
            if start:
                order = min(order, (start & -start).bit_length() - 1)
            self._give_run(start, order)
            start += 1 << order

    def _give_run(self, start: int, order: int) -> None:
        """Give back an aligned run and merge it with its buddies."""
        self._num_free += 1 << order
        while order + 1 < len(self._runs):
            buddy = start ^ (1 << order)
            if buddy >= len(self._order_at) or self._order_at[buddy] != order:
                break
            del self._runs[order][buddy]
            self._order_at[buddy] = -1
            start = min(start, buddy)
            order += 1
        self._order_at[start] = order
        self._runs[order][start] = None

    def _remove(self, start: int, order: int) -> None:
        del self._runs[order][start]
        self._order_at[start] = -1
        self._num_free -= 1 << order
