"""Blocks without owner and content: a stack of single blocks, or a buddy system of runs.

Any block serves as well as any other for attention, which reads through the block table. What a
contiguous run is good for are copies: a sequence that is swapped, moved to another tier or
restored takes one copy per run.

The stack is the default, since attention is as fast either way, nothing is ever refused for want of
neighbours, and it takes next to no time: a few hundredths of a microsecond per block, the buddy
system 0.1 to 0.8. `contiguous_blocks` is for engines that move sequences in runs. Measured on three
traces (`benchmarks/results/kv_memory.jsonl`), requests at the times of the trace:

- A sequence lies in 1 to 2 runs, with the stack in 76 to 711.
- External fragmentation, as the share of the free blocks in runs shorter than what is wanted
  (Gorman and Whitcroft's index of unusable free space): for runs of 8 blocks 0.01 to 0.3 %, with
  the stack 4 to 79 %; for runs of 64, 0.3 to 6 % against 8 to 95 %. For whole prompts 1 to 2 % on
  the Azure traces, but 39 % on Mooncake's, whose prompts take 415 blocks in the middle (stack: 8,
  12 and 98 %); one in seven of them fits into no single run.
- The share outside the longest run, an older definition, is 6 to 80 %, and says little: free blocks
  in two long runs are half outside.

In a pool that is always full, with 3 to 7 % of its blocks free, nobody keeps these together: runs
shorter than 8 hold 45 to 90 % of them, with the stack 34 to 72 %. A sequence still lies in 29 to 78
runs against 75 to 764.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

_ROOM_TO_GROW = 4  # binary logarithm of the blocks; of 0 to 5 the best on both loads measured


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
